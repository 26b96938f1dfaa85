"""Golden values of the paper, enumerations with fractions, and what is exact along a known text."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from polybasic.chain.base.errors import UserError
from polybasic.chain.kernels.noise import gumbel_noise, noise_key
from polybasic.deploy.planner.theory import (
    Insertion,
    accepted_length_moments,
    coupled_agreement,
    judge_insertion,
    kept_probabilities,
    predicted_speedup,
    seconds_of_chain,
)
from polybasic.deploy.runtime.rounds.verification import (
    block_acceptance,
    block_weights,
    residual,
    token_acceptance,
)

PROBABILITIES = st.fractions(0, 1, max_denominator=20)
SECONDS = st.fractions(Fraction(1, 10), 50, max_denominator=10)
LENGTHS = st.fractions(1, 12, max_denominator=10)
INSERTIONS = st.tuples(SECONDS, SECONDS, SECONDS, LENGTHS, LENGTHS, LENGTHS, st.integers(1, 10))
"""Arguments of `judge_insertion`."""


# Lemma 3.1 and Theorem 3.2


def test_seconds_of_chain() -> None:
    # 100 tokens: 10 target passes of 3 s, 25 of the intermediate of 2 s, 25 rounds of 4 drafts
    assert seconds_of_chain(100, [10, 4], [3, 2, Fraction(1, 10)], 4) == 30 + 50 + 10
    assert seconds_of_chain(100, [1], [3, 0], 0) == 300
    for lengths, seconds in (([], [1]), ([2], [1]), ([0], [1, 1])):
        with pytest.raises(UserError):
            seconds_of_chain(1, lengths, seconds, 1)


@pytest.mark.parametrize(
    ("above", "new", "accepted", "accepted_above_new", "accepted_new", "left", "right", "pays"),
    [
        (22, 17.61, 4.34, 3.83, 3.77, 0.800, -0.116, False),
        (22, 7.00, 4.34, 6.26, 4.67, 0.318, 0.330, True),
        (47.52, 19.16, 2.28, 3.50, 3.02, 0.403, 0.462, True),
    ],
)
def test_table_1_of_the_paper(
    above: float,
    new: float,
    accepted: float,
    accepted_above_new: float,
    accepted_new: float,
    left: float,
    right: float,
    pays: bool,
) -> None:
    """The paper prints the first right side as +0.117, which its own numbers do not give."""
    judged = judge_insertion(above, new, None, accepted, accepted_above_new, accepted_new, 0)
    condition = judged.fewer_passes_above
    assert (condition.left, condition.right) == pytest.approx((left, right), abs=5e-4)
    assert condition.holds == judged.pays == pays
    assert judged.fewer_drafts is None


@given(INSERTIONS)
def test_either_condition_suffices_under_its_assumption(numbers: Any) -> None:
    judged = judge_insertion(*numbers)
    _, _, _, accepted, accepted_above_new, accepted_new, _ = numbers
    assert judged.fewer_drafts is not None
    if judged.fewer_passes_above.holds and accepted_new >= accepted:
        assert judged.pays
    if judged.fewer_drafts.holds and accepted_above_new >= accepted:
        assert judged.pays


def test_each_condition_needs_its_assumption() -> None:
    """L_new < L_i: more drafts eat what the target is spared. L_i_new < L_i: the other way."""
    judged = judge_insertion(10, 1, 5, 4, 8, 3, 6)
    assert judged.fewer_passes_above.holds
    assert not judged.pays
    judged = judge_insertion(10, 1, 1, 4, 2, 6, 6)
    assert judged.fewer_drafts is not None
    assert judged.fewer_drafts.holds
    assert not judged.pays


def test_the_conditions_are_not_necessary() -> None:
    judged = judge_insertion(10, 7, 1, 4, 8, 5, 14)
    assert judged.fewer_drafts is not None
    assert not judged.fewer_passes_above.holds
    assert not judged.fewer_drafts.holds
    assert judged.pays


@given(INSERTIONS)
def test_conditions_are_the_times_of_two_models_each(numbers: Any) -> None:
    """The first compares all but the drafts, the second all but the passes above."""
    above, new, below, accepted, accepted_above_new, accepted_new, drafts = numbers
    judged = judge_insertion(*numbers)
    assert judged.fewer_drafts is not None
    assume(new / above != judged.fewer_passes_above.right)
    undrafted = judge_insertion(above, new, None, accepted, accepted_above_new, accepted_new, 0)
    assert judged.fewer_passes_above.holds == undrafted.pays
    drafts_without = drafts * below / accepted
    drafts_with = (new + drafts * below) / accepted_new
    assert judged.fewer_drafts.holds == (drafts_with < drafts_without)


def test_judge_insertion_refuses_passes_without_time() -> None:
    for above, below in ((0, 1), (1, 0)):
        with pytest.raises(UserError, match="pass time"):
            judge_insertion(above, 1, below, 2, 3, 2, 1)


def test_insertion_has_the_times_of_lemma_3_1() -> None:
    judged = judge_insertion(10, 6, 1, 4, 8, 5, 14)
    assert isinstance(judged, Insertion)
    assert judged.seconds_per_token_without == seconds_of_chain(1, [4], [10, 1], 14) == 6
    assert judged.seconds_per_token_with == seconds_of_chain(1, [8, 5], [10, 6, 1], 14) == 5.25


# Theorem 3.3


def enumerated_moments(acceptance: Fraction, max_tokens: int) -> tuple[Fraction, Fraction]:
    """Over every outcome of the tokens of a block."""
    mean = square = Fraction(0)
    for outcomes in itertools.product((True, False), repeat=max_tokens - 1):
        probability = Fraction(1)
        for is_kept in outcomes:
            probability *= acceptance if is_kept else 1 - acceptance
        length = 1 + sum(itertools.accumulate(outcomes, lambda kept, outcome: kept and outcome))
        mean += probability * length
        square += probability * length**2
    return mean, square - mean**2


def closed_forms(a: Fraction, n: int) -> tuple[Fraction, Fraction]:
    mean = (1 - a**n) / (1 - a)
    variance = (a - (2 * n - 1) * a**n * (1 - a) - a ** (2 * n)) / (1 - a) ** 2
    return mean, variance


@given(PROBABILITIES, st.integers(1, 7))
def test_moments_equal_enumeration(acceptance: Fraction, max_tokens: int) -> None:
    moments = accepted_length_moments(acceptance, max_tokens)
    assert moments == enumerated_moments(acceptance, max_tokens)
    if acceptance < 1:
        assert moments == closed_forms(acceptance, max_tokens)
    if 0 < acceptance < 1 and max_tokens > 1:
        assert moments != enumerated_moments(acceptance, max_tokens + 1)


def test_moments_at_the_ends() -> None:
    assert accepted_length_moments(Fraction(1, 2), 2) == (Fraction(3, 2), Fraction(1, 4))
    assert accepted_length_moments(1, 5) == (5, 0)
    assert accepted_length_moments(0, 5) == (1, 0)
    assert accepted_length_moments(0.3, 1) == (1, 0)
    mean, variance = accepted_length_moments(1 - 1e-9, 8)
    assert mean == pytest.approx(8)
    assert variance == pytest.approx(140e-9, rel=1e-6)
    for acceptance, max_tokens in ((-0.1, 2), (1.1, 2), (0.5, 0)):
        with pytest.raises(UserError):
            accepted_length_moments(acceptance, max_tokens)


def test_the_long_block_limit_is_no_variance_of_short_blocks() -> None:
    """a / (1 - a)^2 is right for long blocks, and eight times too much for two tokens at 1/2."""
    limit = Fraction(1, 2) / (1 - Fraction(1, 2)) ** 2
    assert float(accepted_length_moments(Fraction(1, 2), 60)[1]) == pytest.approx(float(limit))
    assert limit == 8 * accepted_length_moments(Fraction(1, 2), 2)[1]


# What is kept of a block, given the text that came about

VOCAB_SIZE, NUM_TOKENS = 2, 4


class Tables:
    """Random models: for every prefix a distribution of fractions without a zero."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.rows: dict[tuple[str, tuple[int, ...]], Any] = {}
        for model, length in itertools.product("pq", range(NUM_TOKENS + 1)):
            for prefix in itertools.product(range(VOCAB_SIZE), repeat=length):
                weights = [rng.randint(1, 6) for _ in range(VOCAB_SIZE)]
                row = [Fraction(weight, sum(weights)) for weight in weights]
                self.rows[model, prefix] = np.array(row, dtype=object)

    def along(self, model: str, tokens: tuple[int, ...]) -> Any:
        """Rows after each prefix of `tokens`, the empty one first."""
        rows = [self.rows[model, tokens[:length]] for length in range(len(tokens) + 1)]
        return np.array(rows, dtype=object)

    def probability(self, model: str, tokens: tuple[int, ...]) -> Fraction:
        rows = self.along(model, tokens)
        probability = Fraction(1)
        for row, token in zip(rows[:-1], tokens, strict=True):
            probability *= row[token]
        return probability


BlockLength = Callable[[tuple[int, ...]], int]
"""How many tokens of a text belong to the block."""


def three(tokens: tuple[int, ...]) -> int:
    return 3


def ends_behind_a_zero(tokens: tuple[int, ...]) -> int:
    """Decided from tokens that were drawn: as stop tokens, rounds and adaptive flushing do."""
    return tokens.index(0) + 1 if 0 in tokens[:3] else 3


def enumerated_law(
    tables: Tables, rule: str, block_length: BlockLength
) -> Counter[tuple[int, tuple[int, ...]]]:
    """Joint law of how many tokens of a block are kept and of the text, `NUM_TOKENS` long.

    The block is drawn from q, cut by the rule, continued from the residual and then from p.
    """
    law: Counter[Any] = Counter()
    for proposed in itertools.product(range(VOCAB_SIZE), repeat=3):
        block = proposed[: block_length(proposed)]
        p, q = tables.along("p", block), tables.along("q", block)[: len(block)]
        tokens, weights = list(block), [1] * (len(block) + 1)
        if rule == "token":
            acceptance = token_acceptance(p, q, tokens)
            ends = [
                math.prod(acceptance[:kept]) * (1 - acceptance[kept] if kept < len(block) else 1)
                for kept in range(len(block) + 1)
            ]
        else:
            weights = block_weights(p, q, tokens)
            acceptance = [1, *block_acceptance(p, q, weights)]
            ends = [
                acceptance[kept] * math.prod(1 - later for later in acceptance[kept + 1 :])
                for kept in range(len(block) + 1)
            ]
        for kept, is_kept in enumerate(ends):
            row = p[kept]
            if kept < len(block):
                row = residual(p[kept], q[kept], weights[kept])
                assert is_kept == 0 or row[block[kept]] == 0, "text and block part here"
            for rest in itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS - kept):
                text = (*block[:kept], *rest)
                follows = Fraction(1)
                for index in range(kept + 1, NUM_TOKENS):
                    follows *= tables.rows["p", text[:index]][text[index]]
                drawn = tables.probability("q", proposed)
                law[kept, text] += drawn * is_kept * row[rest[0]] * follows
    return +law


def predicted_law(
    tables: Tables, rule: Any, block_length: BlockLength
) -> Counter[tuple[int, tuple[int, ...]]]:
    """The same from a text that p draws: how many are kept is drawn after it."""
    law: Counter[Any] = Counter()
    for text in itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS):
        length = block_length(text)
        p, q = (
            [tables.rows[model, text[:index]][text[index]] for index in range(length)]
            for model in "pq"
        )
        at_least = [1, *kept_probabilities(p, q, rule), 0]
        for kept, (here, after) in enumerate(itertools.pairwise(at_least)):
            law[kept, text] += tables.probability("p", text) * (here - after)
    return +law


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("block_length", [three, ends_behind_a_zero])
@pytest.mark.parametrize("rule", ["block", "token"])
def test_what_is_kept_follows_the_text(rule: str, block_length: BlockLength, seed: int) -> None:
    tables = Tables(seed)
    assert enumerated_law(tables, rule, block_length) == predicted_law(tables, rule, block_length)


def test_the_rules_have_laws_of_their_own() -> None:
    tables = Tables(0)
    assert enumerated_law(tables, "block", three) != predicted_law(tables, "token", three)
    assert enumerated_law(tables, "token", three) != predicted_law(tables, "block", three)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_the_block_rule_keeps_no_fewer(pairs: list[tuple[int, int]]) -> None:
    p, q = ([Fraction(weight, 9) for weight in column] for column in zip(*pairs, strict=True))
    block, token = kept_probabilities(p, q, "block"), kept_probabilities(p, q, "token")
    assert all(a >= b for a, b in zip(block, token, strict=True))
    assert block == sorted(block, reverse=True)
    assert token == sorted(token, reverse=True)


def test_kept_probabilities_by_hand() -> None:
    p, q = [Fraction(1, 4), Fraction(1, 2)], [Fraction(1, 2), Fraction(1, 4)]
    assert kept_probabilities(p, q, "block") == [1, 1]  # 2, then 2 * 1/2
    assert kept_probabilities(p, q, "token") == [1, Fraction(1, 2)]
    greedy = kept_probabilities([1, 1, 1], [1, 0, 1], "block")
    assert greedy == kept_probabilities([1, 1, 1], [1, 0, 1], "token") == [1, 0, 0]
    with pytest.raises(UserError, match="not the verifier's"):
        kept_probabilities([0], [1], "block")


# Common noise

P_EXAMPLE = (Fraction(1, 2), Fraction(1, 4), Fraction(1, 4))
Q_EXAMPLE = (Fraction(1, 4), Fraction(1, 2), Fraction(1, 4))


def total_variation(p: Any, q: Any) -> Any:
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


def test_agreement_by_hand() -> None:
    half, quarter = Fraction(1, 2), Fraction(1, 4)
    assert coupled_agreement(P_EXAMPLE, P_EXAMPLE) == 1
    assert coupled_agreement(P_EXAMPLE, Q_EXAMPLE) == quarter + quarter + Fraction(1, 5)
    # of two tokens the best that can be, 1 - d; the worst where each has a token of its own
    assert coupled_agreement((half, half), (1 - quarter, quarter)) == 1 - quarter
    assert coupled_agreement((half, half, 0), (half, 0, half)) == (1 - half) / (1 + half)
    assert coupled_agreement((1, 0), (0, 1)) == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=6))
def test_agreement_keeps_its_bounds(pairs: list[tuple[int, int]]) -> None:
    columns = list(zip(*pairs, strict=True))
    assume(all(sum(column) > 0 for column in columns))
    p, q = ([Fraction(weight, sum(column)) for weight in column] for column in columns)
    d, agreement = total_variation(p, q), coupled_agreement(p, q)
    assert (1 - d) / (1 + d) <= agreement <= 1 - d
    assert agreement == coupled_agreement(q, p)


def test_draws_with_the_noise_that_serves_agree_as_often() -> None:
    numbers, num_draws = np.random.default_rng(0), 40_000
    for seed, num_tokens in enumerate((3, 10, 100)):
        p, q = numbers.dirichlet([0.5] * num_tokens, size=2)
        expected = coupled_agreement(p.tolist(), q.tolist())
        noise = gumbel_noise(noise_key(seed), torch.arange(num_draws), num_tokens)
        drawn = [(torch.tensor(row).log() + noise).argmax(-1) for row in (p, q)]
        deviation = (expected * (1 - expected) / num_draws) ** 0.5
        agreeing = (drawn[0] == drawn[1]).double().mean()
        assert abs(agreeing - expected) < 4 * deviation
        # with noise of its own each, or the best coupling, it would be another number
        assert abs(float(p @ q) - expected) > 20 * deviation
        assert abs(1 - total_variation(p, q) - expected) > 4 * deviation


def test_example_of_the_docs() -> None:
    """Expected tokens of a pass over a block of four, each of the same two distributions."""

    def expected(rule: Any) -> Fraction:
        total = Fraction(0)
        for text in itertools.product(range(3), repeat=4):
            p, q = ([row[token] for token in text] for row in (P_EXAMPLE, Q_EXAMPLE))
            total += math.prod(p) * (1 + sum(kept_probabilities(p, q, rule)))
        return total

    assert total_variation(P_EXAMPLE, Q_EXAMPLE) == Fraction(1, 4)
    token, coupled = (
        accepted_length_moments(a, 5)[0]
        for a in (Fraction(3, 4), coupled_agreement(P_EXAMPLE, Q_EXAMPLE))
    )
    assert expected("token") == token
    figures = [float(figure) for figure in (expected("block"), token, coupled)]
    assert figures == pytest.approx([3.37, 3.05, 2.77], abs=0.005)


# The figure's prediction

FIXED = {"tokens_per_round": 4, "draft_ratio": 0.05, "drafts_per_round": 6}


def test_predicted_speedup_by_hand() -> None:
    # one round of 4 + 6 * 0.05 without; a perfect copy that costs nothing keeps all 8 of 2 rounds
    predicted = predicted_speedup(1e-12, 1.0, **FIXED, max_rounds=2)
    assert predicted.flush_length == 8
    assert predicted.speedup == pytest.approx((1.3 / 4) / ((1 + 2 * 0.3) / 9))
    assert predicted_speedup(0.3, 0.0, **FIXED).speedup == pytest.approx(1.3 / 4 / 1.6)


@given(st.floats(0.05, 1), st.floats(0, 1))
def test_predicted_speedup_is_the_best_flush_and_monotonic(cost: float, acceptance: float) -> None:
    predicted = predicted_speedup(cost, acceptance, **FIXED)
    assert predicted_speedup(cost * 1.1, acceptance, **FIXED).speedup < predicted.speedup
    better = predicted_speedup(cost, min(1, acceptance + 0.05), **FIXED)
    assert better.speedup >= predicted.speedup * (1 - 1e-12)
    longer = predicted_speedup(cost, acceptance, **FIXED, max_rounds=40)
    assert longer.speedup >= predicted.speedup * (1 - 1e-12)
    with pytest.raises(UserError):
        predicted_speedup(0, acceptance, **FIXED)
