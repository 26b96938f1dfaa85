"""The theory behind chains, as functions of numbers. No torch in here.

"Polybasic Speculative Decoding Through a Theoretical Perspective" (Wang et al., ICML 2025, arXiv
2510.26527): Lemma 3.1, Theorem 3.2, a corrected Theorem 3.3, and how much of a block is kept along
a known text; and how often draws with common noise agree. Derived and explained in docs/theory.md.

The functions work on any kind of number: floats, or fractions when the tests compare them with an
enumeration.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from polybasic.chain.base.errors import UserError

Number = Any
"""A float or a fraction; results have the type of the arguments."""


def seconds_of_chain(
    num_tokens: float,
    accepted_lengths: Sequence[float],
    pass_seconds: Sequence[float],
    drafts_per_round: float,
) -> float:
    """Lemma 3.1: T = sum over i < n of (N / L_i) T_i, plus beta (N / L_(n-1)) T_n.

    Args:
        num_tokens: N, tokens of the finished text.
        accepted_lengths: L_1..L_(n-1), tokens of the finished text for each pass of each verifying
            member, from the target down; above 0.
        pass_seconds: T_1..T_n, of one pass of each of them and, last, of the drafter.
        drafts_per_round: beta, passes of the drafter for each pass of the innermost verifier.

    Raises:
        UserError: no verifying member, not one pass time more than accepted lengths, or a length
            that is not above 0.
    """
    if not accepted_lengths or len(pass_seconds) != len(accepted_lengths) + 1:
        raise UserError(
            "models and accepted lengths do not match",
            f"{len(pass_seconds)} pass times, {len(accepted_lengths)} accepted lengths",
            "give a length for each verifying model and a pass time for the drafter besides",
        )
    for length in accepted_lengths:
        if length <= 0:
            raise UserError(
                "accepted length out of range", f"{length}", "it is tokens a pass, above 0"
            )
    *verifying_seconds, drafter_seconds = pass_seconds
    passes = [num_tokens / length for length in accepted_lengths]
    verifying = sum(num * each for num, each in zip(passes, verifying_seconds, strict=True))
    return verifying + drafts_per_round * passes[-1] * drafter_seconds


@dataclass(frozen=True)
class Condition:
    """An inequality of Theorem 3.2: it holds where `left` is less than `right`."""

    left: float
    right: float

    @property
    def holds(self) -> bool:
        return self.left < self.right


@dataclass(frozen=True)
class Insertion:
    """Whether inserting a model between a verifying model and the drafter below it pays.

    Attributes:
        fewer_passes_above: T_new/T_i < L_new (1/L_i - 1/L_i_new): the saved passes of the model
            above pay for the passes of the inserted one. Sufficient if L_new >= L_i.
        fewer_drafts: T_new/T_(i+1) < beta (L_new/L_i - 1): the saved drafts pay for them.
            Sufficient if L_i_new >= L_i. None if nothing below costs time.
        seconds_per_token_without: Lemma 3.1 for these models, without the inserted one.
        seconds_per_token_with: the same with it.
    """

    fewer_passes_above: Condition
    fewer_drafts: Condition | None
    seconds_per_token_without: float
    seconds_per_token_with: float

    @property
    def pays(self) -> bool:
        """The verdict, by the full times: the conditions are sufficient, not necessary."""
        return self.seconds_per_token_with < self.seconds_per_token_without


def judge_insertion(
    above_seconds: float,
    new_seconds: float,
    below_seconds: float | None,
    accepted: float,
    accepted_above_new: float,
    accepted_new: float,
    drafts_per_round: float,
) -> Insertion:
    """Theorem 3.2, and both full times of Lemma 3.1.

    Models above these two take the same time in both cases and are left out. If another verifying
    model is below, compare `seconds_of_chain` of both chains: the theorem's second condition treats
    everything below as drafts.

    Args:
        above_seconds: T_i, a pass of the model above; more than 0.
        new_seconds: T_new, a pass of the inserted model.
        below_seconds: T_(i+1), a pass of the drafter, more than 0; None if nothing below costs
            time or its time is unknown: both full times then leave it out.
        accepted: L_i, tokens for each pass of the model above, without the inserted one.
        accepted_above_new: L_i_new, the same with it.
        accepted_new: L_new, tokens for each pass of the inserted model.
        drafts_per_round: beta, passes of the drafter for each pass of the model that it drafts
            for.

    Raises:
        UserError: a pass that is divided by takes no time, or an accepted length is not above 0.
    """
    for name, seconds in (("above_seconds", above_seconds), ("below_seconds", below_seconds)):
        if seconds is not None and seconds <= 0:
            raise UserError("pass time out of range", f"{name}={seconds}", "give more than 0")
    drafter_seconds = below_seconds if below_seconds is not None else 0
    without = seconds_of_chain(1, [accepted], [above_seconds, drafter_seconds], drafts_per_round)
    inserted = seconds_of_chain(
        1,
        [accepted_above_new, accepted_new],
        [above_seconds, new_seconds, drafter_seconds],
        drafts_per_round,
    )
    fewer_drafts = None
    if below_seconds is not None:
        fewer_drafts = Condition(
            new_seconds / below_seconds, drafts_per_round * (accepted_new / accepted - 1)
        )
    return Insertion(
        Condition(
            new_seconds / above_seconds,
            accepted_new * (1 / accepted - 1 / accepted_above_new),
        ),
        fewer_drafts,
        without,
        inserted,
    )


def accepted_length_moments(acceptance: Number, max_tokens: int) -> tuple[Number, Number]:
    """Mean and variance of the accepted length: Theorem 3.3, corrected.

    A pass over a block of n - 1 tokens, each kept with probability a if all before it were, gains
    the kept ones and one of its own: E = (1 - a^n) / (1 - a) and
    Var = (a - (2n - 1) a^n (1 - a) - a^(2n)) / (1 - a)^2.

    Args:
        acceptance: a, 0 to 1; at 1 the moments are n and 0.
        max_tokens: n, 1 or more.

    Raises:
        UserError: a value out of range.
    """
    _check_acceptance(acceptance)
    _check_max_tokens(max_tokens)
    # Summed over the lengths: the closed forms divide rounding errors by (1 - a)^2.
    reached = [acceptance**num_kept for num_kept in range(max_tokens)]
    mean = sum(reached)
    probabilities = [here - after for here, after in pairwise([*reached, 0])]
    variance = sum(
        probability * (length - mean) ** 2 for length, probability in enumerate(probabilities, 1)
    )
    return mean, variance


def kept_probabilities(
    verifier: Sequence[Number], proposer: Sequence[Number], rule: Literal["block", "token"]
) -> list[Number]:
    """P(at least i tokens of a block are kept | the resulting text), for i = 1..K.

    Exact for every text y from the verifier's own distribution; K may depend on tokens drawn
    earlier (docs/theory.md).

    Args:
        verifier: p_1..p_K, the verifier's probabilities (after temperature and the like) of the
            text's next K tokens, each given those before it; above 0.
        proposer: q_1..q_K, the proposing model's probabilities of the same tokens.
        rule: see `polybasic.deploy.runtime.rounds.verification`.

    Raises:
        UserError: the text has a token that the verifier never draws.
    """
    kept: list[Number] = []
    product: Number = 1
    for p, q in zip(verifier, proposer, strict=True):
        if p <= 0:
            raise UserError(
                "text is not the verifier's", f"a token of probability {p}", "draw it from p"
            )
        product *= q / p if rule == "block" else min(1, q / p)
        kept.append(min([1, product, *kept[-1:]]))
    return kept


def coupled_agreement(first: Sequence[Number], second: Sequence[Number]) -> Number:
    """P(two models draw the same token with the same Gumbel noise).

    At least (1 - d) / (1 + d) and at most 1 - d, with d the total variation of the two.

    Args:
        first: probabilities of all tokens, which sum to 1.
        second: the other model's, of the same tokens.
    """
    pairs = list(zip(first, second, strict=True))
    return sum(
        1 / sum(max(p / own_p, q / own_q) for p, q in pairs)
        for own_p, own_q in pairs
        if own_p > 0 and own_q > 0
    )


@dataclass(frozen=True)
class PredictedSpeedup:
    """The predicted gain of inserting a model.

    Attributes:
        speedup: time a token without it, over time a token with it and the best block length.
        flush_length: that block length, in tokens.
    """

    speedup: float
    flush_length: int


def predicted_speedup(
    cost_ratio: float,
    acceptance: float,
    *,
    tokens_per_round: int,
    draft_ratio: float,
    drafts_per_round: float,
    max_rounds: int = 32,
) -> PredictedSpeedup:
    """Speedup of a model between target and drafter over the two alone, by Lemma 3.1.

    The drafter serves both equally well: a pass over its tree gains `tokens_per_round` in either.
    The inserted model collects whole rounds, and the target keeps each token with probability
    `acceptance` if all before it were kept. The number of rounds is the optimal one.

    Args:
        cost_ratio: T_new/T_i, a pass of the inserted model over one of the target; above 0.
        acceptance: 0 to 1.
        tokens_per_round: 1 or more.
        draft_ratio: T_(i+1)/T_i, a pass of the drafter over one of the target.
        drafts_per_round: beta, passes of the drafter a round.
        max_rounds: the longest flush that is tried, in rounds.

    Raises:
        UserError: a value out of range.
    """
    if cost_ratio <= 0:
        raise UserError("pass time out of range", f"cost_ratio={cost_ratio}", "give more than 0")
    without = seconds_of_chain(1, [tokens_per_round], [1, draft_ratio], drafts_per_round)

    def seconds_with(num_rounds: int) -> float:
        gained, _ = accepted_length_moments(acceptance, num_rounds * tokens_per_round + 1)
        lengths = [gained, gained / num_rounds]
        return seconds_of_chain(1, lengths, [1, cost_ratio, draft_ratio], drafts_per_round)

    best = min(range(1, max_rounds + 1), key=seconds_with)
    return PredictedSpeedup(without / seconds_with(best), best * tokens_per_round)


def _check_acceptance(acceptance: Number) -> None:
    if not 0 <= acceptance <= 1:
        raise UserError(
            "acceptance out of range", f"acceptance={acceptance}", "it is a probability: 0 to 1"
        )


def _check_max_tokens(max_tokens: int) -> None:
    if max_tokens < 1:
        raise UserError(
            "block too short", f"max_tokens={max_tokens}", "a pass gains at least one token"
        )
