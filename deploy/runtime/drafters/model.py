"""Drafts by an independent small model, dense or in 4 bits."""

from torch import Tensor

from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.executor import Executor
from polybasic.deploy.runtime.drafters.expansion import ExpandingDrafter
from polybasic.deploy.runtime.rounds.cache import KeyValueCache


class ModelDrafter(ExpandingDrafter):
    """Drafts by a decoder: the first level reads the unread tokens, every other `top_k` rows.

    A draft depends on the tokens alone, not on the verifier's states.

    Args:
        decoder: shares the verifier's token ids.
        tree: shape of the drafts.
        capacity: rows of the decoder's own cache, those of a draft included.
    """

    num_observed = None

    def __init__(self, decoder: Executor, tree: Tree, capacity: int) -> None:
        super().__init__(decoder, KeyValueCache.of(decoder, capacity), tree, lag=0)

    def observe(self, states: Tensor) -> None:
        """Nothing to learn from."""

    def rewind(self, num_observed: int) -> None:
        self.cache.truncate(min(self.cache.length, num_observed))

    def features(self, start: int, end: int, rows_ahead: int = 0) -> None:
        return None
