"""An output projection as a function of its weight."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LmHead:
    """An output projection with Gemma's soft-capping of logits where the model has one.

    Attributes:
        weight: [V, H], the model's own tensor.
        softcap: c in c * tanh(logits / c), or None.
    """

    weight: Tensor
    softcap: float | None = None

    def __call__(self, states: Tensor) -> Tensor:
        """States after the final norm [..., H] -> logits [..., V]."""
        logits = F.linear(states, self.weight)
        if self.softcap is None:
            return logits
        return (logits / self.softcap).tanh() * self.softcap

    def to(self, dtype: torch.dtype) -> "LmHead":
        """The same in another dtype; no copy where it has it already."""
        return replace(self, weight=self.weight.to(dtype))
