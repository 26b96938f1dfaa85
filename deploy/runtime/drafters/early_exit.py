"""Drafts by the first layers of the verifier itself, over the verifier's cache."""

from typing import Self

from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.executor import Executor
from polybasic.deploy.runtime.drafters.model import ModelDrafter
from polybasic.deploy.runtime.rounds.cache import KeyValueCache


class EarlyExitDrafter(ModelDrafter):
    """Drafts by an early exit: the first level reads the last token, every other `top_k` rows.

    The rows of all other tokens are the verifier's. Those that a draft writes lie behind them, and
    the pass that verifies the draft overwrites them.

    Args:
        layers: the exit, over the first layers of its verifier.
        tree: shape of the drafts.
        verifier_cache: has rows of all tokens but the last when a draft is asked for.
    """

    def __init__(self, layers: Executor, tree: Tree, verifier_cache: KeyValueCache) -> None:
        self.verifier_cache = verifier_cache
        cache = verifier_cache.leading_layers(len(layers.weights.layers))
        super(ModelDrafter, self).__init__(layers, cache, tree, lag=0)

    def begin(self, tokens: list[int]) -> int:
        num_read = len(tokens) - 1
        assert self.verifier_cache.length >= num_read, "tokens that the verifier has not read"
        self.cache.length = num_read
        return num_read

    def rewind(self, num_observed: int) -> None:
        """Nothing to forget: the verifier does."""

    def copy_from(self, other: Self, num_tokens: int) -> None:
        """Nothing to take over: the verifier does."""
