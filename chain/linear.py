"""Matrix products over a few rows: dense and 4-bit, each with the fastest kernel of its device.

#   R = rows (tokens of one pass), I = in features, O = out features
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.awq import QuantizedWeight, cpu_int4_weight, dequantize

Linear = Callable[[Tensor], Tensor]
"""x [R, I] -> [R, O], both in the compute dtype."""

CPU_INT4_MAX_ROWS = 4
"""Beyond this many rows PyTorch's int4 kernel for the CPU loses to prepacked bfloat16 weights
(benchmarks/kernels.py)."""


def dense_linear(weight: Tensor) -> Linear:
    """A product with `weight` [O, I] on its device and in its dtype.

    On a CPU the weight is laid out once for oneDNN, which reads it at 1.3x to 2x the rate of
    `F.linear` over few rows; the given tensor is not kept.
    """
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        product = torch.ops.mkldnn._linear_pointwise
        return lambda x_RI: product(x_RI, packed, None, "none", [], "")
    return lambda x_RI: F.linear(x_RI, weight)


def int4_linear(weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> Linear:
    """A product with a 4-bit weight; activations are rounded to bfloat16 for the int4 kernel.

    On a CPU, passes of up to `CPU_INT4_MAX_ROWS` rows read the 4-bit codes and longer ones a
    dequantized copy in bfloat16; elsewhere a dequantized copy in `dtype` is read.
    """
    if device.type != "cpu":
        return dense_linear(dequantize(weight).to(device, dtype))
    packed, scales_and_zeros = cpu_int4_weight(weight)
    dense = dense_linear(dequantize(weight).bfloat16())
    group_size = weight.group_size
    product = torch.ops.aten._weight_int4pack_mm_for_cpu

    def multiply(x_RI: Tensor) -> Tensor:
        x_RI = x_RI.bfloat16()
        if x_RI.shape[0] > CPU_INT4_MAX_ROWS:
            return dense(x_RI).to(dtype)
        return product(x_RI, packed, group_size, scales_and_zeros).to(dtype)

    return multiply
