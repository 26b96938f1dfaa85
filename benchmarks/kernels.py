"""What a matrix product over a few rows costs on this CPU, by kernel.

    python benchmarks/kernels.py [--shapes 1024x256 4096x4096] [--rows 1 4] [--kernels NAME ...]
        [--turns 5] [--threads N] [--json FILE]

Kernels: `F.linear` in float32 and bfloat16, oneDNN with bfloat16 weights laid out once, PyTorch's
int4 kernel, and what the runtime takes on this machine, dense and in 4 bits: the native kernels
where they can be had (`POLYBASIC_KERNELS`). Each multiplies with one weight after the other, more
of them than the caches hold, as the layers of a model do: a weight comes from memory, and the bound
is its bytes over the best bandwidth that was measured in the same run. Prints median microseconds
of a product with the times of its bound behind; kernels take turns.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import header, print_header, write_record
from timing import Bandwidth, Spread, in_turns, last_cache_bytes, measure_bandwidth
from torch import Tensor
from traffic import linear_bytes

from polybasic.chain.errors import UserError
from polybasic.chain.formats.awq import GROUP_SIZE, QuantizedWeight, cpu_int4_weight
from polybasic.chain.formats.manifest import Kind
from polybasic.chain.model.linear import Linear, dense_linear, int4_linear, multiplies_fast

ROWS = (1, 2, 4, 8, 16, 32)
SHAPES = ("512x256", "1536x256", "256x768", "4096x256", "2048x1024", "4096x4096")
REPEATS = 5
CPU = torch.device("cpu")
CACHES = 2
"""A kernel's weights are so many times as large as the largest cache."""


def _float32(weight: Tensor) -> Linear:
    return lambda x: F.linear(x, weight)


def _bfloat16(weight: Tensor) -> Linear:
    narrow = weight.bfloat16()
    return lambda x: F.linear(x, narrow)


def _bfloat16_packed(weight: Tensor) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16())
    product = torch.ops.mkldnn._linear_pointwise
    return lambda x: product(x, packed, None, "none", [], "")


def _bfloat16_runtime(weight: Tensor) -> Linear:
    return dense_linear(weight.bfloat16())


def _int4_runtime(weight: Tensor) -> Linear:
    return int4_linear(_quantized(weight), torch.bfloat16, CPU)


def _int4(weight: Tensor) -> Linear:
    packed, scales_and_zeros = cpu_int4_weight(_quantized(weight))
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    return lambda x: product(x, packed, GROUP_SIZE, scales_and_zeros)


def _quantized(weight: Tensor) -> QuantizedWeight:
    """Random codes of the weight's shape: a kernel's time does not depend on them."""
    out_size, groups = weight.shape[0], weight.shape[1] // GROUP_SIZE
    return QuantizedWeight(
        torch.randint(0, 16, tuple(weight.shape), dtype=torch.uint8),
        torch.full((out_size, groups), 8, dtype=torch.uint8),
        torch.full((out_size, groups), 0.01, dtype=torch.float16),
    )


@dataclass(frozen=True)
class Kernel:
    """One way to multiply.

    Attributes:
        prepare: float32 weight [out, in] -> the product with it.
        dtype: of the rows that it takes.
        is_int4: it reads 4-bit codes; else values of `dtype`.
    """

    prepare: Callable[[Tensor], Linear]
    dtype: torch.dtype = torch.bfloat16
    is_int4: bool = False

    def num_bytes(self, out_size: int, in_size: int) -> int:
        """That a product reads of the weight."""
        kind: Kind = "awq" if self.is_int4 else "decoder"
        return linear_bytes((out_size, in_size), kind, self.dtype.itemsize)


KERNELS = {
    "float32": Kernel(_float32, torch.float32),
    "bfloat16": Kernel(_bfloat16),
    "int4": Kernel(_int4, is_int4=True),
    "runtime": Kernel(_bfloat16_runtime),
    "runtime int4": Kernel(_int4_runtime, is_int4=True),
}
"""A new kernel is one more entry."""
if multiplies_fast(torch.bfloat16):
    KERNELS["bfloat16 packed"] = Kernel(_bfloat16_packed)


@dataclass(frozen=True)
class Products:
    """A kernel with weights enough that none is in a cache when its turn comes."""

    kernel: Kernel
    out_size: int
    in_size: int
    products: list[Linear]

    @classmethod
    def prepared(cls, kernel: Kernel, out_size: int, in_size: int) -> "Products":
        """With random weights."""
        num_bytes = kernel.num_bytes(out_size, in_size)
        num = -(-CACHES * last_cache_bytes() // num_bytes)
        weight = torch.randn(out_size, in_size) / in_size**0.5
        return cls(kernel, out_size, in_size, [kernel.prepare(weight.clone()) for _ in range(num)])

    def run(self, rows: int) -> Callable[[], object]:
        """One product with each weight."""
        x = torch.randn(rows, self.in_size).to(self.kernel.dtype)
        return lambda: [product(x) for product in self.products]

    def bound_seconds(self, bandwidth: Bandwidth) -> float:
        """Of one product."""
        return self.kernel.num_bytes(self.out_size, self.in_size) / bandwidth.bound


@torch.inference_mode()
def measure_kernels(
    shape: str,
    all_rows: tuple[int, ...],
    kernels: Mapping[str, Kernel],
    turns: int,
    bandwidth: Bandwidth,
) -> dict[int, dict[str, dict[str, Any]]]:
    """Rows -> kernel -> microseconds of a product, its bytes and its bound."""
    out_size, in_size = map(int, shape.split("x"))
    prepared = {
        name: Products.prepared(kernel, out_size, in_size) for name, kernel in kernels.items()
    }

    def entry(name: str, seconds: Spread) -> dict[str, Any]:
        one = prepared[name]
        each, bound = seconds.times(1 / len(one.products)), one.bound_seconds(bandwidth)
        return {
            "microseconds": each.times(1e6).to_json(),
            "bytes": one.kernel.num_bytes(out_size, in_size),
            "bound_microseconds": 1e6 * bound,
            "times_bound": each.median / bound,
        }

    found = {}
    for rows in all_rows:
        runs = {name: one.run(rows) for name, one in prepared.items()}
        taken = in_turns(runs, turns, REPEATS, CPU)
        found[rows] = {name: entry(name, seconds) for name, seconds in taken.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="OUTxIN")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--kernels", nargs="+", default=tuple(KERNELS), choices=KERNELS)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    head = header("kernels", CPU, {arguments.json: "FILE"})
    print_header(head)
    bandwidth = measure_bandwidth(CPU)
    print(f"{bandwidth.shown()}; median microseconds, and times of the bound")
    chosen = {name: KERNELS[name] for name in arguments.kernels}
    products: dict[str, dict[str, dict[str, Any]]] = {}
    for shape in arguments.shapes:
        measured = measure_kernels(shape, tuple(arguments.rows), chosen, arguments.turns, bandwidth)
        for rows, by_kernel in measured.items():
            products[f"{shape} {rows} rows"] = by_kernel
            cells = "  ".join(
                f"{name} {one['microseconds']['median']:8.1f} ({one['times_bound']:4.1f})"
                for name, one in by_kernel.items()
            )
            print(f"{shape:>10s} {rows:3d} rows  {cells}")
    write_record(arguments.json, head, {"bandwidth": bandwidth.to_json(), "products": products})


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
