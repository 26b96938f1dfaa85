"""Linears on a 4-bit grid that are trained by a LoRA and rounded at every use.

The deltas of a plain LoRA are smaller than half a step of the grid: merged into the weights and
rounded again, most of them vanish. Here rounding is part of training and grid and zeros are fixed,
so the packed weight is the trained one, bit for bit. As in the source, the LoRA's product is in
steps of the grid, so that one learning rate fits all groups.

Source: Bondarenko, Del Chiaro and Nagel 2024, "Low-Rank Quantization-Aware Training for LLMs",
arXiv 2406.06385. LoRA modules are peft's.

#   O = out features, I = in features, G = groups of an output row, g = features of a group
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.awq import QuantizedWeight
from polybasic.chain.formats.checkpoints.quantization import BITS
from polybasic.quantize.settings import DistillSettings

try:
    from peft import LoraConfig, inject_adapter_in_model
except ImportError as error:
    raise UserError(
        "peft cannot be imported", str(error), "pip install 'polybasic[quantize]'"
    ) from error

_LARGEST_CODE = 2**BITS - 1
_CELL_MARGIN = 1e-3  # steps; a weight on the border of its cell could round to either side
_ADAPTER = "default"


class RoundedLinear(nn.Module):
    """A linear whose codes are round(position + LoRA's product), within 0 to 15.

    Args:
        lora: peft's module around the linear; the linear's own weight is dropped.
        weight: the codes before training, with zeros and scales, which stay fixed.
        unrounded: the weight [O, I] that was rounded to these codes. Entries that differ from them
            by more than half a step, because they were clipped, start at the border of their cell.
    """

    positions: Tensor
    zeros: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, lora: Any, weight: QuantizedWeight, unrounded: Tensor) -> None:
        super().__init__()
        device = unrounded.device
        codes = weight.codes.to(device).float().unflatten(1, (-1, weight.group_size))
        self.register_buffer("zeros", weight.zeros.to(device).float().unsqueeze(2))
        self.register_buffer("scales", weight.scales.to(device).float().unsqueeze(2))
        positions = unrounded.unflatten(1, (-1, weight.group_size)) / self.scales + self.zeros
        half_cell = 0.5 - _CELL_MARGIN
        self.register_buffer("positions", positions.clamp(codes - half_cell, codes + half_cell))
        self.quantized, self.bias = weight, lora.base_layer.bias
        self.lora = lora
        lora.base_layer = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        weight_OGg: Tensor = _Rounded.apply(self._moved(), self.zeros, self.scales)
        return F.linear(x, weight_OGg.flatten(1), self.bias)

    @torch.no_grad()
    def merged(self) -> QuantizedWeight:
        """The weight with the trained codes."""
        codes = _codes(self._moved()).flatten(1).to(torch.uint8).cpu()
        return QuantizedWeight(codes, self.quantized.zeros, self.quantized.scales)

    def _moved(self) -> Tensor:
        delta_OI = self.lora.get_delta_weight(_ADAPTER)
        return self.positions + delta_OI.view_as(self.positions)


class _Rounded(torch.autograd.Function):
    """Positions [O, G, g] to weights; the gradient ignores the rounding (straight-through)."""

    @staticmethod
    def forward(ctx: Any, positions: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
        is_inside = (positions >= -0.5) & (positions <= _LARGEST_CODE + 0.5)
        ctx.save_for_backward(is_inside, scales)
        # the operations of `chain.formats.checkpoints.awq.dequantize`, in the same order
        return (_codes(positions) - zeros) * scales

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        is_inside, scales = ctx.saved_tensors
        return gradients[0] * scales * is_inside, None, None


def _codes(positions: Tensor) -> Tensor:
    return positions.round().clamp(0, _LARGEST_CODE)


def adapt_linears(
    layer: nn.Module,
    weights: Mapping[str, QuantizedWeight],
    unrounded: Mapping[str, Tensor],
    settings: DistillSettings,
) -> dict[str, RoundedLinear]:
    """Replace linears of a layer, in place, by trainable ones; everything else is frozen.

    The LoRA's initial weights come from torch's generator; at first they change nothing.

    Args:
        layer: with dequantized linears.
        weights: 4-bit weights of the linears to adapt, by name in the layer.
        unrounded: the same weights before rounding.
        settings: rank and scale of the LoRA.
    """
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]
        target_modules=list(weights),
        # entries of the same size at any width, so that the unit stays a step of the grid
        init_lora_weights="gaussian",
    )
    inject_adapter_in_model(config, layer, adapter_name=_ADAPTER)
    linears = {}
    for name, weight in weights.items():
        linears[name] = RoundedLinear(layer.get_submodule(name), weight, unrounded[name])
        layer.set_submodule(name, linears[name])
    return linears
