"""Drafts of an independent small model, dense or in 4 bits."""

import torch
from torch import Tensor

from polybasic.chain.attend import Attend, attend_in_blocks
from polybasic.chain.decoder import Decoder
from polybasic.chain.manifest import Tree
from polybasic.deploy.cache import KeyValueCache
from polybasic.deploy.expansion import Candidates, ExpandingDrafter, Expansion


class ModelDrafter(ExpandingDrafter):
    """Drafts by a decoder: the first level reads the unread tokens, every other `top_k` rows.

    A draft is decided by the tokens alone; the verifier's states are only counted.

    Args:
        decoder: shares the verifier's token ids.
        tree: shape of the drafts.
        capacity: rows of the decoder's own cache, those of a draft included.
    """

    def __init__(self, decoder: Decoder, tree: Tree, capacity: int) -> None:
        self.decoder = decoder
        self.cache = KeyValueCache(
            decoder.config, decoder.config.num_layers, capacity, decoder.dtype, decoder.device
        )
        self._num_observed = 0
        super().__init__(
            Expansion(decoder, self._forward, decoder.logits, tree, self.cache), least_tokens=1
        )

    def observe(self, states: Tensor) -> None:
        self._num_observed += len(states)

    def rewind(self, num_observed: int) -> None:
        assert num_observed <= self._num_observed
        self._num_observed = num_observed
        self.cache.truncate(min(self.cache.length, num_observed))

    def candidates(self, tokens: list[int], depth: int) -> Candidates:
        state = self._read_unread(tokens)
        return self.expansion.expand(state, self.cache.length, depth)

    def _read_unread(self, tokens: list[int]) -> Tensor:
        """Read the tokens not yet read, at least the last one, whose state [1, D] is returned."""
        assert self._num_observed == len(tokens) - 1
        start = min(self.cache.length, len(tokens) - 1)
        self.cache.truncate(start)
        unread = tokens[start:]
        for block in attend_in_blocks(self.decoder, start, len(unread), self.window):
            rows = tokens[block.start : block.start + block.num_rows]
            ids = torch.tensor(rows, device=self.decoder.device)
            states = self.decoder.forward(ids, self.cache.layers, block)
        self.cache.keep(range(len(unread)))
        return states[-1:]

    def _forward(self, tokens: Tensor, states: Tensor, attend: Attend) -> Tensor:
        return self.decoder.forward(tokens, self.cache.layers, attend)
