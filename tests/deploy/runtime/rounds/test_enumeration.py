"""The output law of chains of tables, through every outcome, equals the target's in every entry.

Exact, in fractions; see `tests/deploy/tables.py`. Each negative control breaks one thing
and must be seen. Of the rules by which tokens are drawn independently; `test_coupled.py` is about
the other one.
"""

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch

from polybasic.chain.formats.plan import AdaptiveFlush, Flush, Rule, Tree
from polybasic.deploy.runtime.rounds import stages, verification
from polybasic.deploy.runtime.rounds.flushing import AdaptiveFlushing
from polybasic.deploy.runtime.rounds.passes import Passes, alone
from polybasic.deploy.runtime.rounds.sampling import Prefixes, Probabilities, Sampling, make_sampler
from polybasic.deploy.runtime.rounds.stages import Block, TreeStage
from polybasic.deploy.runtime.rounds.warping import process_logits
from tests.deploy.outcomes import Outcomes
from tests.deploy.tables import (
    Case,
    EnumeratingSampler,
    TableVerifier,
    Wiring,
    build,
    generate,
    output_law,
    rational,
    rows_of,
    target_law,
)

RULES: tuple[Rule, ...] = ("block", "token")
ADAPTIVE = AdaptiveFlush(break_even=0.5, acceptance=(0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9))
PENALTIES = Sampling(
    1.0, repetition_penalty=1.6, presence_penalty=0.9, frequency_penalty=0.8, logit_bias={0: 0.5}
)


def case(rule: Rule, *lengths: int, num_tokens: int, **others: Any) -> Case:
    """Tables that agree now and then, with the block lengths of all but the innermost."""
    flushes = tuple(Flush(length=length) for length in lengths)
    return Case(flushes, num_tokens, rule, **{"seed": 5, "likeness": 2, **others})


def adaptive(example: Case, *places: int) -> Case:
    """The same with adaptive flushes at some places, counted from the target."""
    flushes = list(example.flushes)
    for place in places:
        flushes[place] = flushes[place].model_copy(update={"adaptive": ADAPTIVE})
    return dataclasses.replace(example, flushes=tuple(flushes))


ONE_LEVEL = [case("block", num_tokens=5), case("block", num_tokens=4, vocab_size=3)]
TWO_LEVELS = [
    case(rule, length, num_tokens=5, caches=caches)
    for rule in RULES
    for length in (1, 2, 4)
    for caches in (None, (0, 1))
]
THREE_LEVELS = [  # any two of the three settings meet
    case(rule, length, 2, num_tokens=4, caches=caches)
    for length, rule, caches in (
        (1, "block", None), (3, "token", None), (1, "token", (0, 1, 2)), (3, "block", (0, 1, 2)),
        (1, "block", (0, 0, 1)), (3, "token", (0, 0, 1)), (1, "token", (0, 1, 1)),
        (3, "block", (0, 1, 1)),
    )
]  # fmt: skip
FOUR_LEVELS = [
    case("block", 4, 2, 1, num_tokens=4),
    case("token", 3, 2, 1, num_tokens=4, caches=(0, 0, 1, 1)),
    case("block", 2, 2, 2, num_tokens=4, caches=(0, 1, 1, 2)),
]
PROBABLE_TREES = [
    case(rule, *lengths, num_tokens=4, tree=Tree(depth=3, top_k=2, rows=6, least_probability=least))
    for rule in RULES
    for lengths, least in (((), 0.3), ((2,), 0.3), ((3, 1), 0.6))
]
OTHERS = [
    case("block", 2, num_tokens=4, vocab_size=3),
    case("token", 2, num_tokens=4, vocab_size=3, caches=(0, 1)),
    case("block", 2, num_tokens=5, stop_tokens=frozenset({1})),
    case("token", 3, num_tokens=5, stop_tokens=frozenset({0}), caches=(0, 1)),
    case(
        "block", 3, 2, num_tokens=4, vocab_size=3, stop_tokens=frozenset({0, 2}), caches=(0, 1, 2)
    ),
    case("token", 3, 2, num_tokens=5, stop_tokens=frozenset({1}), seed=1, caches=(0, 0, 1)),
]


@pytest.mark.parametrize(
    "case",
    [*ONE_LEVEL, *TWO_LEVELS, *THREE_LEVELS, *FOUR_LEVELS, *PROBABLE_TREES, *OTHERS],
    ids=str,
)
def test_output_law_is_the_targets(case: Case) -> None:
    assert output_law(case) == target_law(case)


@pytest.mark.parametrize(
    "case", [ONE_LEVEL[-1], TWO_LEVELS[-1], *THREE_LEVELS[:5], FOUR_LEVELS[-1], OTHERS[-1]], ids=str
)
def test_law_holds_where_the_prompts_last_pass_gives_a_token(case: Case) -> None:
    assert output_law(case, Wiring(starts=True)) == target_law(case)


@pytest.mark.parametrize("caches", [(0, 1, 0), (0, 1, 1, 0)])
def test_cache_shared_past_a_model_between_is_detected(caches: tuple[int, ...]) -> None:
    # The model between does not see that its neighbours' rows are overwritten.
    lengths = [2] * (len(caches) - 1)
    with pytest.raises(AssertionError):
        output_law(case("block", *lengths, num_tokens=5, caches=caches))


def test_block_rule_accepts_more_than_token_rule() -> None:
    def expected_tokens(rule: Rule) -> Fraction:
        outcomes, expected = Outcomes(), Fraction(0)
        example = Case((Flush(length=3),), 4, rule)
        for _ in outcomes.runs():
            root, _ = build(example, EnumeratingSampler(outcomes, example))
            alone(root.prefill(list(example.prompt)))
            expected += outcomes.probability * len(
                alone(root.propose(1, example.num_tokens)).tokens
            )
        return expected

    assert expected_tokens("block") > expected_tokens("token")


# What is wrong between the models


def bonus_from_below(p_row: Any, q_row: Any, weight: Any) -> Any:
    return q_row


def residual_without_weight(p_row: Any, q_row: Any, weight: Any) -> Any:
    positive = (p_row - q_row).clip(0)
    return positive / positive.sum() if positive.sum() > 0 else p_row


def target_itself(p_row: Any, q_row: Any, weight: Any) -> Any:
    return p_row


@pytest.mark.parametrize(
    ("wrong_residual", "num_tokens"),
    [(bonus_from_below, 3), (residual_without_weight, 4), (target_itself, 3)],
)
def test_wrong_residuals_are_detected(
    wrong_residual: Callable[[Any, Any, Any], Any],
    num_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    example = Case((Flush(length=2),), num_tokens, vocab_size=3, seed=1)
    monkeypatch.setattr(verification, "residual", wrong_residual)
    assert output_law(example) != target_law(example)


class BonusFromBelow(TableVerifier):
    """A target whose last row, from which the token after a whole block is drawn, is another's."""

    def logits(self, states: torch.Tensor) -> Any:
        rows = super().logits(states)
        rows[-1] = rows_of(self.case, 1, [self.prefixes[int(states[-1, 0])]])[0]
        return rows


@pytest.mark.parametrize("rule", RULES)
def test_bonus_token_from_the_intermediate_is_detected(rule: Rule) -> None:
    example = case(rule, 2, num_tokens=4)
    assert output_law(example, Wiring(target=BonusFromBelow)) != target_law(example)


class FlattenedProposals(EnumeratingSampler):
    """Hands up other distributions than the block was drawn from."""

    def join(self, parts: Any) -> Probabilities:
        rows = super().join(parts).values
        return Probabilities(rows / 2 + Fraction(1, 2 * rows.shape[1]))


@pytest.mark.parametrize("rule", RULES)
def test_wrong_proposal_distribution_is_detected(rule: Rule) -> None:
    example = Case((Flush(length=2),), 3, rule)
    assert output_law(example, Wiring(FlattenedProposals)) != target_law(example)


# Warping

WARPERS = {
    "temperature": Sampling(0.6),
    "top_k": Sampling(1.0, top_k=2),
    "top_p": Sampling(1.0, top_p=0.7),
    "min_p": Sampling(1.0, min_p=0.3),
    "repetition": Sampling(1.0, repetition_penalty=1.6),
    "presence": Sampling(1.0, presence_penalty=1.2),
    "frequency": Sampling(1.0, frequency_penalty=0.9),
    "bias": Sampling(1.0, logit_bias={0: -1.0, 2: 1.5}),
    "all": Sampling(
        0.8,
        top_k=2,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=-0.4,
        logit_bias={1: 0.7},
    ),
}
WARPED = [
    case("block", num_tokens=4, vocab_size=3),
    case("block", 2, num_tokens=3, vocab_size=3, stop_tokens=frozenset({2})),
    case("token", 2, num_tokens=3, vocab_size=3, caches=(0, 1)),
    case("token", 2, 1, num_tokens=3, vocab_size=3, caches=(0, 0, 1)),
]


@pytest.mark.parametrize("one", WARPED, ids=str)
@pytest.mark.parametrize("warper", WARPERS)
def test_output_law_is_the_warped_targets(warper: str, one: Case) -> None:
    warped = dataclasses.replace(one, sampling=WARPERS[warper])
    law = target_law(warped)
    assert law != target_law(dataclasses.replace(one, sampling=Sampling(1.0)))
    assert output_law(warped) == law


class ShiftedPrefixes(EnumeratingSampler):
    """The last token before each draw is overlooked."""

    def distributions(self, logits: Any, prefixes: Prefixes) -> Probabilities:
        whole = [[*prefixes.sequence, *suffix] for suffix in prefixes.suffixes]
        return super().distributions(logits, Prefixes([], [tokens[:-1] for tokens in whole]))


class OtherRows(EnumeratingSampler):
    """Rows get the suffixes of others."""

    def distributions(self, logits: Any, prefixes: Prefixes) -> Probabilities:
        turned = [*prefixes.suffixes[1:], prefixes.suffixes[0]]
        return super().distributions(logits, Prefixes(prefixes.sequence, turned))


class SequenceAlone(EnumeratingSampler):
    """What was proposed since the last round is overlooked."""

    def distributions(self, logits: Any, prefixes: Prefixes) -> Probabilities:
        without = Prefixes(prefixes.sequence, [[] for _ in prefixes.suffixes])
        return super().distributions(logits, without)


class PromptIsLonger(EnumeratingSampler):
    """The first token of the answer counts as prompt."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.num_prompt_tokens += 1


@pytest.mark.parametrize(
    ("one", "sampler"),
    zip(WARPED, [ShiftedPrefixes, OtherRows, SequenceAlone, PromptIsLonger], strict=True),
    ids=str,
)
def test_wrong_prefixes_are_detected(one: Case, sampler: type[EnumeratingSampler]) -> None:
    penalised = dataclasses.replace(one, sampling=PENALTIES)
    assert output_law(penalised, Wiring(sampler)) != target_law(penalised)


class UnwarpedProposals(EnumeratingSampler):
    """Verifies a block as if it had been drawn from distributions without warping."""

    def distributions(self, logits: Any, prefixes: Prefixes) -> Probabilities:
        rows = super().distributions(logits, prefixes)
        rows.unwarped = rational(logits.softmax(-1))  # type: ignore[attr-defined]
        return rows

    def take(self, rows: Any, chosen: list[int]) -> Probabilities:
        return super().take(Probabilities(rows.unwarped), chosen)


@pytest.mark.parametrize(("warper", "rule"), [("top_k", "block"), ("repetition", "token")])
def test_unwarped_proposal_distribution_is_detected(warper: str, rule: Rule) -> None:
    example = case(rule, 2, num_tokens=3, vocab_size=3, sampling=WARPERS[warper])
    assert output_law(example, Wiring(UnwarpedProposals)) != target_law(example)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("lengths", [(), (3,), (4, 2)], ids=len)
def test_greedy_answer_is_the_targets(lengths: tuple[int, ...], seed: int) -> None:
    sampling = dataclasses.replace(PENALTIES, temperature=0.0)
    example = case("block", *lengths, num_tokens=9, vocab_size=3, seed=seed, sampling=sampling)
    if len(lengths) > 1:
        example = adaptive(example, 0)
    expected: list[int] = []
    for _ in range(example.num_tokens):
        tokens = [*example.prompt, *expected]
        logits = rows_of(example, 0, [tuple(tokens)])
        logits = process_logits(logits, sampling, Prefixes(tokens, [[]]), len(example.prompt))
        expected.append(int(logits.argmax()))
    assert (
        generate(example, make_sampler(sampling, torch.device("cpu"), len(example.prompt)))
        == expected
    )


# Adaptive flushing

ADAPTED = [
    adaptive(case("block", 3, num_tokens=5), 0),
    adaptive(case("token", 3, num_tokens=5, caches=(0, 1)), 0),
    adaptive(case("block", 4, num_tokens=5, stop_tokens=frozenset({1})), 0),
    adaptive(case("block", 3, 2, num_tokens=4), 0, 1),
    adaptive(case("token", 3, 2, num_tokens=4, caches=(0, 1, 1)), 0),
    adaptive(case("block", 3, num_tokens=4, vocab_size=3, sampling=WARPERS["all"]), 0),
]


@pytest.mark.parametrize("case", ADAPTED, ids=str)
def test_output_law_with_adaptive_flushing_is_the_targets(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions: set[bool] = set()

    class Recorded(AdaptiveFlushing):
        """Keeps the decisions on blocks that may still grow."""

        def begin_block(self) -> None:
            self.num_tokens = 0
            super().begin_block()

        def wants_more(self, probabilities: list[float]) -> bool:
            self.num_tokens += len(probabilities)
            decision = super().wants_more(probabilities)
            if self.num_tokens < case.flushes[0].length:
                decisions.add(decision)
            return decision

    monkeypatch.setattr(stages, "AdaptiveFlushing", Recorded)
    assert output_law(case) == target_law(case)
    assert decisions == {True, False}


class PeekingTreeStage(TreeStage):
    """Ends its block before a token that it finds unlikely: that token decides on itself."""

    def propose(self, *arguments: Any) -> Passes[Block]:
        block = yield from super().propose(*arguments)
        last = len(block.tokens) - 1
        if last < 0 or block.distributions.values[last, block.tokens[last]] >= Fraction(1, 2):
            return block
        return Block(block.tokens[:last], Probabilities(block.distributions.values[:last]))


@pytest.mark.parametrize("rule", RULES)
def test_block_that_ends_by_the_token_after_it_is_detected(rule: Rule) -> None:
    example = case(rule, 2, num_tokens=4, caches=(0, 1))
    assert output_law(example, Wiring(tree_stage=PeekingTreeStage)) != target_law(example)
