"""What a chain takes of its device's memory, stated before a weight is loaded. No torch in here.

The bytes are those of weights as they lie when loaded, of caches for the whole context, and of the
workspace of a pass, by the configs and the headers of weight files; `MARGIN` is for all the rest.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil, prod
from typing import Any, Literal

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.readable import readable_bytes
from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES, DEVICE_STEP, GROUP
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig, HeadConfig
from polybasic.chain.formats.checkpoints.kinds import Kind
from polybasic.chain.formats.checkpoints.names import DRAFT_TABLES, has_lm_head, model_names
from polybasic.chain.formats.checkpoints.quantization import DRAFT_GROUP_SIZE, GROUP_SIZE
from polybasic.chain.formats.checkpoints.shapes import TensorHeader, expected_shapes, tensor_headers
from polybasic.chain.formats.checkpoints.shard import Shard
from polybasic.chain.formats.head_kinds.early_exit import ADAPTER_DOWN, ADAPTER_UP
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS
from polybasic.chain.formats.lineage import find_steered
from polybasic.chain.formats.plan import MAX_TREE_ROWS
from polybasic.chain.formats.verify import CheckedChain

MARGIN = 1.2
"""Factor of the sum, for what the formula leaves out (benchmarks/memory.py)."""

Kernels = Literal["eager", "native", "device"]
"""What multiplies: PyTorch's operations, the CPU's kernels, or the GPU's."""
Form = Literal["kept", "dense", "int4", "rounded", "checked", "blocks"]
"""How a weight lies: as a tensor of its own, as a dense product's, as a 4-bit product's, as a draft
head's product, which is rounded to 4 bits where kernels read those, as the output projection of a
model whose tokens another one checks, which is rounded to 8, or in a GGUF file's blocks, whose
bytes are counted in place of weights."""

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_ROUNDED_DTYPES = {"eager": (), "native": ("bfloat16",), "device": ("bfloat16", "float16")}
_SCALE_BYTES = {"eager": 4, "native": 3, "device": 4}
"""Of a 4-bit group's scale and zero, as kernels read them."""
_MAKING_BYTES: dict[Form, float] = {
    "kept": 4,
    "dense": 4,
    "int4": 10,
    "rounded": 6,
    "checked": 6,
    "blocks": 8,
}
"""Of a weight while it is converted, beside what stays of it."""
_LIBRARY_BYTES = 250_000_000
"""That libraries and the kernels' buffers take when a first chain is loaded and answers."""
_GROUP_BYTES = 100_000_000
"""That each of several processes takes more, to talk to the others."""


@dataclass(frozen=True)
class Layout:
    """How weights lie on a device.

    Attributes:
        device: "cpu" or "cuda".
        dtype: of weights and caches.
        kernels: that multiply.
        widened: dtypes whose products PyTorch's operations compute in float32, with weights kept
            so.
        in_few_bits: of a model that is stored in 4 to 8 bits, and of its heads.
    """

    device: str
    dtype: str
    kernels: Kernels
    widened: tuple[str, ...] = ()
    in_few_bits: bool = False

    @property
    def item_bytes(self) -> int:
        """Of one value in `dtype`."""
        return _ITEM_BYTES[self.dtype]

    @property
    def rounds_heads(self) -> bool:
        """Whether draft heads are rounded to 4 bits."""
        return self.dtype in _ROUNDED_DTYPES[self.kernels] or self.rounds_checked

    @property
    def rounds_checked(self) -> bool:
        """Whether output projections below the target are rounded to 8 bits."""
        return self.kernels == "native" and (self.dtype == "bfloat16" or self.in_few_bits)

    def weight_bytes(self, group_size: int | None = None) -> dict[Form, float]:
        """Of one weight once it is loaded.

        Args:
            group_size: of weights in 4 bits; None of a model that has none.
        """
        dense = 4 if self.dtype in self.widened else self.item_bytes
        packed, int4 = self._packed_bytes(group_size or GROUP_SIZE), float(dense)
        if self.kernels != "eager":
            int4 = packed
        elif self.device == "cpu":
            # PyTorch's 4-bit product is for few rows; more of them read a copy in bfloat16
            int4 = packed + (4 if "bfloat16" in self.widened else 2)
        rounded = self._packed_bytes(DRAFT_GROUP_SIZE) if self.rounds_heads else dense
        return {
            "kept": self.item_bytes,
            "dense": dense,
            "int4": int4,
            "rounded": rounded,
            "checked": 1 + 2 / GROUP if self.rounds_checked else dense,
            "blocks": 1,
        }

    def _packed_bytes(self, group_size: int) -> float:
        """Of a weight in 4 bits with its share of the group's scale and zero."""
        return 0.5 + _SCALE_BYTES[self.kernels] / group_size


@dataclass(frozen=True)
class Memory:
    """A chain's bytes on its device.

    Attributes:
        layout: of the first member that is loaded.
        context_tokens: prompt and answer together; caches have `MAX_TREE_ROWS` rows more.
        members: bytes of "weights" and of "cache" by name, of all sequences; a cache that members
            share counts for the first of them.
        workspace_bytes: that are taken for a while beside those.
        sequences: that have caches.
        follower: what each of the other processes takes at most that share the verifying members
            with this one; None if there are none.
        num_parts: of these processes, this one included.
        cache_tokens: that the caches of all sequences hold together.
    """

    layout: Layout
    context_tokens: int
    members: dict[str, dict[str, int]]
    workspace_bytes: int
    sequences: int = 1
    follower: "Memory | None" = None
    num_parts: int = 1
    cache_tokens: int = 0

    @property
    def follower_bytes(self) -> int:
        """Most that each of the other processes takes, with the margin."""
        return 0 if self.follower is None else self.follower.peak_bytes

    @property
    def needed_bytes(self) -> int:
        """That one device has to give: to all processes on a CPU, to the largest on GPUs."""
        if self.layout.device == "cpu":
            return self.peak_bytes + (self.num_parts - 1) * self.follower_bytes
        return max(self.peak_bytes, self.follower_bytes)

    @property
    def staying_bytes(self) -> int:
        """Weights and caches."""
        return sum(sum(parts.values()) for parts in self.members.values())

    @property
    def peak_bytes(self) -> int:
        """Most that is taken at a time, with the margin."""
        return round(MARGIN * (self.staying_bytes + self.workspace_bytes))

    @property
    def shown(self) -> str:
        """What is taken, for people: by each of the processes where there are several."""
        shown = f"{readable_bytes(self.peak_bytes)} at most"
        if self.num_parts == 1:
            return shown
        others = f"each of {self.num_parts - 1} others" if self.num_parts > 2 else "the other"
        return f"{shown} in the first process, {readable_bytes(self.follower_bytes)} in {others}"

    @property
    def bytes_per_1000_tokens(self) -> int:
        """Of one sequence, without the workspace."""
        return round(1000 * self.token_bytes)

    @property
    def token_bytes(self) -> float:
        """That the caches hold of one token."""
        return sum(parts["cache"] for parts in self.members.values()) / self._num_rows

    @property
    def _num_rows(self) -> int:
        return self.cache_tokens + self.sequences * MAX_TREE_ROWS

    def holding(self, cache_tokens: int) -> "Memory":
        """The same with caches of so many tokens, of all sequences together."""
        other = replace(self, cache_tokens=cache_tokens)
        share = other._num_rows / self._num_rows
        members = {
            name: parts | {"cache": round(share * parts["cache"])}
            for name, parts in self.members.items()
        }
        return replace(other, members=members)

    def fitting(self, available_bytes: int) -> "Memory":
        """The same with caches of as many tokens as there is memory for, of one context at least,
        where the sequences need not hold a whole one each."""
        over = self.needed_bytes - available_bytes
        if over <= 0 or not self.token_bytes:
            return self
        left = self.cache_tokens - ceil(over / MARGIN / self.token_bytes)
        return self.holding(max(self.context_tokens, left))

    def check_fits(self, available_bytes: int) -> None:
        """Refuse a chain that needs more than there is.

        Raises:
            UserError: it does.
        """
        if self.needed_bytes <= available_bytes:
            return
        fewer = "" if self.cache_tokens == self.context_tokens else "fewer sequences or "
        or_dtype = " or dtype bfloat16" if self.layout.dtype == "float32" else ""
        raise UserError(
            "not enough memory",
            f"{readable_bytes(self.needed_bytes)} needed for {self._asked_for} "
            f"in {self.layout.dtype}, {readable_bytes(available_bytes)} available on "
            f"{self.layout.device}",
            f"use {fewer}a shorter context (1,000 tokens take "
            f"{readable_bytes(self.bytes_per_1000_tokens)}){or_dtype}, or free some",
        )

    @property
    def _asked_for(self) -> str:
        context = f"{self.context_tokens} tokens of context"
        if self.cache_tokens > self.context_tokens:
            context = f"{self.sequences} sequences of {context}"
        return context if self.num_parts == 1 else f"{context} by {self.num_parts} processes"

    def to_json(self) -> dict[str, Any]:
        """All of it, with the sums."""
        sums = ("staying_bytes", "workspace_bytes", "peak_bytes", "bytes_per_1000_tokens")
        parts = {"num_parts": self.num_parts, "follower_bytes": self.follower_bytes}
        return {
            **asdict(self.layout),
            "widened": [*self.layout.widened],
            "context_tokens": self.context_tokens,
            "sequences": self.sequences,
            "cache_tokens": self.cache_tokens,
            "members": self.members,
            **{name: getattr(self, name) for name in sums},
            **(parts if self.num_parts > 1 else {}),
        }


def state_memory(
    checked: CheckedChain,
    layout: Layout,
    context_tokens: int,
    *,
    others: Mapping[str, Layout] | None = None,
    share_caches: bool = True,
    sequences: int = 1,
    num_parts: int = 1,
) -> Memory:
    """What a chain will take; of weights, nothing but the headers of their files is read.

    Args:
        checked: the chain.
        layout: of the weights.
        context_tokens: prompt and answer together.
        others: layouts of members, by name, whose weights lie otherwise.
        share_caches: False gives every verifying member a cache of its own.
        sequences: that have caches of their own.
        num_parts: processes that the verifying members are divided among, as `check_divisible`
            allows; the first has all the rest.
    """
    layouts = {member.name: layout for member in checked.loaded} | dict(others or {})
    # beside a remote target, n-grams alone may be all that runs here
    first = layouts[checked.loaded[0].name] if checked.loaded else layout

    def stated(shard: Shard, follower: Memory | None = None) -> Memory:
        given = checked, layouts, first, context_tokens, share_caches, sequences, shard, follower
        return _state(*given)

    # where parts are not equal, the last is the largest
    follower = None if num_parts == 1 else stated(Shard(num_parts - 1, num_parts))
    return stated(Shard(0, num_parts), follower)


def _state(
    checked: CheckedChain,
    layouts: Mapping[str, Layout],
    first: Layout,
    context_tokens: int,
    share_caches: bool,
    sequences: int,
    shard: Shard,
    follower: Memory | None,
) -> Memory:
    found: dict[str, dict[str, int]] = {}
    above: tuple[object, ...] | None = None
    making, row_bytes = 0.0, 0
    for member in checked.loaded:
        if member.role == "drafter" and shard.rank > 0:
            continue
        file, layout = checked.configs[member.name], layouts[member.name]
        config, stored = file.of(member.kind), tensor_headers(file.folder)
        if member.role != "drafter":
            config = shard.local(config, file.group_size)
        given = member.kind, config, file.group_size, stored, layout, shard
        weights = list(_weights(*given, is_checked=member.role != "target"))
        weight_bytes = layout.weight_bytes(file.group_size)
        making = max(making, *(num * _MAKING_BYTES[form] for form, num in weights))
        row_bytes = max(row_bytes, _prompt_values(config, layout) * layout.item_bytes)
        values = _cached_values(config)
        if isinstance(config, HeadConfig) and HEAD_KINDS[config.kind].steers:
            steered = find_steered(member.name, file, checked.manifest.members, checked.configs)
            values += _cached_values(checked.configs[steered.name].decoder)
        cached = (context_tokens + MAX_TREE_ROWS) * values
        if member.role != "drafter":
            cached = 0 if share_caches and config.cache_shape == above else cached
            above = config.cache_shape
        found[member.name] = {
            "weights": round(sum(num * weight_bytes[form] for form, num in weights)),
            "cache": sequences * cached * layout.item_bytes,
        }
    passing = max(making, context_tokens * row_bytes)
    workspace = _LIBRARY_BYTES + (shard.count > 1) * _GROUP_BYTES + round(passing)
    whole = first, context_tokens, found, workspace, sequences
    return Memory(*whole, follower, shard.count, sequences * context_tokens)


def _weights(
    kind: Kind,
    config: DecoderConfig,
    group_size: int | None,
    stored: Mapping[str, TensorHeader],
    layout: Layout,
    shard: Shard,
    is_checked: bool,
) -> Iterator[tuple[Form, int]]:
    """Form and number of the weights of each tensor that is loaded; `stored` are all headers."""
    is_head = isinstance(config, HeadConfig)
    projection: Form = "checked" if is_checked and config.hidden_size % GROUP == 0 else "dense"
    outputs = shard.tokens(config) if not is_head else slice(0, config.vocab_size)
    own, embedding = "embed_tokens.weight", model_names(config).embedding
    has_own = is_head and HEAD_KINDS[kind].reads_own_embedding
    lm_head = (outputs.stop - outputs.start) * config.hidden_size
    # of rows that the kernels read as they are
    multiple = {"native": 1, "device": DEVICE_STEP, "eager": None}[layout.kernels]
    in_blocks = {
        name: header.num_bytes / prod(header.shape)
        for name, header in stored.items()
        if multiple and header.dtype in BLOCK_TYPES and header.shape[-1] % multiple == 0
    }
    for name, shape in expected_shapes(kind, config, group_size, stored.keys()):
        if name in in_blocks:
            size = lm_head if name == "lm_head.weight" else prod(shape)
            yield "blocks", round(in_blocks[name] * size)
        elif name == "lm_head.weight" and not is_head:
            yield projection, lm_head
        elif name.startswith((ADAPTER_DOWN, ADAPTER_UP)):
            yield "dense", prod(shape)
        elif name.endswith(".qweight"):
            yield "int4", 8 * prod(shape)
        elif name == embedding or len(shape) == 1 or (has_own and name == own):
            yield "kept", prod(shape)
        # a head reads its verifier's embedding; a 4-bit weight counts with its scales and zeros
        elif not name.endswith(("embed_tokens.weight", ".qzeros", ".scales")):
            yield "rounded" if is_head else "dense", prod(shape)
    is_copied = layout.device == "cpu" and layout.kernels != "device"
    is_tied = not is_head and not has_lm_head(config, stored)
    if is_tied and is_copied and embedding not in in_blocks:
        yield projection, lm_head
    reads_copy = layout.rounds_heads or shard.count > 1 or stored.keys() & {*DRAFT_TABLES}
    if isinstance(config, HeadConfig) and reads_copy and not HEAD_KINDS[kind].has_lm_head:
        # rows of its verifier's
        yield "rounded", config.num_draft_tokens * config.hidden_size


def _cached_values(config: DecoderConfig) -> int:
    """Of a row: keys and values, cosines and sines, and what a head observed of its verifier."""
    if isinstance(config, HeadConfig) and HEAD_KINDS[config.kind].shares_cache:
        return 0
    is_head, num_layers = isinstance(config, HeadConfig), config.num_layers
    if isinstance(config, HeadConfig):
        num_layers = len(HEAD_KINDS[config.kind].layers(config))
    attended = num_layers * config.num_kv_heads + (num_layers > 0) * len(config.kinds)
    return 2 * config.head_dim * attended + is_head * _state_values(config)


def _prompt_values(config: DecoderConfig, layout: Layout) -> int:
    """Of a row of a prompt: states, and but for native kernels, which read blocks, activations."""
    activations = 5 * config.hidden_size + 3 * config.intermediate_size
    return _state_values(config) + (0 if layout.kernels == "native" else activations)


def _state_values(config: DecoderConfig) -> int:
    """Of a row's states, which a head may read of several layers."""
    num_layers = len(config.feature_layers) if isinstance(config, HeadConfig) else 1
    return max(1, num_layers) * config.hidden_size
