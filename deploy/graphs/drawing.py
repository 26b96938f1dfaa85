"""How captured rounds draw tokens, and the sampler that their stages use.

#   R = rows, V = vocabulary, D = rows whose confidence is asked for
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polybasic.chain.kernels.torch.operations import Operations
from polybasic.deploy.rounds.sampling import seeded_generator
from polybasic.deploy.rounds.warping import Sampling, Warping


def draws_on_device(sampling: Sampling) -> bool:
    """Whether rounds can draw on the device: penalties and biases need counts of the tokens before
    a row, which the host keeps."""
    return not (
        sampling.logit_bias
        or sampling.repetition_penalty != 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


class Drawing:
    """One kind of drawing; its settings are kept in a tensor, so that one graph serves all values.

    Args:
        warping: applied to logits; None takes the most probable token.
        reports_confidence: whether rounds report how probable each of their tokens was.
    """

    def __init__(
        self, warping: Warping | None, reports_confidence: bool, device: torch.device
    ) -> None:
        self.warping, self.reports_confidence, self.device = warping, reports_confidence, device
        self.values = torch.ones(Warping.NUM_VALUES, device=device)

    def set(self, sampling: Sampling) -> None:
        """Take over the settings of a request of this kind."""
        if self.warping is not None:
            self.values.copy_(torch.tensor(Warping.values_of(sampling)), non_blocking=True)

    def buffer(self, rows: int, vocab_size: int) -> Tensor | None:
        """Memory for the probabilities of `rows` rows; None if this kind computes none."""
        if self.warping is None:
            return None
        return torch.zeros(rows, vocab_size, device=self.device)

    def fill(self, logits: Tensor, buffer: Tensor | None) -> None:
        """Write the probabilities of `logits` [R, V] into their buffer."""
        if self.warping is not None and buffer is not None:
            buffer.copy_(self.warping.probabilities(logits, self.values))

    def draw(
        self, operations: Operations, logits: Tensor, uniforms: Tensor, buffer: Tensor | None
    ) -> Tensor:
        """A token after each row, int64 [R].

        Args:
            uniforms: float32 [R] in [0, 1).
            buffer: as `fill` left it.
        """
        if buffer is None:
            return operations.most_probable(logits)
        return operations.draw(buffer, uniforms)

    def confidence(
        self, logits: Tensor, buffer: Tensor | None, rows: Tensor, tokens: Tensor
    ) -> Tensor:
        """How probable each token of `tokens` (int64 [D]) is after its row, float64 [D]; zeros if
        confidence is not reported.

        As in the host's samplers, greedy draws are rated by the softmax of their logits.
        """
        if not self.reports_confidence:
            return torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        if buffer is not None:
            return buffer.flatten().index_select(0, rows * buffer.shape[1] + tokens).double()
        chosen = logits.index_select(0, rows).float()
        of_tokens = chosen.gather(1, tokens[:, None]).squeeze(1)
        return (of_tokens - chosen.logsumexp(-1)).exp().double()


@dataclass(frozen=True)
class DeviceDraws:
    """What the tokens of a round were drawn from.

    Attributes:
        probabilities: float32 [R, V], valid until the next round; None if draws are greedy.
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
    """

    def __init__(self, sampling: Sampling, drawing: Drawing) -> None:
        self.drawing = drawing
        self.generator = seeded_generator(sampling, drawing.device)
        drawing.set(sampling)

    def fill(self, uniforms: Tensor) -> None:
        """Draw new random numbers for the next run of a part."""
        if self.drawing.warping is not None:
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
