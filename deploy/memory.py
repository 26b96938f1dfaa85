"""What a chain takes of its device's memory, stated before a weight is loaded. No torch in here.

Bytes follow from configs and from the headers of the weight files: weights as the runtime lays
them out, caches for the whole context, and what is taken for a while beside them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from polybasic.chain.errors import UserError
from polybasic.chain.formats.config import (
    DecoderConfig,
    HeadConfig,
    read_decoder_config,
    read_head_config,
)
from polybasic.chain.formats.manifest import HEAD_KINDS, MAX_TREE_ROWS, Member, Plan
from polybasic.chain.formats.shapes import tensor_headers
from polybasic.chain.formats.vocabulary import TOKENIZER_NAME
from polybasic.chain.readable import readable_bytes
from polybasic.deploy.weight_memory import Layout, WeightFiles

WEIGHT_KINDS = ("embedding", "lm_head", "linears", "int4", "norms", "draft_tokens")
CONTEXT_KINDS = ("cache", "observed", "mask", "rotary")
"""What grows with the context, in proportion."""
LIBRARY_BYTES = 150_000_000
"""Of the host: what torch and transformers take when a first chain is loaded and answers."""
TOKENIZER_BYTES = 13
"""Of the host, for each byte of tokenizer.json while it is read."""

_NATIVE_ROWS = 256
"""Of a native pass (chain/kernels/cpu/passes.py)."""
_LANES, _SEGMENT, _MOST_PARTIAL_VALUES = 16, 256, 8 << 20
"""Of native attention (chain/kernels/cpu/source/attention_plan.h)."""
_HELD_BYTES = 256_000_000
"""Most that the C library's allocator holds of the host's memory behind tensors of a pass."""
_BLOCK_ROWS = 512
"""Rows of a pass that needs a mask (chain/kernels/torch/attend.py)."""
_TAKING_APART_BYTES = 25
"""For each weight of a packed product while PyTorch's operations multiply by it."""
_SAMPLING_BYTES = 24
"""For each logit that is sampled from, beside itself: six float32."""


@dataclass(frozen=True)
class Memory:
    """A chain's bytes on its device.

    Attributes:
        layout: that they hold for.
        context_tokens: prompt and answer together; caches have `MAX_TREE_ROWS` rows more.
        members: by name and kind; a cache counts for the first of the members that share it.
        loading_bytes: most that is taken until all weights and caches are there.
        workspace_bytes: most that passes take beside all that stays: one over a prompt which fills
            the context, or one of a round; and the native kernels' buffers, which fill with use.
        process_bytes: libraries and tokenizer; 0 where the device has a memory of its own.
    """

    layout: Layout
    context_tokens: int
    members: dict[str, dict[str, int]]
    loading_bytes: int
    workspace_bytes: int
    process_bytes: int

    @property
    def staying_bytes(self) -> int:
        """Weights and caches."""
        return sum(sum(kinds.values()) for kinds in self.members.values())

    @property
    def peak_bytes(self) -> int:
        """Most that is taken at a time."""
        answering = self.staying_bytes + self.workspace_bytes
        return self.process_bytes + max(self.loading_bytes, answering)

    @property
    def bytes_per_1000_tokens(self) -> int:
        """Of the context, without the workspace."""
        grows = sum(self.bytes_of(name, CONTEXT_KINDS) for name in self.members)
        return round(1000 * grows / (self.context_tokens + MAX_TREE_ROWS))

    def bytes_of(self, member: str, kinds: Iterable[str]) -> int:
        """Of one member, of some kinds."""
        return sum(self.members[member].get(kind, 0) for kind in kinds)

    def check_fits(self, available_bytes: int) -> None:
        """Refuse a chain that needs more than there is.

        Raises:
            UserError: it does.
        """
        if self.peak_bytes <= available_bytes:
            return
        or_dtype = " or dtype bfloat16" if self.layout.dtype == "float32" else ""
        raise UserError(
            "not enough memory",
            f"{readable_bytes(self.peak_bytes)} needed for {self.context_tokens} tokens of context "
            f"in {self.layout.dtype}, {readable_bytes(available_bytes)} available on "
            f"{self.layout.device}",
            f"use a shorter context (1,000 tokens take "
            f"{readable_bytes(self.bytes_per_1000_tokens)}){or_dtype}, or free some",
        )

    def to_json(self) -> dict[str, Any]:
        """All of it, with the sums."""
        return {
            **vars(self.layout),
            "context_tokens": self.context_tokens,
            "members": self.members,
            "staying_bytes": self.staying_bytes,
            "loading_bytes": self.loading_bytes,
            "workspace_bytes": self.workspace_bytes,
            "process_bytes": self.process_bytes,
            "peak_bytes": self.peak_bytes,
            "bytes_per_1000_tokens": self.bytes_per_1000_tokens,
        }


def state_memory(
    members: Sequence[Member],
    folders: Mapping[str, Path],
    tokenizer: Path,
    plan: Plan,
    layout: Layout,
    context_tokens: int,
    *,
    share_caches: bool = True,
) -> Memory:
    """What a chain will take; of weights, nothing but the headers of their files is read.

    Args:
        members: of the chain, from the target down; all of them are loaded.
        folders: where each lies, by name.
        tokenizer: the folder of the tokenizer.
        plan: the one that runs.
        layout: of the weights.
        context_tokens: prompt and answer together.
        share_caches: False gives every verifying member a cache of its own.

    Raises:
        UserError: a config or a weight file that cannot be read.
    """
    capacity = context_tokens + MAX_TREE_ROWS
    configs = {member.name: _config(member, folders[member.name]) for member in members}
    bytes_by_kind: dict[str, dict[str, int]] = {}
    staying = peak = most_packed = 0
    for member in members:
        config = configs[member.name]
        kinds = bytes_by_kind[member.name] = {"rotary": _rotary_bytes(config, capacity, layout)}
        staying += kinds["rotary"]
        headers = tensor_headers(folders[member.name])
        for part in WeightFiles(member.kind, config, headers, layout).parts():
            peak = max(peak, staying + part.loading_bytes)
            staying += part.num_bytes
            kinds[part.kind] = kinds.get(part.kind, 0) + part.num_bytes
            most_packed = max(most_packed, part.num_packed)
    for name in _owners_of_caches(members, configs) if share_caches else configs:
        bytes_by_kind[name]["cache"] = _cache_bytes(configs[name], capacity, layout)
    for member in members:
        if member.role == "drafter":
            config = configs[member.name]
            bytes_by_kind[member.name] |= _drafting_bytes(config, capacity, plan, layout)
    return Memory(
        layout,
        context_tokens,
        bytes_by_kind,
        max(peak, sum(sum(kinds.values()) for kinds in bytes_by_kind.values())),
        _workspace_bytes(list(configs.values()), context_tokens, plan, layout, most_packed),
        _process_bytes(tokenizer, layout),
    )


def _config(member: Member, folder: Path) -> DecoderConfig:
    return read_head_config(folder) if member.kind in HEAD_KINDS else read_decoder_config(folder)


def _owners_of_caches(members: Sequence[Member], configs: Mapping[str, DecoderConfig]) -> list[str]:
    """Members with a cache of their own: an intermediate may share that of the member above."""
    verifying = [member.name for member in members if member.role != "drafter"]
    sharing = {
        below
        for above, below in pairwise(verifying)
        if _cache_shape(configs[below]) == _cache_shape(configs[above])
    }
    return [member.name for member in members if member.name not in sharing]


def _cache_shape(config: DecoderConfig) -> tuple[object, ...]:
    """As `polybasic.chain.model.decoder.Decoder.cache_shape`."""
    kinds = [config.kinds[config.kind_of(layer)] for layer in range(config.num_layers)]
    return kinds, config.num_kv_heads, config.head_dim, config.hidden_size


def _cache_bytes(config: DecoderConfig, capacity: int, layout: Layout) -> int:
    """Keys and values; a head has one layer."""
    num_layers = 1 if isinstance(config, HeadConfig) else config.num_layers
    return num_layers * 2 * config.num_kv_heads * capacity * config.head_dim * layout.item_bytes


def _buffer_bytes(config: DecoderConfig, num_positions: int) -> int:
    """As `Workspace` of chain/kernels/cpu/source/decoder.h, but for what is filled up there."""
    attended = config.num_heads * config.head_dim
    widest = max(2 * config.hidden_size, config.intermediate_size, attended)
    operand = widest + 2 * (widest // _LANES + 1)
    residuals = (3 if isinstance(config, HeadConfig) else 2) * config.hidden_size
    num_segments = -(-num_positions // _SEGMENT)
    head_values = -(-config.head_dim // (2 * _LANES)) * 2 * _LANES + _LANES
    partial = _NATIVE_ROWS * config.num_heads * num_segments * head_values
    a_row = residuals + 2 * attended + config.intermediate_size + operand
    return 4 * (_NATIVE_ROWS * a_row + min(partial, _MOST_PARTIAL_VALUES))


def _rotary_bytes(config: DecoderConfig, num_positions: int, layout: Layout) -> int:
    """Cosines and sines; layers with the same frequencies share them."""
    ropes: list[dict[str, Any]] = []
    for kind in config.kinds:
        if kind.rope not in ropes:
            ropes.append(kind.rope)
    return len(ropes) * 2 * num_positions * config.head_dim * layout.item_bytes


def _drafting_bytes(
    config: DecoderConfig, capacity: int, plan: Plan, layout: Layout
) -> dict[str, int]:
    """What a drafter keeps beside its cache: which rows a draft sees, and what a head observed."""
    row_bytes = capacity * layout.item_bytes
    beams = plan.tree.top_k * config.query_groups
    kept = {"mask": beams * (row_bytes + plan.tree.top_k * layout.item_bytes)}
    if isinstance(config, HeadConfig):
        kept["observed"] = (len(config.feature_layers) or 1) * config.hidden_size * row_bytes
    return kept


def _workspace_bytes(
    configs: Sequence[DecoderConfig],
    context_tokens: int,
    plan: Plan,
    layout: Layout,
    most_packed: int,
) -> int:
    """Most that one pass takes, of any member.

    On the device path prompts are read by eager operations, too. Of these on the host twice as
    much, as was measured over prompts: the allocator does not give back at once what one took.

    Args:
        most_packed: weights of the largest 4-bit product.
    """
    flush_lengths = [flush.length for flush in plan.flush.values()]
    num_rows = max(plan.tree.rows, plan.tree.depth + 1 + max(flush_lengths, default=0))
    sampling = num_rows * configs[0].vocab_size * (layout.item_bytes + _SAMPLING_BYTES)
    features = [config.feature_layers for config in configs if isinstance(config, HeadConfig)]
    num_features = max(map(len, features), default=0)
    prompts = [_prompt_bytes(one, context_tokens, num_features, layout) for one in configs]
    if layout.kernels == "device":
        prompts = [one + _TAKING_APART_BYTES * most_packed for one in prompts]
    taken = max(sampling, *prompts)
    if layout.kernels == "native":
        taken += sum(_buffer_bytes(one, context_tokens + MAX_TREE_ROWS) for one in configs)
        return taken
    return taken + min(taken, _HELD_BYTES) if layout.device == "cpu" else taken


def _prompt_bytes(config: DecoderConfig, rows: int, num_features: int, layout: Layout) -> int:
    """Of a pass over a prompt, which is read in blocks where it needs a mask.

    Args:
        num_features: layers whose inputs are a part of the states, for an EAGLE-3 head.
    """
    width, inner = config.hidden_size, config.intermediate_size
    states = rows * (1 + num_features) * width * layout.item_bytes
    if layout.kernels == "native":
        return states
    rotated = (config.num_heads + config.num_kv_heads) * config.head_dim
    has_softcap = config.attention_softcap is not None
    is_masked = has_softcap or any(
        kind.window is not None and rows > kind.window for kind in config.kinds
    )
    block = min(rows, _BLOCK_ROWS) if is_masked else rows
    # residuals and their norms beside gate and up, or beside queries, keys and values
    values_a_row = max(5 * width + 3 * inner, 3 * width + 4 * rotated) + num_features * width
    a_row = values_a_row * layout.item_bytes
    if is_masked:
        a_row += rows * config.num_heads * (2 * layout.item_bytes + (8 if has_softcap else 0))
    return states + block * a_row


def _process_bytes(tokenizer: Path, layout: Layout) -> int:
    if layout.device != "cpu":
        return 0
    return LIBRARY_BYTES + TOKENIZER_BYTES * (tokenizer / TOKENIZER_NAME).stat().st_size
