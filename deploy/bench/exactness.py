"""Whether two greedy outputs differ for a reason: rounding, or a fault."""

from dataclasses import asdict, dataclass

import torch

from polybasic.deploy.bench.rereading import ONE_ROW, answer_logits
from polybasic.deploy.rounds.verifier import Verifier


@dataclass
class Agreement:
    """Outputs of a system beside the target's, token for token.

    Attributes:
        tolerance: candidates whose logits differ by less cannot be told apart; measured, see
            `polybasic.deploy.bench.rounding`.
        widest_near_tie: by how much the logits of two candidates differed at most, where outputs
            parted at a near tie.
    """

    tolerance: float
    prompts: int = 0
    identical: int = 0
    near_ties: int = 0
    widest_near_tie: float = 0.0

    def count(
        self, verifier: Verifier, prompt: list[int], expected: list[int], found: list[int]
    ) -> None:
        """Compare one output; `verifier` computes the logits where they part."""
        self.prompts += 1
        if found == expected:
            self.identical += 1
        elif (gap := gap_where_they_part(verifier, prompt, expected, found)) < self.tolerance:
            self.near_ties += 1
            self.widest_near_tie = max(self.widest_near_tie, gap)

    def to_json(self) -> dict[str, float]:
        """As a report holds it."""
        return asdict(self)


@torch.inference_mode()
def gap_where_they_part(
    verifier: Verifier, prompt: list[int], expected: list[int], found: list[int]
) -> float:
    """How far the logits of the first tokens that differ lie apart, as the target alone reads.

    Infinite where one output ends before they differ: no rounding leaves a token out.
    """
    pairs = zip(expected, found, strict=False)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:
        return float("inf")
    logits = answer_logits(verifier, prompt, expected[: place + 1], ONE_ROW)[-1]
    return abs(float(logits[expected[place]] - logits[found[place]]))
