"""Drafts by an independent small model, dense or in 4 bits."""

from torch import Tensor

from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.executor import Executor
from polybasic.deploy.drafters.expansion import ExpandingDrafter
from polybasic.deploy.rounds.cache import KeyValueCache


class ModelDrafter(ExpandingDrafter):
    """Drafts by a decoder: the first level reads the unread tokens, every other `top_k` rows.

    A draft depends on the tokens alone; the verifier's states are only counted.

    Args:
        decoder: shares the verifier's token ids.
        tree: shape of the drafts.
        capacity: rows of the decoder's own cache, those of a draft included.
    """

    def __init__(self, decoder: Executor, tree: Tree, capacity: int) -> None:
        self._num_observed = 0
        super().__init__(decoder, KeyValueCache.of(decoder, capacity), tree, lag=0)

    def observe(self, states: Tensor) -> None:
        self._num_observed += len(states)

    def rewind(self, num_observed: int) -> None:
        assert num_observed <= self._num_observed
        self._num_observed = num_observed
        self.cache.truncate(min(self.cache.length, num_observed))

    def begin(self, tokens: list[int]) -> int:
        assert self._num_observed == len(tokens) - 1
        return super().begin(tokens)

    def features(self, start: int, end: int) -> None:
        return None
