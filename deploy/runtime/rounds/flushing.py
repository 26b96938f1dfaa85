"""When a stage hands up its block before the block length: as soon as another round would not pay.

The verifier above keeps a block up to the first token that it rejects, so another round is worth
its time only while the whole block is likely to be accepted. `AdaptiveFlushing` estimates this from
the proposing model's own probability of each token, which predicts the verifier's well.

The output stays exact: whether a position belongs to the block depends on tokens drawn before it,
never on its own. It also stays reproducible: estimates start afresh with every request, and costs
come from the plan, not from a clock.
"""

from typing import Protocol

from polybasic.chain.formats.plan import NUM_PROBABILITY_BINS, AdaptiveFlush

PRIOR_WEIGHT = 8.0
"""Number of tokens that the plan's acceptance of a bin counts as."""


class Flushing(Protocol):
    """What ends a block before its length."""

    def wants_more(self, probabilities: list[float]) -> bool:
        """Add a round's tokens by the proposing model's probability of each; whether to go on."""


class AdaptiveFlushing:
    """Stops a block once the probability that all of it is kept falls below the break-even.

    Let S be that probability, g the kept tokens of a round that is reached, c its seconds and r the
    chain's tokens a second: another round pays while S g > r c. The planner sets `break_even` to
    r c / g.

    Attributes:
        bins: of the block's tokens.
    """

    bins: list[int]

    def __init__(self, settings: AdaptiveFlush) -> None:
        self.break_even = settings.break_even
        self._num_asked = [PRIOR_WEIGHT] * NUM_PROBABILITY_BINS
        self._num_kept = [PRIOR_WEIGHT * share for share in settings.acceptance]
        self.begin_block()

    def begin_block(self, num_before: int = 0) -> None:
        """Start a new block; what was learned is kept.

        Args:
            num_before: tokens that `wants_more` is told of before those of the block.
        """
        self.bins, self._survival, self._num_before = [], 1.0, num_before

    def wants_more(self, probabilities: list[float]) -> bool:
        """Add a round's tokens by the proposing model's probability of each; whether to go on."""
        num_before = min(self._num_before, len(probabilities))
        self._num_before -= num_before
        for probability in probabilities[num_before:]:
            index = probability_bin(probability)
            self.bins.append(index)
            self._survival *= self._num_kept[index] / self._num_asked[index]
        return self.pays

    @property
    def pays(self) -> bool:
        """Whether another round for this block does."""
        return self._survival >= self.break_even

    def learn(self, num_kept: int, bins: list[int] | None = None) -> None:
        """Learn that the verifier kept the first `num_kept` tokens and rejected the next one.

        Args:
            bins: of the block; default: of the one that was started last.
        """
        bins = self.bins if bins is None else bins
        for place, index in enumerate(bins[: num_kept + 1]):
            self._num_asked[index] += 1
            self._num_kept[index] += place < num_kept


def probability_bin(probability: float) -> int:
    """Bin of a probability by its square, for finer bins where tokens are nearly certain."""
    last = NUM_PROBABILITY_BINS - 1
    return min(last, int(NUM_PROBABILITY_BINS * probability * probability))
