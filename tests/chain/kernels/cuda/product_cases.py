"""Random products and what float32 makes of them, for tests of their kernels."""

import torch
from torch import Tensor

from polybasic.chain.formats.awq import dequantize, round_to_nearest
from polybasic.chain.kernels.cuda.product_launch import Product
from polybasic.chain.kernels.torch.operations import ACTIVATIONS, DeviceLinear, Norm, Operations
from polybasic.chain.kernels.torch.packed_weight import PackedWeight

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16]
# the interpreter cuts digits off where it makes bfloat16
TOLERANCES = {torch.float16: 1e-3, torch.bfloat16: 1e-2}
OPERATIONS = Operations()
ABSENT = 0
"""Group size of a dense weight."""


def random_product(
    dtype: torch.dtype,
    group_size: int,
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
    if group_size:
        rounded = round_to_nearest(weight, group_size)
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
