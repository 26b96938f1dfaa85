"""What a matrix product over a few rows costs on this CPU, by kernel.

    python benchmarks/kernels.py [--shapes 1024x256 4096x4096] [--json FILE]

Kernels: `F.linear` in float32 and bfloat16, oneDNN with bfloat16 weights laid out once (what
`polybasic.chain.linear.dense_linear` uses), PyTorch's int4 kernel (what 4-bit members use up to
`CPU_INT4_MAX_ROWS` rows). Prints median microseconds; kernels take turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from polybasic.chain.awq import QuantizedWeight, cpu_int4_weight
from polybasic.chain.files import write_json
from polybasic.chain.linear import dense_linear
from polybasic.deploy.hardware import describe_hardware

ROWS = (1, 2, 4, 8, 16, 32)
SHAPES = ("512x256", "1536x256", "256x768", "4096x256", "2048x1024", "4096x4096")
REPEATS = 41


def kernels(out_size: int, in_size: int, rows: int) -> dict[str, Callable[[], object]]:
    """Each kernel as a call on fresh tensors of this shape."""
    weight = torch.randn(out_size, in_size) / in_size**0.5
    x = torch.randn(rows, in_size)
    narrow_weight, narrow_x = weight.bfloat16(), x.bfloat16()
    packed_linear = dense_linear(narrow_weight)
    groups = in_size // 128
    quantized = QuantizedWeight(
        torch.randint(0, 16, (out_size, in_size), dtype=torch.uint8),
        torch.full((out_size, groups), 8, dtype=torch.uint8),
        torch.full((out_size, groups), 0.01, dtype=torch.float16),
    )
    packed, scales_and_zeros = cpu_int4_weight(quantized)
    int4 = torch.ops.aten._weight_int4pack_mm_for_cpu
    return {
        "float32": lambda: F.linear(x, weight),
        "bfloat16": lambda: F.linear(narrow_x, narrow_weight),
        "bfloat16 packed": lambda: packed_linear(narrow_x),
        "int4": lambda: int4(narrow_x, packed, 128, scales_and_zeros),
    }


def medians(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median microseconds of each kernel; each turn runs a kernel ten times."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(REPEATS + 3):
        for name, run in runs.items():
            begin = time.perf_counter()
            for _ in range(10):
                run()
            if turn >= 3:
                taken[name].append(1e5 * (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="OUTxIN")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    hardware = describe_hardware(torch.device("cpu"))
    print(f"{hardware}\ntorch {torch.__version__}, median microseconds")
    microseconds: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for shape in arguments.shapes:
            out_size, in_size = map(int, shape.split("x"))
            for rows in ROWS:
                found = medians(kernels(out_size, in_size, rows))
                microseconds[f"{shape} {rows} rows"] = found
                cells = "  ".join(f"{name} {value:8.1f}" for name, value in found.items())
                print(f"{shape:>10s} {rows:3d} rows  {cells}")
    if arguments.json:
        record = {"hardware": hardware, "torch": torch.__version__}
        write_json(arguments.json, record | {"microseconds": microseconds})


if __name__ == "__main__":
    main()
