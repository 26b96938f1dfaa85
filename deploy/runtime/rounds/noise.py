"""The noise of one request, shared by all models that draw for it.

#   V = tokens of the vocabulary
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from polybasic.chain.kernels.cpu.library import kernels_for
from polybasic.chain.kernels.executor import Executor, Perturbation
from polybasic.chain.kernels.noise import noise_key
from polybasic.deploy.runtime.rounds.warping import Sampling

NUM_KEPT = 64
"""Positions whose noise is kept, since every model of a chain asks for it."""
SHARPNESS = 1.2
"""Factor of a drafting model's log-probabilities: a small model is less sure than its verifier.

Between 1 and 1.5 it hardly matters: 1.125 to 1.25 gained 2 to 10 % of the tokens of a round at
temperature 1 with two heads, and 2 lost as much.
"""


class Noise:
    """Gumbel noise by position, as `polybasic.chain.kernels.noise` defines it.

    Args:
        model: computes it; any whose vocabulary is the target's.
        sampling: with a seed.

    Attributes:
        key: int64 [3], on the model's device.
        draft_scale: factor of a draft's logits.
    """

    def __init__(self, model: Executor, sampling: Sampling) -> None:
        assert sampling.seed is not None, "noise without a seed"
        self._model, self.draft_scale = model, SHARPNESS / sampling.temperature
        self.key = noise_key(sampling.seed, sampling.choice).to(model.device)
        self._kept = [-1] * NUM_KEPT

    @cached_property
    def _rows(self) -> Tensor:
        """Not made where rounds stay on a device, which ask for none."""
        return torch.empty(NUM_KEPT, self._model.config.vocab_size, device=self.key.device)

    def at(self, positions: Sequence[int]) -> Tensor:
        """Noise float32 [len(positions), V] of the tokens to be drawn at these positions."""
        if max(positions) - min(positions) >= NUM_KEPT:
            return self._computed(positions)
        missing = sorted(
            {position for position in positions if self._kept[position % NUM_KEPT] != position}
        )
        if missing:
            places = [position % NUM_KEPT for position in missing]
            self._rows[places] = self._computed(missing)
            for place, position in zip(places, missing, strict=True):
                self._kept[place] = position
        return self._rows[[position % NUM_KEPT for position in positions]]

    def draw(
        self, logits: Tensor, warping: Sequence[float], positions: Sequence[int]
    ) -> list[int] | None:
        """Tokens of rows [R, V] by native kernels; None where there are none.

        Their softmax may round otherwise than PyTorch's: where top-p or min-p ends between two
        tokens whose probabilities are equal to the last bits, another one of them may be kept.

        Args:
            logits: after bias and penalties.
            warping: as `Warping.values_of` gives it.
            positions: of the tokens to be drawn, one for each row.
        """
        if (kernels := kernels_for(logits.device, torch.float32)) is None:
            return None
        return kernels.draw(logits, warping, self.key, positions)

    def probabilities(
        self,
        logits: Tensor,
        warping: Sequence[float],
        positions: Sequence[int],
        rows: Sequence[int],
        tokens: Sequence[int],
    ) -> list[float]:
        """Of tokens in rows of what `draw` takes the largest of, where there are native kernels."""
        kernels = kernels_for(logits.device, torch.float32)
        assert kernels is not None, f"native kernels on {logits.device}"
        return kernels.shares(logits, rows, tokens, warping, self.key, positions)

    def draft(self, start: int, depth: int) -> Perturbation:
        """What a draft of `depth` levels adds to its logits, the first level drawing at `start`.

        The verifier draws the token with the largest log p + G. Let log p be b log q, b being the
        `SHARPNESS`, plus further Gumbel noise, independent for each token: then a token is drawn
        with probability softmax(b log q + G), and a path with the product of these, its score.
        """
        return Perturbation(self.draft_scale, self.at(range(start, start + depth)))

    def _computed(self, positions: Sequence[int]) -> Tensor:
        places = torch.tensor(positions, device=self.key.device)
        return self._model.noise(self.key, places)


def noise_together(each: Sequence[Noise], positions: Sequence[int]) -> Tensor:
    """Noise float32 [P, V] of several requests, of each at its own position."""
    first, keys = each[0], torch.stack([source.key for source in each])
    return first._model.noise(keys, torch.tensor(positions, device=keys.device))
