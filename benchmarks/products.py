"""What a matrix product over a few rows costs, by kernel.

    python benchmarks/products.py [--device cpu] [--shapes 1024x256 4096x4096] [--rows 1 4]
        [--kernels NAME ...] [--turns 5] [--record FILE]

`runtime` is what passes take here, dense, in 4 bits and in a GGUF file's blocks: on a CPU the
native kernels where they can be had (`POLYBASIC_KERNELS`), on a GPU those of Triton that were
measured to be the fastest. Beside it stand PyTorch's kernels, and gemlite's on a GPU where it is
installed. Each multiplies with one weight after the other, more of them than the caches hold, as
the layers of a model do: a weight comes from memory, and the bound is its bytes over the bandwidth
measured in the same run. Kernels take turns, on a GPU in graphs. A kernel that is wrong, or fails,
is named and not timed.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from command import ScriptReport, begin, device_of, options, positive, run
from measuring import (
    Bandwidth,
    Case,
    Spread,
    all_of,
    captured,
    in_turns,
    last_cache_bytes,
    measure_bandwidth,
)
from torch import Tensor
from traffic import linear_bytes

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.awq import QuantizedWeight, cpu_int4_weight, dequantize
from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES, NESTED, BlockType
from polybasic.chain.formats.checkpoints.blocks import BlockWeight
from polybasic.chain.formats.checkpoints.quantization import GROUP_SIZE
from polybasic.chain.kernels.backend import Backend
from polybasic.chain.kernels.cuda.graphs import Graphs
from polybasic.chain.kernels.selection import backend_for
from polybasic.chain.kernels.weights import Linear

ROWS = (1, 2, 4, 8, 16, 32)
SHAPES = {
    "cpu": ("512x256", "1536x256", "256x768", "4096x256", "2048x1024", "4096x4096"),
    "cuda": ("12288x4096", "4096x4096", "22016x4096", "4096x11008"),
}
"""Of products [out, in]; on a GPU those of Llama-2-7B's layers."""
REPEATS = 5
CACHES = 2
"""A kernel's weights are so many times as large as the largest cache."""
MOST_ERROR = 0.05
"""Relative, from which on a result is wrong; activations rounded to eight bits are off by 0.01."""
INNER_TILES = 8
"""Of PyTorch's layout for its int4 kernel on a GPU."""
_KERNEL_ZERO = 8


def _bfloat16(weight: QuantizedWeight) -> Tensor:
    return dequantize(weight).bfloat16()


def _packed(weight: QuantizedWeight) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(_bfloat16(weight))
    product = torch.ops.mkldnn._linear_pointwise
    return lambda x: product(x, packed, None, "none", [], "")


def _int4(weight: QuantizedWeight) -> Linear:
    packed, scales_and_zeros = cpu_int4_weight(weight)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    return lambda x: product(x, packed, GROUP_SIZE, scales_and_zeros)


def _int4_on_gpu(weight: QuantizedWeight) -> Linear:
    """PyTorch's kernel for groups of 4-bit codes: (code - 8) * scale + offset."""
    scales = weight.scales.bfloat16()
    offsets = (_KERNEL_ZERO - weight.zeros.float()) * scales.float()
    joined = torch.stack([scales, offsets.bfloat16()], 2).transpose(0, 1).contiguous()
    pairs = weight.codes[:, ::2] << 4 | weight.codes[:, 1::2]
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), INNER_TILES)
    product = torch.ops.aten._weight_int4pack_mm
    return lambda x: product(x, packed, weight.group_size, joined)


def _gemlite(weight: QuantizedWeight) -> Linear:
    """gemlite's Triton kernels, which it tunes when they are first called with a shape."""
    from gemlite import DType, GemLiteLinear

    out_size, in_size = weight.codes.shape
    layer: Any = GemLiteLinear(
        4, weight.group_size, in_size, out_size, input_dtype=DType.BF16, output_dtype=DType.BF16
    )
    layer.pack(weight.codes, weight.scales.bfloat16(), weight.zeros.bfloat16())
    found: Linear = layer
    return found


def _random_blocks(kind: BlockType, weight: QuantizedWeight) -> BlockWeight:
    """Blocks of the same shape, the same ones each time."""
    (out_size, in_size), generator = weight.codes.shape, torch.Generator().manual_seed(0)
    shape = out_size, in_size // kind.size, kind.num_bytes
    blocks = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    blocks[..., kind.constants].view(torch.float16).fill_(0.001)
    return BlockWeight(kind, blocks.flatten(1))


def _blocks(kind: BlockType, weight: QuantizedWeight) -> Linear:
    linear = _backend(weight).blocks([_random_blocks(kind, weight)])
    return linear if weight.codes.device.type == "cpu" else _triton(linear)


def _backend(weight: QuantizedWeight) -> Backend:
    return backend_for(weight.codes.device, torch.bfloat16)


def _triton(linear: Linear) -> Linear:
    """As passes on a GPU compute it."""
    from polybasic.chain.kernels.cuda.executor import CudaExecutor

    return partial(CudaExecutor.operations.product, linear)


@dataclass(frozen=True)
class Kernel:
    """One way to multiply.

    Attributes:
        prepare: a weight on the device -> the product with it.
        dtype: of the rows that it takes.
        is_int4: it reads 4-bit codes; else values of `dtype`.
        blocks: that it reads, whatever the weight.
    """

    prepare: Callable[[QuantizedWeight], Linear]
    dtype: torch.dtype = torch.bfloat16
    is_int4: bool = False
    blocks: BlockType | None = None

    def num_bytes(self, shape: tuple[int, int]) -> int:
        """That a product reads of the weight, of blocks as a file has them."""
        if self.blocks is not None:
            return shape[0] * shape[1] // self.blocks.size * self.blocks.num_bytes
        return linear_bytes(shape, "awq" if self.is_int4 else "decoder", self.dtype.itemsize)

    def error(self, weight: QuantizedWeight) -> float | str:
        """Relative error of a result; or how it fails."""
        x = torch.randn(3, weight.codes.shape[1], device=weight.codes.device).to(self.dtype)
        dense = dequantize(weight)
        if self.blocks is not None:
            dense = _random_blocks(self.blocks, weight).dequantized().to(x.device)
        expected = x.float() @ dense.t()
        try:
            result = self.prepare(weight)(x).float()
        except Exception as error:  # whatever a kernel that is only compared with comes up with
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return float((result - expected).norm() / expected.norm())

    def products(self, weight: QuantizedWeight, num_bytes: int) -> list[Linear]:
        """With weights of so many bytes in all."""
        each = self.num_bytes((weight.codes.shape[0], weight.codes.shape[1]))
        return [self.prepare(weight) for _ in range(-(-num_bytes // each))]


KERNELS: dict[str, dict[str, Kernel]] = {
    "cpu": {
        "float32": Kernel(
            lambda weight: partial(F.linear, weight=dequantize(weight)), torch.float32
        ),
        "bfloat16": Kernel(lambda weight: partial(F.linear, weight=_bfloat16(weight))),
        "bfloat16 packed": Kernel(_packed),
        "int4": Kernel(_int4, is_int4=True),
        "runtime": Kernel(lambda weight: _backend(weight).dense(_bfloat16(weight))),
        "runtime int4": Kernel(lambda weight: _backend(weight).int4(weight), is_int4=True),
    },
    "cuda": {
        "cuBLAS": Kernel(lambda weight: partial(F.linear, weight=_bfloat16(weight))),
        "runtime": Kernel(lambda weight: _triton(_backend(weight).dense(_bfloat16(weight)))),
        "PyTorch int4": Kernel(_int4_on_gpu, is_int4=True),
        "runtime int4": Kernel(lambda weight: _triton(_backend(weight).int4(weight)), is_int4=True),
    },
}
"""By device; a new kernel is one more entry."""
for kind in BLOCK_TYPES.values():
    for kernels in KERNELS.values():
        kernels[f"runtime {kind.name}"] = Kernel(partial(_blocks, kind), blocks=kind)
if importlib.util.find_spec("gemlite") is not None:
    KERNELS["cuda"]["gemlite"] = Kernel(_gemlite, is_int4=True)


@dataclass(frozen=True)
class ProductTime:
    """What a product of one shape took.

    Attributes:
        seconds: of one product; None where the kernel is wrong or fails.
        error: as `Kernel.error`.
    """

    shape: str
    rows: int
    kernel: str
    seconds: Spread | None
    bound_seconds: float
    error: float | str


def product_cases(
    shapes: Sequence[str], all_rows: Sequence[int], kernels: Mapping[str, Kernel], turns: int,
    bandwidth: Bandwidth, device: torch.device, num_bytes: int | None = None,
) -> Iterator[Case[ProductTime]]:  # fmt: skip
    """A case for each shape, "out x in".

    Args:
        num_bytes: of a kernel's weights, of which none should be in a cache when its turn comes;
            default: so many caches.
    """
    in_all = num_bytes or CACHES * last_cache_bytes(device)

    @torch.inference_mode()
    def measure(shape: str, sizes: tuple[int, int]) -> list[ProductTime]:
        weight = random_weight(sizes, device)
        errors = {name: kernel.error(weight) for name, kernel in kernels.items()}
        prepared = {
            name: kernels[name].products(weight, in_all)
            for name, error in errors.items()
            if isinstance(error, float) and error < MOST_ERROR
        }
        graphs, found = Graphs(device, max_graphs=len(kernels)), []
        for rows in all_rows:
            x = torch.randn(rows, sizes[1], device=device)
            runs = {
                name: captured(graphs, (name, rows), _over_all(each, x.to(kernels[name].dtype)))
                for name, each in prepared.items()
            }
            taken = in_turns(runs, turns, REPEATS, device)
            for name, kernel in kernels.items():
                seconds = taken[name].times(1 / len(prepared[name])) if name in taken else None
                bound = kernel.num_bytes(sizes) / bandwidth.bound
                found.append(ProductTime(shape, rows, name, seconds, bound, errors[name]))
        return found

    for shape in shapes:
        yield f"products of {shape}", partial(measure, shape, sizes_of(shape))


def sizes_of(shape: str) -> tuple[int, int]:
    """Out and in features.

    Raises:
        UserError: it is no shape, or its inputs are no whole blocks of a GGUF file.
    """
    try:
        out_size, in_size = map(int, shape.split("x"))
    except ValueError as error:
        raise UserError("no shape of a product", f"--shapes {shape}", "write 4096x256") from error
    if in_size % NESTED:
        raise UserError("inputs of no whole blocks", f"--shapes {shape}", f"use {NESTED} n")
    return out_size, in_size


def random_weight(sizes: tuple[int, int], device: torch.device) -> QuantizedWeight:
    """A random weight in 4 bits, which dense kernels read dequantized."""
    groups = (sizes[0], sizes[1] // GROUP_SIZE)
    return QuantizedWeight(
        torch.randint(0, 16, sizes, dtype=torch.uint8, device=device),
        torch.randint(0, 16, groups, dtype=torch.uint8, device=device),
        ((torch.rand(groups, device=device) + 0.5) / 100).half(),
    )


def _over_all(products: Sequence[Linear], x: Tensor) -> Callable[[], None]:
    """One product with each weight."""

    def run_all() -> None:
        for product in products:
            product(x)

    return run_all


def report_products(report: ScriptReport, times: Sequence[ProductTime]) -> None:
    """A row for each shape, number of rows and kernel."""
    rows = []
    for timing in times:
        cells = ["-"] * 4
        if timing.seconds is not None:
            ratio = timing.seconds.median / timing.bound_seconds
            cells = [*timing.seconds.times(1e6).cells(1), f"{ratio:.2f}"]
        error = timing.error if isinstance(timing.error, str) else f"{timing.error:.1e}"
        bound = f"{1e6 * timing.bound_seconds:.1f}"
        rows.append([timing.shape, str(timing.rows), timing.kernel, *cells, bound, error])
    columns = ["shape", "rows", "kernel", "min", "median", "max", "times bound", "bound", "error"]
    report.table("Microseconds of a product", columns, rows)


def report_choices(report: ScriptReport, device: torch.device) -> None:
    """What the runtime has compared on this GPU so far, the fastest ways of each product first."""
    if device.type != "cuda":
        return
    from polybasic.chain.kernels.cuda.products.choice import choices_of

    known = choices_of(torch.device("cuda", torch.cuda.current_device())).microseconds
    rows = []
    for task, ways in known.items():
        order = sorted(ways, key=lambda way: ways[way])[:3]
        rows.append([task, ", ".join(f"{way} {ways[way]:.1f}" for way in order)])
    report.table("Ways of the runtime, microseconds", ["product", "the fastest"], rows)


def main() -> None:
    parser = options(__doc__, "--device", "--turns")
    parser.add_argument("--shapes", nargs="+", metavar="OUTxIN")
    parser.add_argument("--rows", nargs="+", type=positive, default=ROWS)
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="default: all")
    arguments = parser.parse_args()
    device = device_of(arguments)
    known = KERNELS[device.type]
    for name in arguments.kernels or ():
        if name not in known:
            raise UserError("no such kernel", f"--kernels {name}", f"use {', '.join(known)}")
    report = begin(__file__, __doc__, arguments)
    bandwidth = measure_bandwidth(device)
    report.say(bandwidth.shown())
    shapes = arguments.shapes or SHAPES[device.type]
    chosen = {name: known[name] for name in arguments.kernels or known}
    cases = product_cases(shapes, arguments.rows, chosen, arguments.turns, bandwidth, device)
    report_products(report, all_of(cases))
    report_choices(report, device)
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
