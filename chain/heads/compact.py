"""Heads in 8 bits, to be kept or sent: matrices as whole numbers with a scale for each row.

Tensors are named as compressed-tensors names them, `weight` in int8 and `weight_scale`; they stand
for their products, which is what `polybasic.chain.heads.importing` makes of them. The embedding,
which a target has too, is left out.
"""

import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.heads.checks import EMBEDDING

_SCALE = "_scale"
_LARGEST = 127


def compacted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A head's tensors in 8 bits: of a row of a matrix the largest weight becomes 127."""
    made = {}
    for name, tensor in tensors.items():
        if name == EMBEDDING:
            continue
        if tensor.dim() != 2 or not tensor.is_floating_point():
            made[name] = tensor
            continue
        weight = tensor.float()
        scale = (weight.abs().amax(dim=1, keepdim=True) / _LARGEST).to(tensor.dtype)
        steps = torch.where(scale == 0, 0.0, weight / scale.float())
        made[name] = steps.round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
        made[name + _SCALE] = scale
    return made


def expanded(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """The tensors that those of a head in 8 bits stand for, in the dtype of the scales; others stay
    as they are.

    Args:
        where: they are, for errors.

    Raises:
        UserError: a scale without its matrix, or of another shape.
    """
    made = {name: tensor for name, tensor in tensors.items() if not name.endswith(_SCALE)}
    for name, scale in tensors.items():
        if name not in made:
            weight = made.get(name.removesuffix(_SCALE))
            if weight is None or weight.dtype != torch.int8 or scale.shape != (len(weight), 1):
                raise UserError(
                    "scale without a matrix of 8 bits",
                    f"{name} in {where}",
                    "export the head again",
                )
            made[name.removesuffix(_SCALE)] = (weight.float() * scale.float()).to(scale.dtype)
    return made
