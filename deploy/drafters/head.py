"""Drafts by a head, which continues the verifier's features."""

import torch
from torch import Tensor

from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.executor import Executor
from polybasic.deploy.drafters.expansion import ExpandingDrafter
from polybasic.deploy.rounds.cache import KeyValueCache


class EagleDrafter(ExpandingDrafter):
    """Drafts by a head: the first level reads the new observations, every other one `top_k` rows.

    A draft depends only on the tokens and the observed states.

    Args:
        head: the draft head.
        tree: shape of the drafts.
        capacity: rows of the head's cache, those of a draft included.

    Attributes:
        observed: [capacity, input width of the head], from the verifier's states, by position.
    """

    def __init__(self, head: Executor, tree: Tree, capacity: int) -> None:
        # By position, so that any row of the cache can be read again.
        self.observed = torch.zeros(
            capacity, head.weights.input_width, dtype=head.dtype, device=head.device
        )
        self._num_observed = 0
        # A row reads the state of one token and the token after it.
        super().__init__(head, KeyValueCache.of(head, capacity), tree, lag=1)

    def observe(self, states: Tensor) -> None:
        end = self._num_observed + len(states)
        self.observed[self._num_observed : end] = self.model.weights.select_inputs(states)
        self._num_observed = end

    def rewind(self, num_observed: int) -> None:
        assert num_observed <= self._num_observed
        self._num_observed = num_observed
        # Row t also holds token t + 1, so the last row is read again.
        self.cache.truncate(min(self.cache.length, max(num_observed - 1, 0)))

    def begin(self, tokens: list[int]) -> int:
        assert self._num_observed == len(tokens) - 1 >= 1
        return super().begin(tokens)

    def features(self, start: int, end: int) -> Tensor:
        return self.model.features(self.observed[start:end])
