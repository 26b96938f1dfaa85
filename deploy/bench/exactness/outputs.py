"""Whether two outputs that should be equal differ by rounding or by a fault."""

import math
import statistics

import torch

from polybasic.chain.formats.plan import Plan
from polybasic.deploy.bench.exactness.rereading import ONE_ROW, answer_logits, read_patterns_of
from polybasic.deploy.bench.exactness.rounding import NUM_POSITIONS, measure_rounding
from polybasic.deploy.bench.schema import Agreement
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.rounds.sampling import GreedySampler, Prefixes, Sampling
from polybasic.deploy.runtime.rounds.verifier import Verifier


class Comparer:
    """Counts answers of a system that are equal to the target's, token for token.

    Args:
        verifier: of the target; it computes the logits where two answers diverge.
        tolerance: logits that differ by less are indistinguishable; measured by
            `polybasic.deploy.bench.exactness.rounding`.
    """

    def __init__(self, verifier: Verifier, tolerance: float) -> None:
        self._verifier, self._tolerance = verifier, tolerance
        self._num_answers = self._num_identical = 0
        self._gaps: list[float] = []  # of answers that part at a near tie
        self._partings: list[int] = []

    def count(
        self, sampler: GreedySampler, prompt: list[int], expected: list[int], found: list[int]
    ) -> None:
        """Compare one answer with the target's.

        Args:
            sampler: of the request, greedy or with its noise.
        """
        self._num_answers += 1
        if found == expected:
            self._num_identical += 1
            return
        self._partings.append(parting(expected, found))
        gap = gap_at_divergence(self._verifier, sampler, prompt, expected, found)
        if gap < self._tolerance:
            self._gaps.append(gap)

    def agreement(self) -> Agreement:
        """What was counted so far."""
        return Agreement(
            answers=self._num_answers,
            identical=self._num_identical,
            near_ties=len(self._gaps),
            widest_near_tie=max(self._gaps, default=0.0),
            tolerance=self._tolerance,
            tokens_before_parting=statistics.median(self._partings) if self._partings else None,
        )


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
    tolerance = 0.0
    if found != expected:
        patterns = read_patterns_of([plan], verifying, NUM_POSITIONS)
        tolerance = measure_rounding(verifier, [(prompt, expected)], patterns, {}).tolerance
    comparer = Comparer(verifier, tolerance)
    comparer.count(chain.engine.repeatable_sampler(prompt, sampling), prompt, expected, found)
    return comparer.agreement()


def parting(expected: list[int], found: list[int]) -> int:
    """The place of the first token that differs; the shorter one's length where all are equal."""
    pairs = zip(expected, found, strict=False)
    places = (place for place, (wanted, given) in enumerate(pairs) if wanted != given)
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
    scores = sampler.scores(logits[None], before)
    expected_score, found_score = float(scores[0, expected[place]]), float(scores[0, found[place]])
    if math.isinf(expected_score) or math.isinf(found_score):
        return math.inf
    # noise is added to logits that are divided by the temperature
    return abs(expected_score - found_score) * (sampler.sampling.temperature or 1.0)
