"""Matrix products over a few rows: dense and 4-bit, each with the fastest kernel of its device.

#   R = rows (tokens of one pass), I = in features, O = out features
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.formats.awq import (
    QuantizedWeight,
    cpu_int4_weight,
    dequantize,
    round_to_nearest,
)
from polybasic.chain.kernels.cpu import matrices
from polybasic.chain.kernels.cpu.library import kernels_for
from polybasic.chain.kernels.cpu.matrices import LANES
from polybasic.chain.kernels.cuda import KERNEL_DTYPES
from polybasic.chain.kernels.product_times import multiplies_fast, name_of
from polybasic.chain.kernels.selection import operations_for, reads_4_bits
from polybasic.chain.kernels.torch.operations import DeviceLinear
from polybasic.chain.kernels.torch.packed_weight import PackedWeight

Linear = Callable[[Tensor], Tensor]
"""x [R, I] -> [R, O], both in the compute dtype."""

CPU_INT4_MAX_ROWS = 4
"""Beyond this many rows PyTorch's int4 kernel for the CPU loses to prepacked bfloat16 weights
(benchmarks/products.py)."""

DRAFT_GROUP_SIZE = 64
"""Inputs that share a scale where a head's weights are rounded to 4 bits."""

_log = logging.getLogger(__name__)

_WEIGHTS_AT_ONCE = 1 << 22
"""That are rounded to 4 bits or dequantized: in float32 all would be larger than what is made."""


@dataclass(frozen=True)
class Softcapped:
    """A product whose outputs are kept between -softcap and softcap."""

    linear: Linear
    softcap: float

    def __call__(self, x_RI: Tensor) -> Tensor:
        return softcapped(self.linear(x_RI), self.softcap)


def softcapped(x: Tensor, softcap: float) -> Tensor:
    """`x`, kept between -softcap and softcap."""
    return (x / softcap).tanh() * softcap


def dense_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """A product with `weight` [O, I] on its device and in its dtype, plus `bias` [O].

    On a CPU the weight is laid out once for the native kernels, or without them for oneDNN, which
    reads it at 1.3x to 2x the rate of `F.linear` over few rows; the given tensor is then not kept.
    Where PyTorch has no fast products in the dtype, it is kept in float32. The device path keeps
    it as it is.
    """
    operations = operations_for(weight.device, weight.dtype)
    if operations is not None:
        return DeviceLinear(operations, weight, bias)
    kernels = kernels_for(weight.device, weight.dtype)
    if kernels is not None and weight.shape[1] % LANES == 0:
        return matrices.dense(kernels, weight, bias)
    is_on_cpu = weight.device.type == "cpu"
    if is_on_cpu and not multiplies_fast(weight.dtype):
        return _widened(weight, bias)
    if is_on_cpu and _is_laid_out_by_onednn(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        product = torch.ops.mkldnn._linear_pointwise
        return lambda x_RI: product(x_RI, packed, bias, "none", [], "")
    return lambda x_RI: F.linear(x_RI, weight, bias)


def draft_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """A product that only drafts: kernels read weights that were rounded to 4 bits.

    Bad drafts cost time and no quality, and a head of a quarter of the bytes stays in the
    processor's caches from one level of a draft to the next.
    """
    if not drafts_in_4_bits(weight.device, weight.dtype, weight.shape[1]):
        return dense_linear(weight, bias)
    num_rows = max(1, _WEIGHTS_AT_ONCE // weight.shape[1])
    rounded = [round_to_nearest(rows, DRAFT_GROUP_SIZE) for rows in weight.split(num_rows)]
    return int4_linear(QuantizedWeight.stack(rounded), weight.dtype, weight.device, bias)


def drafts_in_4_bits(device: torch.device, dtype: torch.dtype, in_size: int) -> bool:
    """Whether `draft_linear` rounds a weight over so many inputs: never one in float32."""
    if in_size % DRAFT_GROUP_SIZE:
        return False
    if kernels_for(device, dtype) is not None:
        return dtype == torch.bfloat16
    return dtype in KERNEL_DTYPES and reads_4_bits(device, dtype)


def is_laid_out_anew(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `dense_linear` copies such a weight into another layout instead of keeping it."""
    if operations_for(device, dtype) is not None:
        return False
    if kernels_for(device, dtype) is not None:
        return True
    if device.type != "cpu":
        return False
    return _is_laid_out_by_onednn(dtype) or not multiplies_fast(dtype)


def int4_linear(
    weight: QuantizedWeight, dtype: torch.dtype, device: torch.device, bias: Tensor | None = None
) -> Linear:
    """A product with a 4-bit weight.

    On a CPU the native kernels round activations to eight bits, group by group. Without them,
    activations are rounded to bfloat16, passes of up to `CPU_INT4_MAX_ROWS` rows read the 4-bit
    codes, and longer ones a copy that is dequantized to bfloat16 and kept by `dense_linear`. The
    device path reads packed codes where it has kernels for them. Elsewhere a dequantized copy in
    `dtype` is read. `bias` [O] is in `dtype` and on the device.
    """
    operations = operations_for(device, dtype)
    if operations is not None and reads_4_bits(device, dtype):
        return DeviceLinear(operations, PackedWeight.pack(weight, device), bias)
    kernels = kernels_for(device, dtype)
    if kernels is not None and weight.group_size % LANES == 0:
        return matrices.int4(kernels, weight, bias)
    if device.type != "cpu":
        return dense_linear(_dequantized(weight, dtype, device), bias)
    packed, scales_and_zeros = cpu_int4_weight(weight)
    dense = dense_linear(_dequantized(weight, torch.bfloat16, device))
    group_size = weight.group_size
    product = torch.ops.aten._weight_int4pack_mm_for_cpu

    def multiply(x_RI: Tensor) -> Tensor:
        x_RI = x_RI.bfloat16()
        if x_RI.shape[0] > CPU_INT4_MAX_ROWS:
            return dense(x_RI).to(dtype)
        return product(x_RI, packed, group_size, scales_and_zeros).to(dtype)

    return multiply if bias is None else lambda x_RI: multiply(x_RI) + bias


def _is_laid_out_by_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN takes weights in `dtype` on this CPU; it raises for others."""
    operations = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(operations._is_mkldnn_bf16_supported())
    return dtype != torch.float16 or bool(operations._is_mkldnn_fp16_supported())


def _widened(weight: Tensor, bias: Tensor | None) -> Linear:
    """A product in float32 whose outputs are rounded to the dtype of `weight`."""
    dtype = weight.dtype
    _announce_widening(dtype)
    product = dense_linear(weight.float(), None if bias is None else bias.float())
    return lambda x_RI: product(x_RI.float()).to(dtype)


@cache
def _announce_widening(dtype: torch.dtype) -> None:
    _log.warning(
        "PyTorch has no fast %s on this CPU: weights are kept in float32, in twice the memory%s",
        name_of(dtype),
        "; dtype bfloat16 is faster here" if multiplies_fast(torch.bfloat16) else "",
    )


def _dequantized(weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`dequantize` some rows at a time."""
    dense = torch.empty(weight.codes.shape, dtype=dtype, device=device)
    num_rows = max(1, _WEIGHTS_AT_ONCE // dense.shape[1])
    for first in range(0, dense.shape[0], num_rows):
        rows = slice(first, first + num_rows)
        parts = (weight.codes[rows], weight.zeros[rows], weight.scales[rows])
        dense[rows] = dequantize(QuantizedWeight(*(part.to(device) for part in parts)))
    return dense
