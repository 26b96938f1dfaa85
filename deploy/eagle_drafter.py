"""Drafts of a head, which continues the verifier's features."""

import torch
from torch import Tensor

from polybasic.chain.attend import Attend, attend_in_blocks
from polybasic.chain.eagle import EagleHead
from polybasic.chain.manifest import Tree
from polybasic.deploy.cache import KeyValueCache
from polybasic.deploy.expansion import Candidates, ExpandingDrafter, Expansion


class EagleDrafter(ExpandingDrafter):
    """Drafts by a head: the first level reads what was observed, every other one `top_k` rows.

    A draft is decided by the tokens and the states that were observed.

    Args:
        head: the draft head.
        tree: shape of the drafts.
        capacity: rows of the head's cache, those of a draft included.
    """

    def __init__(self, head: EagleHead, tree: Tree, capacity: int) -> None:
        self.head = head
        self.cache = KeyValueCache(head.config, 1, capacity, head.dtype, head.device)
        # What was observed by position, so that any row of the cache can be read again.
        self._observed = torch.zeros(
            capacity, head.read_width, dtype=head.dtype, device=head.device
        )
        self._num_observed = 0
        # A row reads the state of one token and the token behind it.
        expansion = Expansion(
            head, self._forward, head.logits, tree, self.cache, head.draft_token_ids
        )
        super().__init__(expansion, least_tokens=2)

    def observe(self, states: Tensor) -> None:
        end = self._num_observed + len(states)
        self._observed[self._num_observed : end] = self.head.read_of(states)
        self._num_observed = end

    def rewind(self, num_observed: int) -> None:
        assert num_observed <= self._num_observed
        self._num_observed = num_observed
        # Row t also holds token t + 1, so the last row is read again.
        self.cache.truncate(min(self.cache.length, max(num_observed - 1, 0)))

    def candidates(self, tokens: list[int], depth: int) -> Candidates:
        feature = self._read_observed(tokens)
        return self.expansion.expand(feature, self.cache.length, depth)

    def _read_observed(self, tokens: list[int]) -> Tensor:
        """Read the states not yet read; the guessed feature [1, D] behind the last of them."""
        start, end = min(self.cache.length, self._num_observed - 1), self._num_observed
        assert end == len(tokens) - 1 >= 1
        self.cache.truncate(start)
        for block in attend_in_blocks(self.head, start, end - start, self.window):
            last = block.start + block.num_rows
            features = self._forward(
                torch.tensor(tokens[block.start + 1 : last + 1], device=self.head.device),
                self.head.features(self._observed[block.start : last]),
                block,
            )
        self.cache.keep(range(end - start))
        return features[-1:]

    def _forward(self, tokens: Tensor, features: Tensor, attend: Attend) -> Tensor:
        return self.head.forward(tokens, features, self.cache.layers[0], attend)
