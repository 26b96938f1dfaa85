"""What learning from answers asks of a loaded chain: a verifier's states, and room for a new head.

#   R = rows (tokens), W = width of the verifier's states
"""

from pathlib import Path

import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.extensions import resolve
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.rounds.verifier import SPARE_ROWS


class AnswerReader:
    """Reads texts by a verifying member again, some rows at a time, for the states of all tokens.

    Args:
        verifier: the member's.
        feature_layers: layers whose inputs are a part of the states.
        capacity: tokens of a text at most.
    """

    def __init__(
        self, chain: Chain, verifier: str, feature_layers: tuple[int, ...], capacity: int
    ) -> None:
        models = chain.engine.models
        self._model, self._layers = models.decoders[verifier], feature_layers
        self._cache = models.cache_of(self._model, capacity)
        self._states: list[Tensor] = []

    @property
    def num_read(self) -> int:
        """Tokens of the text so far."""
        return self._cache.length

    @torch.inference_mode()
    def read(self, token_ids: list[int]) -> None:
        """Read the next tokens of the text."""
        rows = consecutive_rows(self._cache.length, len(token_ids))
        tokens = torch.tensor(token_ids, device=self._model.device)
        states = self._model.forward(
            tokens, [self._cache.layers], [rows], feature_layers=self._layers
        )
        self._states.append(states.clone())
        self._cache.keep(range(len(token_ids)))

    def take(self) -> Tensor:
        """The states [R, W] of the whole text; the next one begins."""
        states, self._states = torch.cat(self._states), []
        self._cache.truncate(0)
        self._cache.give_back()
        return states


def load_drafter(chain: Chain, name: str, folder: Path) -> Executor:
    """A head of the same kind and sizes as a chain's, on its device.

    Raises:
        UserError: a head that does not fit, or a missing weight.
    """
    models, config = chain.engine.models, read_config(folder)
    member = chain.manifest.member(name)
    verifier = next(each for each in member.drafts_for if each in models.decoders)
    load = resolve(HEAD_KINDS[member.kind].load, f"kind {member.kind} of {name}")
    num_positions = models.context_tokens + SPARE_ROWS
    loaded: Executor = load(config, models.decoders[verifier], num_positions)
    return loaded
