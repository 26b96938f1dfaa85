"""Whether two greedy outputs differ by rounding or by a fault."""

from dataclasses import asdict, dataclass

import torch

from polybasic.deploy.bench.rereading import ONE_ROW, answer_logits
from polybasic.deploy.rounds.verifier import Verifier


@dataclass
class Agreement:
    """Outputs of a system compared with the target's, token for token.

    Attributes:
        tolerance: logits that differ by less are indistinguishable; measured by
            `polybasic.deploy.bench.rounding`.
        widest_near_tie: largest difference between two candidates' logits where outputs diverged
            at a near tie.
    """

    tolerance: float
    prompts: int = 0
    identical: int = 0
    near_ties: int = 0
    widest_near_tie: float = 0.0

    def count(
        self, verifier: Verifier, prompt: list[int], expected: list[int], found: list[int]
    ) -> None:
        """Compare one output; `verifier` computes the logits where the two diverge."""
        self.prompts += 1
        if found == expected:
            self.identical += 1
        elif (gap := gap_at_divergence(verifier, prompt, expected, found)) < self.tolerance:
            self.near_ties += 1
            self.widest_near_tie = max(self.widest_near_tie, gap)

    def to_json(self) -> dict[str, float]:
        """As the report holds it."""
        return asdict(self)


@torch.inference_mode()
def gap_at_divergence(
    verifier: Verifier, prompt: list[int], expected: list[int], found: list[int]
) -> float:
    """Difference of the logits of the first two tokens that differ, as the target alone reads.

    Infinite if one output ends before they differ: rounding leaves no token out.
    """
    pairs = zip(expected, found, strict=False)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:
        return float("inf")
    logits = answer_logits(verifier, prompt, expected[: place + 1], ONE_ROW)[-1]
    return abs(float(logits[expected[place]] - logits[found[place]]))
