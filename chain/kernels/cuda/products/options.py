"""Options for computing a product that are worth measuring."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from polybasic.chain.formats.checkpoints.block_types import DEVICE_STEP
from polybasic.chain.kernels.cuda.products.launch import Product, Tiling
from polybasic.chain.kernels.torch.packed_blocks import PackedBlocks
from polybasic.chain.kernels.torch.packed_weight import PackedWeight

Option = Tiling | None
"""How to compute a product; None means PyTorch's operations."""

_MIN_STEPS = 4
_MAX_SPLITS = 16
_LIKELIEST = 2


@dataclass(frozen=True)
class Task:
    """What the choice of a kernel depends on.

    Attributes:
        weight: "bfloat16", "float16", or of a packed one "bfloat16 int4/128" with the size of its
            groups, or "bfloat16 Q4_K" with the type of its blocks.
        rows: that kernels are compiled for, at most 64.
    """

    weight: str
    out_size: int
    in_size: int
    rows: int
    has_norm: bool
    has_added: bool
    is_gated: bool

    @classmethod
    def of(cls, product: Product) -> "Task":
        """The task of a product that can be launched."""
        weight = str(product.x_RI.dtype).removeprefix("torch.")
        if isinstance(product.linear.weight, PackedWeight):
            weight += f" int4/{product.linear.weight.group_size}"
        elif isinstance(product.linear.weight, PackedBlocks):
            weight += f" {product.linear.weight.type.name}"
        return cls(
            weight,
            *product.linear.shape,
            product.num_kernel_rows,
            product.norm is not None,
            product.added is not None,
            product.activation is not None,
        )

    def __str__(self) -> str:
        parts = [self.weight, f"{self.out_size}x{self.in_size}", f"{self.rows} rows"]
        flags = {"norm": self.has_norm, "added": self.has_added, "gated": self.is_gated}
        return " ".join([*parts, *(name for name, is_set in flags.items() if is_set)])


@dataclass(frozen=True)
class Shape:
    """A tile of a program, and how many such programs one multiprocessor holds."""

    tiling: Tiling
    resident: int


PACKED_SHAPES = {
    16: (
        Shape(Tiling(128, 128, warps=4, stages=4, registers=128), 4),
        Shape(Tiling(256, 128, warps=8, stages=3, registers=128), 2),
    ),
    32: (
        Shape(Tiling(128, 128, warps=4, stages=3, registers=168), 3),
        Shape(Tiling(256, 128, warps=8, stages=4), 1),
        Shape(Tiling(64, 128, warps=4, stages=4), 2),
    ),
    64: (
        Shape(Tiling(256, 128, warps=8, stages=3), 1),
        Shape(Tiling(128, 128, warps=4, stages=3), 2),
    ),
}
DENSE_SHAPES = {
    16: (
        Shape(Tiling(128, 64, warps=4, stages=4), 3),
        Shape(Tiling(64, 128, warps=4, stages=3), 3),
    ),
    32: (
        Shape(Tiling(128, 64, warps=4, stages=4), 2),
        Shape(Tiling(64, 128, warps=4, stages=3), 3),
    ),
    64: (
        Shape(Tiling(128, 64, warps=4, stages=4), 2),
        Shape(Tiling(128, 64, warps=8, stages=4), 2),
    ),
}
BLOCK_SHAPES = {
    16: (
        Shape(Tiling(128, DEVICE_STEP, warps=4, stages=4, registers=128), 4),
        Shape(Tiling(64, DEVICE_STEP, warps=4, stages=4), 6),
    ),
    32: (
        Shape(Tiling(128, DEVICE_STEP, warps=4, stages=4, registers=168), 3),
        Shape(Tiling(64, DEVICE_STEP, warps=4, stages=4), 4),
    ),
    64: (
        Shape(Tiling(128, DEVICE_STEP, warps=8, stages=4), 1),
        Shape(Tiling(64, DEVICE_STEP, warps=4, stages=4), 2),
    ),
}
"""By rows. Registers, shared memory and spills were checked in the machine code for sm_90, and the
stages cover its memory latency. Steps of a packed weight are its groups, whatever is given here.
Over 32 rows a short product gains more from narrow tiles than it loses: half the splits."""


def options_of(task: Task, processors: int) -> list[Tiling]:
    """Divisions worth measuring, the likeliest first, all with the norm fused.

    Inputs are split so that there are about one or two programs on each multiprocessor, or as many
    as fit.
    """
    _, _, packed = task.weight.partition(" ")
    shapes: Mapping[int, Sequence[Shape]] = BLOCK_SHAPES if packed else DENSE_SHAPES
    if has_groups := packed.startswith("int4"):
        shapes = PACKED_SHAPES
    options = []
    for shape in shapes[task.rows]:
        tiling = shape.tiling
        if has_groups:
            tiling = replace(tiling, ins=int(packed.partition("/")[2]))
        num_tiles = -(-task.out_size // tiling.outs)
        most = max(1, min(_MAX_SPLITS, task.in_size // tiling.ins // _MIN_STEPS))
        filling = sorted(range(1, shape.resident + 1), key=lambda each: abs(each - _LIKELIEST))
        splits = [max(1, min(most, each * processors // num_tiles)) for each in filling]
        options += [replace(tiling, splits=each) for each in dict.fromkeys(splits)]
    return options


def fixed_option(product: Product) -> Tiling:
    """The likeliest division, which interpreted kernels use."""
    return options_of(Task.of(product), num_processors(product.x_RI.device))[0]


def described(option: Option) -> str:
    """An option in a few words, such as "128x64 splits 4 warps 4 stages 3"."""
    if option is None:
        return "torch"
    limit = "" if option.registers is None else f" registers {option.registers}"
    return (
        f"{option.outs}x{option.ins} splits {option.splits} warps {option.warps} "
        f"stages {option.stages}{limit}{'' if option.is_fused else ', norm before'}"
        f"{', early' if option.is_early else ''}"
    )


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors; for a CPU, where kernels are interpreted, an H200's."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
