"""The noise of one request, shared by all models that draw for it.

#   V = tokens of the vocabulary
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from polybasic.chain.kernels.executor import Executor, Perturbation
from polybasic.chain.kernels.noise import noise_key
from polybasic.deploy.rounds.warping import Sampling

NUM_KEPT = 64
"""Positions whose noise is kept, since every model of a chain asks for it."""
SPREAD = 1.0
"""How far a verifier's scores are expected to lie from the drafting model's; see `Noise.draft`."""


class Noise:
    """Gumbel noise by position, as `polybasic.chain.kernels.noise` defines it.

    Args:
        model: computes it; any whose vocabulary is the target's.
        sampling: with a seed.
    """

    def __init__(self, model: Executor, sampling: Sampling) -> None:
        assert sampling.seed is not None, "noise without a seed"
        self._model, self._temperature = model, sampling.temperature
        self._key = noise_key(sampling.seed, sampling.choice).to(model.device)
        self._rows = torch.empty(NUM_KEPT, model.config.vocab_size, device=model.device)
        self._kept = [-1] * NUM_KEPT

    def at(self, positions: Sequence[int]) -> Tensor:
        """Noise float32 [len(positions), V] of the tokens to be drawn at these positions."""
        if max(positions) - min(positions) >= NUM_KEPT:
            return self._computed(positions)
        missing = sorted({one for one in positions if self._kept[one % NUM_KEPT] != one})
        if missing:
            places = [one % NUM_KEPT for one in missing]
            self._rows[places] = self._computed(missing)
            for place, position in zip(places, missing, strict=True):
                self._kept[place] = position
        return self._rows[[one % NUM_KEPT for one in positions]]

    def draft(self, start: int, depth: int) -> Perturbation:
        """What a draft of `depth` levels adds to its logits, the first level drawing at `start`.

        The verifier draws the token of the largest score log p + G. Let the drafting model's
        scores log q + G be off by Gumbel noise of scale s (`SPREAD`), independently: then a token
        is drawn with probability softmax((log q + G) / s), of which a path's score is the product.
        """
        added = self.at(range(start, start + depth)) / SPREAD
        return Perturbation(1 / (SPREAD * self._temperature), added)

    def _computed(self, positions: Sequence[int]) -> Tensor:
        places = torch.tensor(positions, device=self._rows.device)
        return self._model.noise(self._key, places)
