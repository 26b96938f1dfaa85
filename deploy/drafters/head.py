"""Drafts by a head, which continues the verifier's features."""

import torch
from torch import Tensor

from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.torch.attend import Attend
from polybasic.chain.model.head import EagleHead
from polybasic.deploy.drafters.expansion import ExpandingDrafter, Expansion
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

    def __init__(self, head: EagleHead, tree: Tree, capacity: int) -> None:
        self.head = head
        cache = KeyValueCache(head.config, 1, capacity, head.dtype, head.device)
        # By position, so that any row of the cache can be read again.
        self.observed = torch.zeros(
            capacity, head.input_width, dtype=head.dtype, device=head.device
        )
        self._num_observed = 0
        # A row reads the state of one token and the token after it.
        expansion = Expansion(head, self._forward, head.logits, tree, cache, head.draft_token_ids)
        super().__init__(expansion, lag=1)

    def observe(self, states: Tensor) -> None:
        end = self._num_observed + len(states)
        self.observed[self._num_observed : end] = self.head.select_inputs(states)
        self._num_observed = end

    def rewind(self, num_observed: int) -> None:
        assert num_observed <= self._num_observed
        self._num_observed = num_observed
        # Row t also holds token t + 1, so the last row is read again.
        self.cache.truncate(min(self.cache.length, max(num_observed - 1, 0)))

    def begin(self, tokens: list[int]) -> int:
        assert self._num_observed == len(tokens) - 1 >= 1
        return super().begin(tokens)

    def _read(self, token_ids: Tensor, attend: Attend) -> Tensor:
        observed = self.observed[attend.start : attend.start + attend.num_rows]
        return self._forward(token_ids, self.head.features(observed), attend)

    def _forward(self, tokens: Tensor, features: Tensor, attend: Attend) -> Tensor:
        return self.head.forward(tokens, features, self.cache.layers[0], attend)
