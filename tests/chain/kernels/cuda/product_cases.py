"""Random products and what float32 makes of them, for tests of their kernels."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.awq import dequantize, round_to_nearest
from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES
from polybasic.chain.kernels.cuda.products.launch import Product, Tiling
from polybasic.chain.kernels.cuda.products.options import (
    BLOCK_SHAPES,
    DENSE_SHAPES,
    PACKED_SHAPES,
    Shape,
)
from polybasic.chain.kernels.torch.operations import ACTIVATIONS, DeviceLinear, Norm, Operations
from polybasic.chain.kernels.torch.packed_blocks import PackedBlocks
from polybasic.chain.kernels.torch.packed_weight import PackedWeight
from tests.chain.native_models import random_blocks

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16]
# the interpreter cuts digits off where it makes bfloat16
TOLERANCES = {torch.float16: 1e-3, torch.bfloat16: 1e-2}
OPERATIONS = Operations()
ABSENT = 0
"""Packing of a dense weight."""
GROUP_SIZES = (32, 64, 128)


def random_product(
    dtype: torch.dtype,
    packing: int | str,
    out_size: int,
    in_size: int,
    num_rows: int,
    activation: str | None = None,
    has_norm: bool = False,
    has_added: bool = False,
    has_bias: bool = True,
) -> tuple[Product, Tensor]:
    """A product, and its weight in float32."""
    generator = torch.Generator().manual_seed(out_size + in_size + num_rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    weight = normal(out_size, in_size) / in_size**0.5
    dense = weight.float()
    if isinstance(packing, str):
        blocks = random_blocks(generator, packing, out_size, in_size)
        weight, dense = PackedBlocks.pack(blocks, CPU), blocks.dequantized()
    elif packing:
        rounded = round_to_nearest(weight, packing)
        weight, dense = PackedWeight.pack(rounded, CPU), dequantize(rounded)
    linear = DeviceLinear(weight, normal(out_size) if has_bias else None)
    norm = Norm(1 + 0.1 * normal(in_size), 1e-5) if has_norm else None
    added = normal(num_rows, out_size) if has_added else None
    return Product(linear, normal(num_rows, in_size), norm, added, activation), dense


def in_float32(product: Product, weight: Tensor) -> Tensor:
    """What a product is, whatever computes it."""
    x, bias = product.x_RI.float(), product.linear.bias
    if product.norm is not None:
        mean_square = (x * x).mean(-1, keepdim=True)
        x = x * (mean_square + product.norm.eps).rsqrt() * product.norm.weight.float()
    out = x @ weight.T
    out = out if bias is None else out + bias.float()
    if product.activation is not None:
        gate, up = out.chunk(2, -1)
        out = ACTIVATIONS[product.activation](gate) * up
    return out if product.added is None else out + product.added.float()


def relative(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.float() - expected).norm() / expected.norm())


@dataclass(frozen=True)
class GpuCase:
    """Products of one kind, each by some tilings, for a GPU that compiles a kernel for each.

    Attributes:
        is_early: kernels begin before the previous one has ended.
        num_variants: of a product, the first ones.
    """

    dtype: torch.dtype
    packing: int | str
    num_rows: int
    is_early: bool = False
    num_variants: int = 4

    def products(self) -> Iterator[tuple[Product, Tensor, Tiling]]:
        """Products, their weights in float32, and tilings: of each shape, in parts and whole."""
        for number, variant in enumerate(VARIANTS[: self.num_variants]):
            made = random_product(self.dtype, self.packing, 1000, 1024, self.num_rows, **variant)
            product, weight = made
            shapes = shapes_of(self.packing)
            for place, shape in enumerate(shapes[product.num_kernel_rows]):
                splits = 4 if (number + place) % 2 == 0 else 1
                tiling = replace(shape.tiling, splits=splits, is_early=self.is_early)
                if self.packing in GROUP_SIZES:
                    tiling = replace(tiling, ins=self.packing)
                yield product, weight, tiling


def shapes_of(packing: int | str) -> dict[int, tuple[Shape, ...]]:
    if isinstance(packing, str):
        return BLOCK_SHAPES
    return PACKED_SHAPES if packing else DENSE_SHAPES


VARIANTS: tuple[dict[str, Any], ...] = (
    {"has_added": True},
    {"has_norm": True},
    {"has_norm": True, "activation": "silu"},
    {"activation": "gelu_pytorch_tanh"},
)
GPU_CASES = [
    *(GpuCase(torch.bfloat16, size, rows) for size in (ABSENT, 128) for rows in (1, 24, 64)),
    *(GpuCase(torch.float16, size, 24) for size in (ABSENT, 128)),
    GpuCase(torch.bfloat16, 64, 24),
    *(GpuCase(torch.bfloat16, size, 24, True, 2) for size in (ABSENT, 128, "Q4_K")),
    *(GpuCase(torch.bfloat16, "Q4_K", rows) for rows in (1, 24, 64)),
    *(GpuCase(torch.bfloat16, name, 24, num_variants=1) for name in BLOCK_TYPES),
    GpuCase(torch.float16, "Q5_1", 24, num_variants=1),
]
"""Each shape, variant, dtype and group size, but not all of them with each other: a kernel takes
seconds to compile, and more of the grid is interpreted."""
