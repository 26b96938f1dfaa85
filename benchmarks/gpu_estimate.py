"""What passes and drafts would cost on a GPU that is not there: an estimate, launch by launch.

    python benchmarks/gpu_estimate.py [--shapes gpu-7b gpu-8b] [--rows 1 24] [--context 350]
        [--prompt 100] [--depth 10] [--top-k 2] [--launches] [--record FILE]

Passes run as they do on a card, over tensors that have shapes and no data; what they launch is
counted and nothing is computed. So a change of the code changes the estimate, before a card is at
hand. A launch takes its bytes over the bandwidth, and what it waits for: the launch before it, or
less where it begins while that one ends. These times, below, are what the passes of an H200 were
measured to take (benchmarks/records/gpu-h200.md); counts are exact for Triton's kernels, and an
operation of PyTorch counts as one launch, which a few of them exceed.

`--launches` also prints what is launched, by kernel.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from command import ScriptReport, positive, run
from growth.shapes import SHAPES, shape_named
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig, HeadConfig
from polybasic.chain.formats.checkpoints.quantization import DRAFT_GROUP_SIZE, GROUP_SIZE
from polybasic.chain.formats.plan import Rule
from polybasic.chain.kernels.cpu.library import FixedTensors
from polybasic.chain.kernels.cuda.executor import CudaExecutor
from polybasic.chain.kernels.rotary import RotaryTable
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.chain.kernels.torch.operations import DeviceLinear
from polybasic.chain.kernels.torch.packed_weight import CODES_PER_WORD, PackedWeight
from polybasic.chain.kernels.torch.rows import device_consecutive_rows
from polybasic.chain.kernels.weights import LayerWeights, ModelWeights
from polybasic.deploy.runtime.graphs.drawing import DeviceNoise, Drawing
from polybasic.deploy.runtime.graphs.round_parts import BlockPart
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.sampling import Sampling
from polybasic.deploy.runtime.rounds.verifier import Verifier
from polybasic.deploy.runtime.rounds.warping import Warping

BANDWIDTH = 4.3e12
"""Bytes a second: what an H200 was measured to read (`recipes/estimates/hardware_profiles.py`)."""
PACKED_BANDWIDTH = {16: 2.3e12, 32: 1.9e12, 64: 1.2e12}
"""Bytes a second of a product by packed weights, by the rows that its kernel is compiled for: what
unpacks and multiplies them takes more than what reads them."""
SERIAL_SECONDS = 3.5e-6
"""Of a launch that waits for the end of the one before: beginning, first bytes, last programs."""
EARLY_SECONDS = 3.2e-6
"""Of one that begins early."""
ATTENTION_SECONDS = {16: 5.5e-6, 32: 9e-6, 64: 9e-6}
"""Of attention's own steps, each of which waits for the one before: the prefix, the new rows
written and read again, the parts combined. By queries of a program."""
HOST_SECONDS = 6e-6
"""Of the host for a launch that is not captured."""
META = torch.device("meta")
DTYPE = torch.bfloat16
NUM_POSITIONS = 8192

_WHOLE = {"scaled_dot_product_attention", "rms_norm"}
"""Composed operations that a GPU has kernels of its own for."""
_GATHERS = {"embedding", "index_select"}
"""Operations that read as much as they write of a large tensor."""
_IN_CACHE = ("parts_ptr", "tickets_ptr", "parts", "tickets", "num_active", "cos", "sin")
"""Arguments of kernels that stay in the GPU's cache, or of which few rows are read."""


@dataclass(frozen=True)
class Launch:
    """One node of a captured pass.

    Attributes:
        num_bytes: that it reads and writes.
        can_be_early: the kernel waits for the one before by itself, and lets the next one begin.
        own_seconds: bytes over the rate at which it takes them, and what its own steps wait.
    """

    name: str
    num_bytes: int
    can_be_early: bool
    own_seconds: float


@dataclass
class Launches(TorchDispatchMode):
    """Records launches while it is entered.

    Args:
        context: tokens in a cache before the pass: attention reads these and not all of the cache.
    """

    context: int
    found: list[Launch] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        if name not in _WHOLE:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        read, written = _tensors((args, kwargs)), _tensors(out)
        places = {_place(tensor) for tensor in read}
        made = [tensor for tensor in written if _place(tensor) not in places]
        if "empty" not in name and (made or func._schema.is_mutable):
            moved = [*made, *made] if name in _GATHERS else [*read, *made]
            num_bytes = _num_bytes(moved)
            self.found.append(Launch(name, num_bytes, False, num_bytes / BANDWIDTH))
        return out

    def launched(self, kernel: Any, arguments: dict[str, Any]) -> None:
        """Record a launch of one of Triton's kernels."""
        given = {
            name: argument
            for name, argument in arguments.items()
            if isinstance(argument, Tensor) and name not in _IN_CACHE
        }
        if "cache" in given:
            num_columns = self.context + arguments["first"] + arguments["num_rows"]
            given["cache"] = given["cache"][:, :num_columns]
        num_bytes = _num_bytes(list(given.values()))
        name, own_seconds = kernel.fn.__name__, num_bytes / BANDWIDTH
        if name == "product_kernel" and "groups_ptr" in given:
            own_seconds = num_bytes / PACKED_BANDWIDTH[arguments["ROWS"]]
        elif name == "attend":
            own_seconds += ATTENTION_SECONDS[arguments["M"]]
        can_be_early = "IS_EARLY" in kernel.arg_names
        self.found.append(Launch(name, num_bytes, can_be_early, own_seconds))


Recorder = TypeVar("Recorder", bound=Launches)


def recorded(function: Callable[[], object], launches: Recorder) -> Recorder:
    """Record what a function launches that runs on `META`; Triton's kernels are not run."""

    def skipped(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *given, **named: None

    def noted(kernel: Any, grid: Any) -> Callable[..., None]:
        names = kernel.arg_names
        return lambda *given, **named: launches.launched(
            kernel, dict(zip(names, given, strict=False)) | named
        )

    with torch.inference_mode():
        # the first run makes what all later ones share
        with patch.object(KernelInterface, "__getitem__", skipped):
            function()
        with patch.object(KernelInterface, "__getitem__", noted), launches:
            function()
    return launches


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class GpuEstimate:
    """Of a pass or a draft.

    Attributes:
        is_captured: else the host launches one after the other, and may be what takes the time.
    """

    name: str
    launches: Sequence[Launch]
    is_captured: bool = True

    @property
    def num_early(self) -> int:
        """Launches that begin while the one before ends."""
        pairs = pairwise(self.launches)
        return sum(before.can_be_early and launch.can_be_early for before, launch in pairs)

    @property
    def num_bytes(self) -> int:
        return sum(launch.num_bytes for launch in self.launches)

    @property
    def seconds(self) -> float:
        """What each launch takes, and what it waits for."""
        num = len(self.launches)
        waited = self.num_early * EARLY_SECONDS + (num - self.num_early) * SERIAL_SECONDS
        device = sum(launch.own_seconds for launch in self.launches) + waited
        return device if self.is_captured else max(device, num * HOST_SECONDS)

    def cells(self) -> list[str]:
        bound = self.num_bytes / BANDWIDTH
        return [
            self.name,
            str(len(self.launches)),
            str(self.num_early),
            f"{self.num_bytes / 1e6:.0f}",
            f"{1e3 * bound:.3f}",
            f"{1e3 * self.seconds:.3f}",
            f"{self.seconds / bound:.2f}",
        ]


DRAWS: dict[str, tuple[Sampling, Rule]] = {
    "greedy": (Sampling(), "coupled"),
    "coupled, top-p": (Sampling(temperature=0.6, top_p=0.9), "coupled"),
    "block, top-p": (Sampling(temperature=0.6, top_p=0.9), "block"),
}
COLUMNS = ["pass", "launches", "early", "MB", "bound", "estimate", "times bound"]


def config_of(shape: str, **changes: Any) -> DecoderConfig:
    """A Llama in one of the shapes that chains are grown to."""
    sizes = shape_named(shape)
    given = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_layers": sizes.num_layers,
        "num_heads": sizes.num_heads,
        "num_kv_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
    }
    return DecoderConfig(
        **(given | changes),
        rms_norm_eps=1e-5,
        context_tokens=NUM_POSITIONS,
        tie_word_embeddings=False,
        rope={"rope_type": "default", "rope_theta": 1e4},
    )


def linear(out_size: int, in_size: int, group_size: int = 0) -> DeviceLinear:
    """A weight without data: dense, or in 4 bits with groups of so many inputs."""
    if not group_size:
        return DeviceLinear(torch.empty(out_size, in_size, dtype=DTYPE, device=META))
    num_groups = in_size // group_size
    words = torch.empty(num_groups, out_size, group_size // CODES_PER_WORD, dtype=torch.int32)
    groups = torch.empty(num_groups, out_size, dtype=torch.int32)
    return DeviceLinear(PackedWeight(words.to(META), groups.to(META)))


def decoder_of(config: DecoderConfig, group_size: int = 0) -> CudaExecutor:
    """A decoder without data, its layers dense or in 4 bits."""
    return CudaExecutor(_weights(config, group_size, 0, has_norms=True), runs_on_device=True)


def head_of(config: DecoderConfig) -> CudaExecutor:
    """An EAGLE-2 head for such a decoder: one layer, all in 4 bits, as GPUs keep it."""
    sizes = {name: getattr(config, name) for name in DecoderConfig.__dataclass_fields__}
    head = HeadConfig(**(sizes | {"num_layers": 1}), kind="eagle2")
    weights = _weights(head, DRAFT_GROUP_SIZE, DRAFT_GROUP_SIZE, has_norms=False)
    return CudaExecutor(weights, runs_on_device=True)


def _weights(
    config: DecoderConfig, group_size: int, head_group_size: int, has_norms: bool
) -> ModelWeights:
    width, inner = config.hidden_size, config.intermediate_size
    heads = config.num_heads * config.head_dim
    norm = torch.empty(width, dtype=DTYPE, device=META)
    layer = LayerWeights(
        0,
        linear(heads + 2 * config.num_kv_heads * config.head_dim, width, group_size),
        linear(width, heads, group_size),
        linear(2 * inner, width, group_size),
        linear(width, inner, group_size),
        norm,
        norm if has_norms else None,
    )
    return ModelWeights(
        config,
        torch.empty(config.vocab_size, width, dtype=DTYPE, device=META),
        (layer,) * config.num_layers,
        RotaryTable(config, NUM_POSITIONS, DTYPE, META),
        linear(config.vocab_size, width, head_group_size),
        final_norm=norm if has_norms else None,
        fc=None if has_norms else linear(width, 2 * width, group_size),
    )


def caches_of(config: DecoderConfig) -> list[Tensor]:
    shape = 2 * config.num_kv_heads, NUM_POSITIONS, config.head_dim
    return [torch.empty(shape, dtype=DTYPE, device=META) for _ in range(config.num_layers)]


def pass_of(name: str, model: CudaExecutor, context: int, rows: int) -> GpuEstimate:
    """A verifier's pass over R tokens in a round: states, logits and the choice of tokens."""
    prefix, tokens = _number(), torch.empty(rows, dtype=torch.int64, device=META)
    caches = caches_of(model.config)

    def run_pass() -> None:
        states = model.forward(tokens, [caches], [device_consecutive_rows(prefix, rows)])
        model.operations.most_probable(model.logits_on_device(states))

    return GpuEstimate(f"{name}, {rows} rows", recorded(run_pass, Launches(context)).found)


def block_of(name: str, model: CudaExecutor, context: int, rows: int, drawn: str) -> GpuEstimate:
    """A round of a verifier over a block: the pass, and all until the host reads the tokens."""
    sampling, rule = DRAWS[drawn]
    cache = KeyValueCache(model.config, 0, 0, DTYPE, META)
    cache.layers, cache.capacity = FixedTensors(caches_of(model.config)), NUM_POSITIONS
    kind = (
        (None, None, None)
        if sampling.is_greedy
        else (Warping.of(sampling), rule, DeviceNoise(META) if rule == "coupled" else None)
    )
    part = BlockPart(Verifier(name, model, cache), rows, Drawing(*kind, False, META))
    launches = recorded(lambda: part.run(None), Launches(context))
    return GpuEstimate(f"{name}, a block of {rows}, {drawn}", launches.found)


def draft_of(name: str, head: CudaExecutor, context: int, depth: int, top_k: int) -> GpuEstimate:
    """A draft after the last token's state is known."""
    state = torch.empty(1, head.config.hidden_size, dtype=DTYPE, device=META)
    caches, start = caches_of(head.config), _number()
    launches = Launches(context)
    recorded(lambda: head.draft(state, caches, start, depth, top_k), launches)
    return GpuEstimate(f"{name}, {depth} levels of {top_k}", launches.found)


def prompt_of(name: str, model: CudaExecutor, num_tokens: int) -> GpuEstimate:
    """A prompt, read after nothing."""
    tokens = torch.empty(num_tokens, dtype=torch.int64, device=META)
    features = None
    if model.weights.is_head:
        features = torch.empty(num_tokens, model.config.hidden_size, dtype=DTYPE, device=META)
    caches, rows = caches_of(model.config), [consecutive_rows(0, num_tokens)]
    launches = recorded(lambda: model.forward(tokens, [caches], rows, features), Launches(0))
    return GpuEstimate(f"{name}, a prompt of {num_tokens}", launches.found, is_captured=False)


def estimates_of(
    shape: str, rows: Sequence[int], context: int, prompt: int, depth: int, top_k: int
) -> Iterator[GpuEstimate]:
    """All of a chain of target, its copy in 4 bits and an EAGLE-2 head, in a shape."""
    config = config_of(shape)
    target, copy, head = decoder_of(config), decoder_of(config, GROUP_SIZE), head_of(config)
    for name, model in (("target", target), ("4 bits", copy)):
        for num in rows:
            yield pass_of(f"{shape} {name}", model, context, num)
    for drawn, num in product(DRAWS, (num for num in rows if num > 1)):
        yield block_of(f"{shape} target", target, context, num, drawn)
    yield draft_of(f"{shape} head", head, context, depth, top_k)
    for name, model in (("target", target), ("4 bits", copy), ("head", head)):
        yield prompt_of(f"{shape} {name}", model, prompt)


def rows_by_kernel(estimate: GpuEstimate) -> list[list[str]]:
    """What it launches, by kernel."""
    counts = Counter(launch.name for launch in estimate.launches)
    sizes = {
        name: sum(launch.num_bytes for launch in estimate.launches if launch.name == name)
        for name in counts
    }
    return [
        [estimate.name, name, str(num), f"{sizes[name] / 1e6:.1f}"]
        for name, num in counts.most_common()
    ]


def _number() -> Tensor:
    return torch.empty((), dtype=torch.int64, device=META)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=("gpu-7b", "gpu-8b"), choices=SHAPES)
    parser.add_argument("--rows", type=positive, nargs="+", default=(1, 24))
    parser.add_argument("--context", type=positive, default=350)
    parser.add_argument("--prompt", type=positive, default=100)
    parser.add_argument("--depth", type=positive, default=10)
    parser.add_argument("--top-k", type=positive, default=2)
    parser.add_argument("--launches", action="store_true", help="print them, too, by kernel")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    report = ScriptReport()
    given = (arguments.rows, arguments.context, arguments.prompt, arguments.depth, arguments.top_k)
    found = [estimate for shape in arguments.shapes for estimate in estimates_of(shape, *given)]
    report.table("Milliseconds, estimated", COLUMNS, [estimate.cells() for estimate in found])
    if arguments.launches:
        rows = [row for estimate in found for row in rows_by_kernel(estimate)]
        report.table("Launches", ["pass", "kernel", "launches", "MB"], rows)
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
