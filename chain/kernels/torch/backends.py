"""Backends in PyTorch's operations: as this device multiplies fastest, or as GPUs keep weights.

#   R = rows (tokens of one pass), I = in features, O = out features
"""

import logging
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.formats.checkpoints.awq import QuantizedWeight, cpu_int4_weight, dequantize
from polybasic.chain.formats.checkpoints.blocks import BlockWeight
from polybasic.chain.kernels.backend import WEIGHTS_AT_ONCE, Backend
from polybasic.chain.kernels.product_times import multiplies_fast, name_of
from polybasic.chain.kernels.torch.executor import TorchExecutor
from polybasic.chain.kernels.torch.operations import DeviceLinear, JoinedLinear
from polybasic.chain.kernels.torch.packed_blocks import PackedBlocks
from polybasic.chain.kernels.torch.packed_weight import PackedWeight
from polybasic.chain.kernels.weights import Embedding, Linear, ModelWeights

CPU_INT4_MAX_ROWS = 4
"""Beyond this many rows PyTorch's int4 kernel for the CPU loses to prepacked bfloat16 weights
(benchmarks/products.py)."""

_log = logging.getLogger(__name__)


class TorchBackend(Backend):
    """Eager PyTorch, on any device and in any dtype.

    On a CPU a dense weight is laid out once for oneDNN, which reads it at 1.3x to 2x the rate of
    `F.linear` over few rows; where PyTorch has no fast products in the dtype it is kept in float32.
    For 4-bit weights on a CPU, activations are rounded to bfloat16, passes of up to
    `CPU_INT4_MAX_ROWS` rows read the codes, and longer ones a copy that is dequantized to bfloat16.
    On a GPU a dequantized copy is read.
    """

    name = TorchExecutor.name
    packs_4_bits = False

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self._widens = device.type == "cpu" and not multiplies_fast(dtype)
        self._is_laid_out = device.type == "cpu" and _is_laid_out_by_onednn(dtype)
        self.keeps_dense = not (self._widens or self._is_laid_out)

    def dense(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if self._widens:
            return self._widened(weight, bias)
        if self._is_laid_out:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
            product = torch.ops.mkldnn._linear_pointwise
            return lambda x_RI: product(x_RI, packed, bias, "none", [], "")
        return lambda x_RI: F.linear(x_RI, weight, bias)

    def int4(self, weight: QuantizedWeight, bias: Tensor | None = None) -> Linear:
        if self.device.type != "cpu":
            return self.dense(_dequantized(weight, self.dtype, self.device), bias)
        packed, scales_and_zeros = cpu_int4_weight(weight)
        copied = TorchBackend(self.device, torch.bfloat16)
        dense = copied.dense(_dequantized(weight, torch.bfloat16, self.device))
        group_size, dtype = weight.group_size, self.dtype
        product = torch.ops.aten._weight_int4pack_mm_for_cpu

        def multiply(x_RI: Tensor) -> Tensor:
            x_RI = x_RI.bfloat16()
            if x_RI.shape[0] > CPU_INT4_MAX_ROWS:
                return dense(x_RI).to(dtype)
            found: Tensor = product(x_RI, packed, group_size, scales_and_zeros)
            return found.to(dtype)

        return multiply if bias is None else lambda x_RI: multiply(x_RI) + bias

    def executor(self, weights: ModelWeights) -> TorchExecutor:
        return TorchExecutor(weights)

    def _widened(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A product in float32 whose outputs are rounded to the dtype."""
        _announce_widening(self.dtype)
        wide = TorchBackend(self.device, torch.float32)
        product = wide.dense(weight.float(), None if bias is None else bias.float())
        return lambda x_RI: product(x_RI.float()).to(x_RI.dtype)


class DeviceBackend(Backend):
    """Weights as GPUs keep them; rounds stay on the device.

    Args:
        kind: of the executor.
        packs_4_bits: whether the executor reads packed codes, GGML's blocks among them, and not a
            dequantized copy.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        kind: type[TorchExecutor] = TorchExecutor,
        packs_4_bits: bool = True,
    ) -> None:
        super().__init__(device, dtype)
        self.name, self._kind, self.packs_4_bits = kind.name, kind, packs_4_bits
        self.keeps_blocks = packs_4_bits

    def dense(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return DeviceLinear(weight, bias)

    def int4(self, weight: QuantizedWeight, bias: Tensor | None = None) -> Linear:
        if not self.packs_4_bits:
            return DeviceLinear(_dequantized(weight, self.dtype, self.device), bias)
        return DeviceLinear(PackedWeight.pack(weight, self.device), bias)

    def blocks(self, weights: Sequence[BlockWeight], bias: Tensor | None = None) -> Linear:
        if not self.keeps_blocks or not all(map(PackedBlocks.takes, weights)):
            return super().blocks(weights, bias)
        biases = [None] * len(weights)
        if bias is not None:
            biases = list(bias.split([weight.shape[0] for weight in weights]))
        parts = [
            DeviceLinear(PackedBlocks.pack(weight, self.device), own)
            for weight, own in zip(weights, biases, strict=True)
        ]
        return parts[0] if len(parts) == 1 else JoinedLinear(parts)

    def embedding(self, weight: BlockWeight) -> Embedding:
        if not self.keeps_blocks or not PackedBlocks.takes(weight):
            return super().embedding(weight)
        return self._kind.embedding(PackedBlocks.pack(weight, self.device), self.dtype)

    def executor(self, weights: ModelWeights) -> TorchExecutor:
        return self._kind(weights, runs_on_device=True)


def _is_laid_out_by_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN takes weights in `dtype` on this CPU; it raises for others."""
    operations = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(operations._is_mkldnn_bf16_supported())
    return dtype != torch.float16 or bool(operations._is_mkldnn_fp16_supported())


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
    num_rows = max(1, WEIGHTS_AT_ONCE // dense.shape[1])
    for first in range(0, dense.shape[0], num_rows):
        rows = slice(first, first + num_rows)
        parts = (weight.codes[rows], weight.zeros[rows], weight.scales[rows])
        dense[rows] = dequantize(QuantizedWeight(*(part.to(device) for part in parts)))
    return dense
