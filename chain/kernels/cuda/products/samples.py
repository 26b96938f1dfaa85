"""Random products of given shapes, and their results in float32.

#   R = rows (tokens of one pass), I = in features, O = out features
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.kernels.cuda.products.launch import Product
from polybasic.chain.kernels.torch.operations import (
    ACTIVATIONS,
    DeviceLinear,
    DeviceWeight,
    Norm,
)
from polybasic.chain.kernels.torch.packed_blocks import PackedBlocks
from polybasic.chain.kernels.torch.packed_weight import PackedWeight

_MAX_CHECKED = 1024
_CACHES = 3
_MAX_SAMPLES = 32
"""Beyond which small weights are timed within the cache: each sample is some nodes of a graph."""
_DEFAULT_CACHE_BYTES = 1 << 20


def samples_of(product: Product) -> list[Product]:
    """Products of the same shapes over random numbers, with `num_samples` different weights."""
    device = product.x_RI.device
    generator = torch.Generator(device).manual_seed(0)
    linear, norm = product.linear, product.norm
    x_RI = _normal(product.x_RI, generator)
    added = None if product.added is None else _normal(product.added, generator)
    bias = None if linear.bias is None else _normal(linear.bias, generator)
    if norm is not None:
        norm = Norm(1 + 0.1 * _normal(norm.weight, generator), norm.eps)
    return [
        replace(
            product,
            linear=DeviceLinear(_random(linear.weight, generator), bias),
            x_RI=x_RI,
            norm=norm,
            added=added,
        )
        for _ in range(num_samples(_num_bytes(linear.weight), device))
    ]


def num_samples(weight_bytes: int, device: torch.device) -> int:
    """As many weights as are three times as large as the GPU's cache, at most 32; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    found = torch.cuda.get_device_properties(device)
    cache_bytes = getattr(found, "L2_cache_size", _DEFAULT_CACHE_BYTES)
    return min(_MAX_SAMPLES, 1 + -(-_CACHES * cache_bytes // weight_bytes))


def relative_error(product: Product, found: Tensor) -> float:
    """Relative error against float32 (Euclidean norm), over some columns if there are many."""
    num_columns = found.shape[1]
    columns = torch.linspace(0, num_columns - 1, min(num_columns, _MAX_CHECKED)).long()
    columns = columns.to(found.device)
    expected = _expected(product, columns)
    difference = found.index_select(1, columns).float() - expected
    return float(difference.norm() / expected.norm())


def _expected(product: Product, columns: Tensor) -> Tensor:
    """The columns of a product in float32."""
    x_RI = product.x_RI.float()
    if product.norm is not None:
        weight = product.norm.weight.float()
        x_RI = F.rms_norm(x_RI, weight.shape, weight, product.norm.eps)
    if product.activation is not None:
        out_size = product.linear.shape[0]
        gate = _multiplied(product.linear, x_RI, columns)
        up = _multiplied(product.linear, x_RI, columns + out_size // 2)
        return ACTIVATIONS[product.activation](gate) * up
    out = _multiplied(product.linear, x_RI, columns)
    return out if product.added is None else out + product.added.index_select(1, columns).float()


def _multiplied(linear: DeviceLinear, x_RI: Tensor, columns: Tensor) -> Tensor:
    if isinstance(linear.weight, Tensor):
        weight = linear.weight.index_select(0, columns).float()
    else:
        weight = linear.weight.of_outputs(columns).dequantized(torch.float32)
    bias = None if linear.bias is None else linear.bias.index_select(0, columns).float()
    return F.linear(x_RI, weight, bias)


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.empty_like(like).normal_(generator=generator)


def _random(weight: DeviceWeight, generator: torch.Generator) -> DeviceWeight:
    """A weight whose products with normal rows are about normal."""
    if isinstance(weight, Tensor):
        return _normal(weight, generator) / weight.shape[1] ** 0.5
    if isinstance(weight, PackedBlocks):
        return _random_blocks(weight, generator)
    words = _random_bits(weight.words, generator)
    zeros = torch.empty_like(weight.groups).random_(0, 16, generator=generator)
    scale = torch.tensor(0.2 / weight.shape[1] ** 0.5).half().float()
    return PackedWeight(words, scale.view(torch.int32).to(zeros.device) | zeros)


def _random_blocks(weight: PackedBlocks, generator: torch.Generator) -> PackedBlocks:
    kind = weight.type
    scale = 12**0.5 / 2**kind.bits / weight.shape[1] ** 0.5
    levels = [scale, -scale * 2 ** (kind.bits - 1)] if kind.has_offsets else [scale, scale]
    factors, constants = weight.factors, weight.constants
    if constants is None:
        factors = _filled(factors, levels)
    else:
        factors = _random_bits(factors, generator)
        if kind.has_offsets:
            factors &= 0x3F3F3F3F
        constants = _filled(constants, [abs(level) / 32 for level in levels])
    high = None if weight.high is None else _random_bits(weight.high, generator)
    return PackedBlocks(kind, _random_bits(weight.words, generator), high, factors, constants)


def _filled(words: Tensor, halves: list[float]) -> Tensor:
    """Each word of two numbers in float16."""
    word = torch.tensor(halves).half().view(torch.int32)
    return word.to(words.device).expand(words.shape).contiguous()


def _random_bits(words: Tensor, generator: torch.Generator) -> Tensor:
    most = torch.iinfo(words.dtype).max
    return torch.empty_like(words).random_(-most - 1, most + 1, generator=generator)


def _num_bytes(weight: DeviceWeight) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes
