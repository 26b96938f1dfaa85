"""Drafts by an independent model that the verifier's states steer."""

import torch
from torch import Tensor

from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.torch.steering import SteeredExecutor
from polybasic.deploy.runtime.drafters.expansion import ExpandingDrafter
from polybasic.deploy.runtime.drafters.head import EagleDrafter, Observed
from polybasic.deploy.runtime.rounds.cache import KeyValueCache


class SteeredDrafter(EagleDrafter):
    """Drafts by a steered decoder, which reads each token with the state of the token before it.

    A draft depends only on the tokens and the observed states.

    Args:
        decoder: steered.
        tree: shape of the drafts.
        capacity: rows of the decoder's own cache, those of a draft included.
    """

    def __init__(self, decoder: SteeredExecutor, tree: Tree, capacity: int) -> None:
        self.observed = Observed(decoder, capacity, decoder.verifier_width)
        cache = KeyValueCache.of(decoder, capacity)
        ExpandingDrafter.__init__(self, decoder, cache, tree, lag=0)

    @property
    def min_tokens(self) -> int:
        """The first token has no state before it, and is never drafted from."""
        return 2

    def observe(self, states: Tensor) -> None:
        self.observed.append(states[:, : self.observed.inputs.shape[1]])

    def features(self, start: int, end: int, rows_ahead: int = 0) -> Tensor:
        before = self.observed.inputs[max(start - 1, 0) : end - 1]
        if start > 0:
            return before
        return torch.cat([torch.zeros_like(self.observed.inputs[:1]), before])
