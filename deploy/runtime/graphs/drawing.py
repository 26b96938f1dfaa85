"""How captured rounds draw tokens, and the sampler that their stages use.

#   R = rows, V = vocabulary, D = rows whose confidence is asked for, P = positions
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polybasic.chain.formats.plan import Rule
from polybasic.chain.kernels.executor import Executor, Perturbation
from polybasic.chain.kernels.torch.executor import TorchExecutor
from polybasic.chain.kernels.torch.operations import Operations
from polybasic.deploy.runtime.rounds.noise import Noise
from polybasic.deploy.runtime.rounds.sampling import seeded_generator
from polybasic.deploy.runtime.rounds.warping import Sampling, Warping


def draws_on_device(sampling: Sampling) -> bool:
    """Whether rounds can draw on the device: penalties and biases need counts of the tokens before
    a row, which the host keeps."""
    return not (
        sampling.logit_bias
        or sampling.repetition_penalty != 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.min_tokens
    )


NOT_FINITE = -2
"""In the place of a token where a model computed no numbers to draw from."""


def checked(tokens: Tensor, drawn_from: Tensor) -> Tensor:
    """The tokens, int64 [R], or `NOT_FINITE` where the row [R, V] that one comes from is of NaN."""
    largest = drawn_from.gather(1, tokens[:, None]).squeeze(1)
    return torch.where(largest.isfinite(), tokens, NOT_FINITE)


class DeviceNoise:
    """The noise of an engine's current request, computed inside captured parts.

    Attributes:
        key: int64 [3].
        draft_scale: float64 []; see `Noise`.
    """

    def __init__(self, device: torch.device) -> None:
        self.key = torch.zeros(3, dtype=torch.int64, device=device)
        self.draft_scale = torch.ones((), dtype=torch.float64, device=device)

    def set(self, noise: Noise) -> None:
        """Take over the noise of the next request."""
        self.key.copy_(noise.key)
        self.draft_scale.fill_(noise.draft_scale)

    def at(self, model: Executor, positions: Tensor) -> Tensor:
        """Noise float32 [P, V] of the tokens to be drawn at positions int64 [P]."""
        return model.noise(self.key, positions)

    def draft(self, model: Executor, start: Tensor, depth: int) -> Perturbation:
        """See `Noise.draft`; `start` is int64 []."""
        positions = start + torch.arange(depth, device=self.key.device)
        return Perturbation(self.draft_scale, self.at(model, positions))


class Drawing:
    """One kind of drawing; its settings are kept in tensors, so that one graph serves all values.

    Args:
        warping: applied to logits; None takes the most probable token.
        rule: of the plan; None takes the most probable token.
        noise: of the engine, for the rule "coupled" alone.
        reports_confidence: whether rounds report how probable each of their tokens was.
    """

    def __init__(
        self,
        warping: Warping | None,
        rule: Rule | None,
        noise: DeviceNoise | None,
        reports_confidence: bool,
        device: torch.device,
    ) -> None:
        assert (noise is not None) == (rule == "coupled"), rule
        self.warping, self.rule, self.noise = warping, rule, noise
        self.reports_confidence, self.device = reports_confidence, device
        self.is_random = warping is not None and noise is None
        self.values = torch.ones(Warping.NUM_VALUES, device=device)

    def set(self, sampling: Sampling) -> None:
        """Take over the settings of a request of this kind."""
        if self.warping is not None:
            self.values.copy_(torch.tensor(Warping.values_of(sampling)), non_blocking=True)

    def buffer(self, rows: int, vocab_size: int) -> Tensor | None:
        """Memory for the probabilities of `rows` rows; None if this kind computes none."""
        return torch.zeros(rows, vocab_size, device=self.device) if self.is_random else None

    def scores(
        self, model: TorchExecutor, logits: Tensor, positions: Tensor, place: Tensor
    ) -> Tensor:
        """Scores [R, V] in the place of logits [R, V]: what is drawn coupled is the largest of
        the warped logits and the noise; other kinds leave logits as they are.

        Args:
            model: computes the noise.
            positions: int64 [P], at which rows draw.
            place: int64 [R], which of these each row draws at.
        """
        if self.warping is None or self.noise is None:
            return logits
        noise = self.noise.at(model, positions).index_select(0, place)
        return noise.add_(self.warping.truncated(logits, self.values, model.operations))

    def fill(self, operations: Operations, logits: Tensor, buffer: Tensor | None) -> None:
        """Write the probabilities of `logits` [R, V] into their buffer, by a model's operations."""
        if self.warping is not None and buffer is not None:
            buffer.copy_(self.warping.probabilities(logits, self.values, operations))

    def draw(
        self, operations: Operations, logits: Tensor, uniforms: Tensor, buffer: Tensor | None
    ) -> Tensor:
        """A token after each row, int64 [R], as `checked` leaves it.

        Args:
            logits: or scores, of which the largest is drawn.
            uniforms: float32 [R] in [0, 1).
            buffer: as `fill` left it.
        """
        if buffer is None:
            return checked(operations.most_probable(logits), logits)
        return checked(operations.draw(buffer, uniforms), buffer)

    def confidence(
        self, logits: Tensor, buffer: Tensor | None, rows: Tensor, tokens: Tensor
    ) -> Tensor:
        """How probable each token of `tokens` (int64 [D]) is after its row, float64 [D]; zeros if
        confidence is not reported.

        As in the host's samplers, draws of the largest are rated by the softmax of their logits or
        scores.
        """
        if not self.reports_confidence:
            return torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        tokens = tokens.clamp(min=0)
        if buffer is not None:
            return buffer.flatten().index_select(0, rows * buffer.shape[1] + tokens).double()
        chosen = logits.index_select(0, rows).float()
        of_tokens = chosen.gather(1, tokens[:, None]).squeeze(1)
        return (of_tokens - chosen.logsumexp(-1)).exp().double()


@dataclass(frozen=True)
class DeviceDraws:
    """What the tokens of a round were drawn from.

    Attributes:
        probabilities: float32 [R, V], valid until the next round; None if the largest is drawn.
        rows: int64, the row of each token of the round.
        confidence: of each token of the round.
    """

    probabilities: Tensor | None
    rows: Tensor
    confidence: list[float]


class DeviceSampler:
    """The part of a sampler that stages still need if their rounds draw on the device.

    Args:
        drawing: of the kind of `sampling`.
        noise: of the request, for coupled draws.
    """

    def __init__(self, sampling: Sampling, drawing: Drawing, noise: Noise | None) -> None:
        self.drawing = drawing
        self.generator = seeded_generator(sampling, drawing.device)
        drawing.set(sampling)
        if drawing.noise is not None and noise is not None:
            drawing.noise.set(noise)

    def fill(self, uniforms: Tensor) -> None:
        """Draw new random numbers for the next run of a part."""
        if self.drawing.is_random:
            uniforms.uniform_(generator=self.generator)

    def take(self, draws: DeviceDraws, chosen: list[int]) -> Tensor | None:
        """The rows that the round's tokens were drawn from, for the stage above."""
        if draws.probabilities is None:
            return None
        return draws.probabilities.index_select(0, draws.rows[: len(chosen)])

    def join(self, parts: list[Tensor | None]) -> Tensor | None:
        """Concatenate rows that were taken."""
        taken = [part for part in parts if part is not None]
        return torch.cat(taken) if taken else None

    def probabilities(
        self, draws: DeviceDraws, chosen: list[int], tokens: list[int]
    ) -> list[float]:
        """How probable each of the round's tokens was."""
        return draws.confidence[: len(tokens)]
