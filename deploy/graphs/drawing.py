"""How tokens are drawn within captured rounds, and the sampler that stages see there.

#   R = rows, V = vocabulary, D = rows that are asked about
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polybasic.chain.kernels.torch.operations import Operations
from polybasic.deploy.graphs.device_sampling import Warping, draw, probabilities
from polybasic.deploy.rounds.sampling import seeded_generator
from polybasic.deploy.rounds.warping import Sampling


def draws_on_device(sampling: Sampling) -> bool:
    """Whether rounds draw by themselves: a penalty or a bias depends on what stands before a row,
    which the host counts."""
    return not (
        sampling.logit_bias
        or sampling.repetition_penalty != 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


class Drawing:
    """One kind of drawing, whose settings lie in a tensor: a graph serves all values of them.

    Args:
        warping: what is done to logits; None takes the most probable token.
        tells_confidence: rounds tell how probable each of their tokens was.
    """

    def __init__(
        self, warping: Warping | None, tells_confidence: bool, device: torch.device
    ) -> None:
        self.warping, self.tells_confidence, self.device = warping, tells_confidence, device
        self.values = torch.ones(Warping.NUM_VALUES, device=device)

    def set(self, sampling: Sampling) -> None:
        """The settings of a request of this kind."""
        if self.warping is not None:
            self.values.copy_(torch.tensor(Warping.values_of(sampling)), non_blocking=True)

    def room(self, rows: int, vocab_size: int) -> Tensor | None:
        """For the probabilities of so many rows; None where there are none."""
        if self.warping is None:
            return None
        return torch.zeros(rows, vocab_size, device=self.device)

    def fill(self, logits: Tensor, room: Tensor | None) -> None:
        """Probabilities of `logits` [R, V] into their room."""
        if self.warping is not None and room is not None:
            room.copy_(probabilities(logits, self.warping, self.values))

    def draw(
        self, operations: Operations, logits: Tensor, uniforms: Tensor, room: Tensor | None
    ) -> Tensor:
        """A token behind each row, int64 [R].

        Args:
            uniforms: float32 [R] of [0, 1).
            room: that was filled.
        """
        if room is None:
            return operations.most_probable(logits)
        return draw(room, uniforms, operations)

    def confidence(
        self, logits: Tensor, room: Tensor | None, rows: Tensor, tokens: Tensor
    ) -> Tensor:
        """Float64 [D], how probable each of the tokens int64 [D] is behind its row; zeros where
        that is not told.

        As the host's samplers say it: where the most probable token is taken, by the softmax.
        """
        if not self.tells_confidence:
            return torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        if room is not None:
            return room.flatten().index_select(0, rows * room.shape[1] + tokens).double()
        chosen = logits.index_select(0, rows).float()
        of_tokens = chosen.gather(1, tokens[:, None]).squeeze(1)
        return (of_tokens - chosen.logsumexp(-1)).exp().double()


@dataclass(frozen=True)
class DeviceDraws:
    """What tokens of a round were drawn from.

    Attributes:
        probabilities: float32 [R, V], until the next round; None where the most probable was taken.
        rows: int64, the row of each token of the round.
        confidence: of each token of the round.
    """

    probabilities: Tensor | None
    rows: Tensor
    confidence: list[float]


class DeviceSampler:
    """The verbs of a sampler that are left to stages whose rounds draw by themselves.

    Args:
        drawing: of the kind of `sampling`.
    """

    def __init__(self, sampling: Sampling, drawing: Drawing) -> None:
        self.drawing = drawing
        self.generator = seeded_generator(sampling, drawing.device)
        drawing.set(sampling)

    def fill(self, uniforms: Tensor) -> None:
        """New random numbers for the next run of a part."""
        if self.drawing.warping is not None:
            uniforms.uniform_(generator=self.generator)

    def take(self, draws: DeviceDraws, chosen: list[int]) -> Tensor | None:
        """The rows of the round's tokens, `chosen` among all, for the stage above."""
        if draws.probabilities is None:
            return None
        return draws.probabilities.index_select(0, draws.rows[: len(chosen)])

    def join(self, parts: list[Tensor | None]) -> Tensor | None:
        """Rows that were taken, one below the other."""
        taken = [part for part in parts if part is not None]
        return torch.cat(taken) if taken else None

    def probabilities(
        self, draws: DeviceDraws, chosen: list[int], tokens: list[int]
    ) -> list[float]:
        """How probable each of the round's tokens was."""
        return draws.confidence[: len(tokens)]
