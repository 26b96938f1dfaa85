"""Random products of given shapes, and their results in float32.

#   R = rows (tokens of one pass), I = in features, O = out features
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.kernels.cuda.product_launch import Product
from polybasic.chain.kernels.torch.operations import ACTIVATIONS, DeviceLinear, Norm
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
    if isinstance(linear.weight, PackedWeight):
        parts = (linear.weight.words, linear.weight.groups)
        chosen = PackedWeight(*(part.index_select(1, columns) for part in parts))
        weight = chosen.dequantized(torch.float32)
    else:
        weight = linear.weight.index_select(0, columns).float()
    bias = None if linear.bias is None else linear.bias.index_select(0, columns).float()
    return F.linear(x_RI, weight, bias)


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.empty_like(like).normal_(generator=generator)


def _random(weight: Tensor | PackedWeight, generator: torch.Generator) -> Tensor | PackedWeight:
    """A weight whose products with normal rows are about normal."""
    if not isinstance(weight, PackedWeight):
        return _normal(weight, generator) / weight.shape[1] ** 0.5
    words = torch.empty_like(weight.words).random_(-(1 << 31), 1 << 31, generator=generator)
    zeros = torch.empty_like(weight.groups).random_(0, 16, generator=generator)
    scale = torch.tensor(0.2 / weight.shape[1] ** 0.5).half().float()
    return PackedWeight(words, scale.view(torch.int32).to(zeros.device) | zeros)


def _num_bytes(weight: Tensor | PackedWeight) -> int:
    return weight.num_bytes if isinstance(weight, PackedWeight) else weight.nbytes
