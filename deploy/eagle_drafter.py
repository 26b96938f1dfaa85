"""Drafts of an EAGLE-2 head, which continues the verifier's features."""

import torch
from torch import Tensor

from polybasic.chain.decoder import Attend, attend_causally
from polybasic.chain.eagle import EagleHead
from polybasic.chain.linear import Linear
from polybasic.chain.manifest import Tree
from polybasic.deploy.cache import KeyValueCache
from polybasic.deploy.expansion import Candidates, Expansion
from polybasic.deploy.tree import DraftTree
from polybasic.deploy.verifier import PassClock


class EagleDrafter:
    """Drafts by a head: the first level reads what was observed, every other one `top_k` rows.

    A draft is decided by the tokens and the states that were observed.

    Args:
        head: the draft head.
        lm_head: the verifier's output projection.
        tree: shape of the drafts.
        capacity: rows of the head's cache, those of a draft included.
    """

    def __init__(self, head: EagleHead, lm_head: Linear, tree: Tree, capacity: int) -> None:
        self.head = head
        self.cache = KeyValueCache(head.config, 1, capacity, head.dtype, head.device)
        self.clock = PassClock(head.device)
        # Features by position, so that any row of the cache can be read again.
        self._features = torch.zeros(
            capacity, head.config.hidden_size, dtype=head.dtype, device=head.device
        )
        self._num_observed = 0
        self._expansion = Expansion(head, self._forward, lm_head, tree, capacity)

    @property
    def tree(self) -> Tree:
        """Shape of the next drafts."""
        return self._expansion.tree

    @tree.setter
    def tree(self, tree: Tree) -> None:
        self._expansion.tree = tree

    def observe(self, states: Tensor) -> None:
        end = self._num_observed + len(states)
        self._features[self._num_observed : end] = states
        self._num_observed = end

    def rewind(self, num_observed: int) -> None:
        assert num_observed <= self._num_observed
        self._num_observed = num_observed
        # Row t also holds token t + 1, so the last row is read again.
        self.cache.truncate(min(self.cache.length, max(num_observed - 1, 0)))

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        depth = min(max_depth, self.tree.depth)
        if depth == 0 or len(tokens) == 1:
            return DraftTree.of_root(tokens[-1])
        with self.clock.running(num_passes=depth):
            return self.candidates(tokens, depth).keep_best(tokens[-1], self.tree.rows)

    def candidates(self, tokens: list[int], depth: int) -> Candidates:
        """All candidates behind the sequence `tokens`, of which at least two stand.

        Args:
            depth: levels, which may be more than the tree has.
        """
        feature = self._read_observed(tokens)
        return self._expansion.expand(feature, self.cache.length, depth)

    def _read_observed(self, tokens: list[int]) -> Tensor:
        """Read the states not yet read; the guessed feature [1, D] behind the last of them."""
        start, end = min(self.cache.length, self._num_observed - 1), self._num_observed
        assert end == len(tokens) - 1 >= 1
        self.cache.truncate(start)
        features = self.head.forward(
            torch.tensor(tokens[start + 1 :], device=self.head.device),
            self._features[start:end],
            self.cache.layers[0],
            attend_causally(self.head, start, end - start),
        )
        self.cache.keep(range(end - start))
        return features[-1:]

    def _forward(self, tokens: Tensor, features: Tensor, attend: Attend) -> Tensor:
        return self.head.forward(tokens, features, self.cache.layers[0], attend)
