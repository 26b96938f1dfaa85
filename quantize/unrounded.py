"""Reconstructs the weights that AWQ had scaled but not yet rounded, from target and intermediate.

The position of a weight in its cell of the grid determines in which direction it moves first in
training; the rounded weight alone is always in the middle. The scale that AWQ folded into a norm is
the quotient of both models' norms, and that of an up projection is the factor that brings its rows
closest. So only the two checkpoints are needed, whenever they were written.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from polybasic.quantize.models import norm_factor

_READERS = {
    "input_layernorm": ("self_attn.q_proj",),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
    "pre_feedforward_layernorm": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
}
"""Linears that read each norm; the third norm is Gemma's, whose second norms attention's output."""
_UP = ("mlp.up_proj", "mlp.gate_up_proj")


@torch.no_grad()
def unrounded_weights(exact: nn.Module, rounded: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights [out, in] that compute what the target's do, by the linear's name in the layer.

    Keys and values are left out (k_proj and v_proj, or a fused qkv_proj).

    Args:
        exact: a layer of the target.
        rounded: the same layer of the intermediate, with its linears dequantized.
    """
    linears = {name for name, each in exact.named_modules() if isinstance(each, nn.Linear)}
    norms = dict(_READERS)
    if hasattr(exact, "pre_feedforward_layernorm"):
        del norms["post_attention_layernorm"]
    down = exact.get_parameter("mlp.down_proj.weight")
    for norm, readers in norms.items():
        if not hasattr(exact, norm):
            continue
        before, after = (norm_factor(layer.get_submodule(norm)) for layer in (exact, rounded))
        for name in readers:
            if name not in linears:
                continue
            weight = exact.get_parameter(f"{name}.weight") * _quotient(before, after)
            if name in _UP:
                up = weight[-down.shape[1] :]
                folded = rounded.get_parameter(f"{name}.weight")[-down.shape[1] :]
                factor = _closest_factor(up, folded)
                up *= factor.unsqueeze(1)
                yield "mlp.down_proj", down / factor
            yield name, weight
    yield "self_attn.o_proj", exact.get_parameter("self_attn.o_proj.weight").clone()


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    quotient = numerator / denominator
    return torch.where(torch.isfinite(quotient) & (quotient > 0), quotient, 1)


def _closest_factor(rows: Tensor, rounded: Tensor) -> Tensor:
    """For each row, the factor that brings it closest to the rounded one."""
    return _quotient((rows * rounded).sum(1), rows.square().sum(1))
