"""What a verifier's pass leaves for a draft head.

Shapes: B = batch, T = tokens, H = hidden size, K = most probable tokens that are kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from polybasic.train.data.batches import LocalBatch


@dataclass(frozen=True)
class Features:
    """States of right-padded token ids, and what the verifier expects after each.

    Attributes:
        states: [B, T, H], after the final norm: what the verifier's lm_head reads.
        layers: [B, T, 3H], the inputs of an EAGLE-3 head's three layers side by side; [B, T, H]
            that of an early exit's; None for other heads.
        top_token_ids: int32 [B, T, K], the most probable next tokens, most probable first; None
            where the distribution is made of `states` when it is needed.
        top_log_probs: float16 [B, T, K], of these, over the whole vocabulary.
    """

    states: Tensor
    layers: Tensor | None = None
    top_token_ids: Tensor | None = None
    top_log_probs: Tensor | None = None

    def __getitem__(self, index: Any) -> "Features":
        """Those of some tokens, by an index of the leading dimensions."""
        return self.map(lambda tensor: tensor[index])

    @property
    def taught(self) -> "Features":
        """What the rows of a head are held against, of tokens 1 .. T-2."""
        return replace(self, layers=None)[:, 1:-1]

    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by the attributes' names."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> "Features":
        """The same of other tensors, each made of its own."""
        return Features(**{name: function(tensor) for name, tensor in self.tensors().items()})

    def to(self, dtype: torch.dtype) -> "Features":
        """The same with states in another dtype; no copy where they have it already."""
        layers = None if self.layers is None else self.layers.to(dtype)
        return replace(self, states=self.states.to(dtype), layers=layers)


class FeatureSource(Protocol):
    """Where a run takes the features of its batches from."""

    def of(self, step: int, share: LocalBatch) -> Features:
        """Features of a process's share of the batch of a step, on the share's device."""
