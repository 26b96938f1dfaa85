"""When a stage hands up its block before the flush length: where one more round would not pay.

The verifier above keeps a block up to the first token that it refuses, so a round is worth its
time only while the whole block is likely to stand. `AdaptiveFlushing` estimates that from the
proposing model's own probability of each token, which tells much about the verifier's.

The output stays exact: whether a position belongs to the block is decided by tokens that were
drawn before it, never by its own. And it stays reproducible: estimates begin anew with every
request, and costs are numbers of the plan, not of a clock.
"""

from polybasic.chain.formats.plan import NUM_PROBABILITY_BINS, AdaptiveFlush

PRIOR_WEIGHT = 8.0
"""Tokens that the plan's acceptance of a bin counts for."""


class AdaptiveFlushing:
    """Stops a block once the probability that all of it is kept falls below the break-even.

    With S that probability, a round that gains g kept tokens if they are reached, costs c seconds
    and a chain that makes r tokens a second, one more round pays while S g > r c. The planner
    gives r c / g as `break_even`.
    """

    def __init__(self, settings: AdaptiveFlush) -> None:
        self.break_even = settings.break_even
        self._num_asked = [PRIOR_WEIGHT] * NUM_PROBABILITY_BINS
        self._num_kept = [PRIOR_WEIGHT * share for share in settings.acceptance]
        self._bins: list[int] = []
        self._survival = 1.0

    def begin_block(self) -> None:
        """Forget the block; what was learned stays."""
        self._bins, self._survival = [], 1.0

    def wants_more(self, probabilities: list[float]) -> bool:
        """Take the tokens of one round, by the proposing model's probability of each."""
        for probability in probabilities:
            index = probability_bin(probability)
            self._bins.append(index)
            self._survival *= self._num_kept[index] / self._num_asked[index]
        return self._survival >= self.break_even

    def learn(self, num_kept: int) -> None:
        """The verifier kept the block's first `num_kept` tokens and refused the one behind."""
        for place, index in enumerate(self._bins[: num_kept + 1]):
            self._num_asked[index] += 1
            self._num_kept[index] += place < num_kept


def probability_bin(probability: float) -> int:
    """Bin of a probability by its square, which tells apart what is nearly certain."""
    last = NUM_PROBABILITY_BINS - 1
    return min(last, int(NUM_PROBABILITY_BINS * probability * probability))
