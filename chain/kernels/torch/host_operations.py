"""Operations whose shapes depend on numbers, for logits that are sampled on the host."""

import numpy as np
import torch
from torch import Tensor

from polybasic.chain.kernels.torch.operations import SHARES, Operations

_LEAST = (2.0**-9, 2.0**-13, 2.0**-17, 2.0**-21)
"""Bounds of the probabilities that are sorted, tried one after the other."""


class HostOperations(Operations):
    """The same results as those of its base, of logits on a CPU sooner; not to be captured."""

    def without_tail(self, logits: Tensor, probabilities: Tensor, top_p: Tensor) -> Tensor:
        """See the base. No more probabilities are sorted than a row needs."""
        if logits.device.type != "cpu":
            return super().without_tail(logits, probabilities, top_p)
        enough = (top_p * SHARES).long().clamp(min=1).expand(len(logits), 1).flatten().tolist()
        found = torch.full_like(logits, float("-inf"))
        for logits_V, probabilities_V, found_V, units in zip(
            logits, probabilities, found, enough, strict=True
        ):
            kept = _head(probabilities_V, units)
            found_V[kept] = logits_V[kept]
        return found


def _head(probabilities: Tensor, enough: int) -> Tensor:
    """Indices of the most probable tokens of [V] that reach `enough` units, or of all.

    Tokens below a bound are left out where those above it reach so many: then none of them counts,
    however they are ordered.
    """
    candidates = torch.arange(len(probabilities))
    for least in _LEAST:
        # ten times as fast as PyTorch's search
        likely = torch.from_numpy(np.flatnonzero(probabilities.numpy() >= least))
        if (probabilities[likely] * SHARES).long().sum() >= enough:
            candidates = likely
            break
    ordered, order = probabilities[candidates].sort(descending=True, stable=True)
    shares = (ordered.nan_to_num(0.0) * SHARES).long()
    return candidates[order[shares.cumsum(0) - shares < enough]]
