"""Drafts by an independent small model, dense or in 4 bits."""

from torch import Tensor

from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.torch.attend import Attend
from polybasic.chain.model.decoder import Decoder
from polybasic.deploy.drafters.expansion import ExpandingDrafter, Expansion
from polybasic.deploy.rounds.cache import KeyValueCache


class ModelDrafter(ExpandingDrafter):
    """Drafts by a decoder: the first level reads the unread tokens, every other `top_k` rows.

    A draft depends on the tokens alone; the verifier's states are only counted.

    Args:
        decoder: shares the verifier's token ids.
        tree: shape of the drafts.
        capacity: rows of the decoder's own cache, those of a draft included.
    """

    def __init__(self, decoder: Decoder, tree: Tree, capacity: int) -> None:
        self.decoder = decoder
        cache = KeyValueCache(
            decoder.config, decoder.config.num_layers, capacity, decoder.dtype, decoder.device
        )
        self._num_observed = 0
        super().__init__(Expansion(decoder, self._forward, decoder.logits, tree, cache), lag=0)

    def observe(self, states: Tensor) -> None:
        self._num_observed += len(states)

    def rewind(self, num_observed: int) -> None:
        assert num_observed <= self._num_observed
        self._num_observed = num_observed
        self.cache.truncate(min(self.cache.length, num_observed))

    def begin(self, tokens: list[int]) -> int:
        assert self._num_observed == len(tokens) - 1
        return super().begin(tokens)

    def _read(self, token_ids: Tensor, attend: Attend) -> Tensor:
        return self.decoder.forward(token_ids, self.cache.layers, attend)

    def _forward(self, tokens: Tensor, states: Tensor, attend: Attend) -> Tensor:
        return self.decoder.forward(tokens, self.cache.layers, attend)
