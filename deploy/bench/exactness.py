"""Whether two outputs that should be equal differ by rounding or by a fault."""

import math
from dataclasses import asdict, dataclass

import torch

from polybasic.chain.formats.plan import Plan
from polybasic.deploy.bench.rereading import ONE_ROW, answer_logits, read_patterns_of
from polybasic.deploy.bench.rounding import NUM_POSITIONS, measure_rounding
from polybasic.deploy.chain import Chain
from polybasic.deploy.rounds.sampling import GreedySampler, Prefixes, Sampling
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
        self,
        verifier: Verifier,
        sampler: GreedySampler,
        prompt: list[int],
        expected: list[int],
        found: list[int],
    ) -> None:
        """Compare one output; `verifier` computes the logits where the two diverge.

        Args:
            sampler: of the request, greedy or with its noise.
        """
        self.prompts += 1
        if found == expected:
            self.identical += 1
        elif (
            gap := gap_at_divergence(verifier, sampler, prompt, expected, found)
        ) < self.tolerance:
            self.near_ties += 1
            self.widest_near_tie = max(self.widest_near_tie, gap)

    def to_json(self) -> dict[str, float]:
        """As the report holds it."""
        return asdict(self)


def agreement_on(
    chain: Chain,
    plan: Plan,
    prompt: list[int],
    sampling: Sampling,
    expected: list[int],
    found: list[int],
) -> Agreement:
    """Compare one answer of a plan with the target's, and judge where they part.

    Args:
        sampling: of both, with a seed unless it is greedy.
    """
    verifying = list(chain.engine.verifiers)
    verifier = chain.engine.verifiers[verifying[0]]
    patterns = read_patterns_of([plan], verifying, NUM_POSITIONS)
    rounding = measure_rounding(verifier, [(prompt, expected)], patterns, {})
    agreement = Agreement(rounding.tolerance)
    sampler = chain.engine.repeatable_sampler(prompt, sampling)
    agreement.count(verifier, sampler, prompt, expected, found)
    return agreement


def parting(expected: list[int], found: list[int]) -> int:
    """The place of the first token that differs; the shorter one's length where all are equal."""
    pairs = zip(expected, found, strict=False)
    places = (place for place, (one, other) in enumerate(pairs) if one != other)
    return next(places, min(len(expected), len(found)))


@torch.inference_mode()
def gap_at_divergence(
    verifier: Verifier,
    sampler: GreedySampler,
    prompt: list[int],
    expected: list[int],
    found: list[int],
) -> float:
    """By how much logits must change to swap the first two tokens that differ.

    These are the logits as the target alone reads, penalties and noise included. Infinite if one
    output ends before they differ, since rounding leaves no token out, and where truncation drops
    one of the two.
    """
    place = parting(expected, found)
    if place == min(len(expected), len(found)):
        return math.inf
    logits = answer_logits(verifier, prompt, expected[: place + 1], ONE_ROW)[-1]
    before = Prefixes([*prompt, *expected[:place]], [[]])
    scores = sampler.distributions(logits[None], before).logits
    assert scores is not None
    one, other = float(scores[0, expected[place]]), float(scores[0, found[place]])
    if math.isinf(one) or math.isinf(other):
        return math.inf
    # noise is added to logits that are divided by the temperature
    return abs(one - other) * (sampler.sampling.temperature or 1.0)
