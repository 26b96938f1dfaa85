"""Ratios of systems, their intervals and remedies, accepted lengths and quantiles."""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from polybasic.deploy.bench.bootstrap import estimate
from polybasic.deploy.bench.intervals import (
    ALIKE,
    POWERS,
    lengths,
    noise_share,
    quantiles,
    ratio,
)
from polybasic.deploy.bench.schema import Answers, PromptReport


def prompts_of(num_tasks: int, size: int, turns: int = 1) -> list[PromptReport]:
    return [
        PromptReport(
            question_id=str(question),
            task=f"task {task}",
            turn=turn + 1,
            num_tokens=20,
            sha256=f"{task}/{question}/{turn}",
        )
        for task in range(num_tasks)
        for question in range(size)
        for turn in range(turns)
    ]


def answers(
    tokens: Sequence[Sequence[float]],
    seconds: Sequence[Sequence[float]],
    first: float = 1,
    first_seconds: float = 0.0,
) -> Answers:
    return Answers(
        num_tokens=[list(row) for row in tokens],
        seconds=[list(row) for row in seconds],
        num_first=[[first] * len(row) for row in tokens],
        first_seconds=[[first_seconds] * len(row) for row in tokens],
    )


def drawn(
    num_prompts: int, speedup: float, between: float, noise: float, repeats: int = 2, seed: int = 0
) -> tuple[Answers, Answers]:
    """A system and its baseline; logarithms of speedups and of single times are normal."""
    numbers = np.random.default_rng(seed)
    tokens = np.broadcast_to(numbers.integers(30, 90, num_prompts), (repeats, num_prompts))
    speedups = speedup * np.exp(between * numbers.standard_normal(num_prompts))

    def noisy(seconds: Any) -> Any:
        return seconds * np.exp(noise * numbers.standard_normal((repeats, num_prompts)))

    slow = noisy(0.002 * tokens)
    fast = noisy(0.002 * tokens / speedups)
    return answers(tokens.tolist(), fast.tolist()), answers(tokens.tolist(), slow.tolist())


# Values


def test_totals_over_totals() -> None:
    system = answers([[10, 20], [10, 20]], [[1, 2], [1, 2]])
    other = answers([[10, 20], [10, 20]], [[2, 5], [2, 7]])
    found = ratio(system, other, prompts_of(1, 2))
    assert found.value == pytest.approx((60 / 6) / (60 / 16))
    assert ratio(system, other, prompts_of(1, 2), places=[1]).value == pytest.approx(3)


def test_answers_that_one_of_them_lacks_do_not_count() -> None:
    # in the second repeat the one was stopped after a prompt, the other never began
    system = answers([[10, 20], [10]], [[1, 2], [50]])
    other = answers([[10, 20]], [[2, 6]])
    assert ratio(system, other, prompts_of(1, 2)).value == pytest.approx(8 / 3)
    assert ratio(other, system, prompts_of(1, 2)).value == pytest.approx(3 / 8)
    longer = answers([[10, 20], [10, 20]], [[2, 6], [2, 1000]])
    assert ratio(system, longer, prompts_of(1, 2)).value == pytest.approx(10 / 53)


def test_decode_leaves_out_what_came_first() -> None:
    system = answers([[10, 20]], [[1.5, 2.5]], first=2, first_seconds=0.5)
    other = answers([[10, 20]], [[3, 5]], first=1, first_seconds=1)
    found = ratio(system, other, prompts_of(1, 2), decode=True)
    assert found is not None
    assert found.value == pytest.approx((26 / 3) / (28 / 6))
    in_one_piece = answers([[2, 2]], [[0.5, 0.5]], first=2, first_seconds=0.5)
    assert ratio(in_one_piece, other, prompts_of(1, 2), decode=True) is None


def test_system_without_tokens() -> None:
    other = answers([[10, 20]], [[2, 6]])
    found = ratio(answers([[0, 0]], [[1, 1]]), other, prompts_of(1, 2))
    assert (found.value, found.is_conclusive) == (0.0, False)
    assert found.remedy == "no answer has a token: see why"
    with pytest.raises(ValueError, match="over nothing"):
        ratio(other, answers([[0, 0]], [[1, 1]]), prompts_of(1, 2))


# Intervals


def test_turns_of_a_question_stay_together() -> None:
    """Copies of a prompt in another turn tell nothing new; other questions do."""
    system, other = drawn(12, 2, 0.3, 0)
    twice = [
        answers([[x for x in row for _ in "ab"] for row in y.num_tokens], [
            [x for x in row for _ in "ab"] for row in y.seconds
        ])
        for y in (system, other)
    ]  # fmt: skip
    alone = ratio(system, other, prompts_of(3, 4))
    turns = ratio(twice[0], twice[1], prompts_of(3, 4, turns=2))
    assert (turns.low, turns.high) == pytest.approx((alone.low, alone.high))
    questions = ratio(twice[0], twice[1], prompts_of(3, 8))
    width = math.log(alone.high / alone.low)
    assert math.log(questions.high / questions.low) < 0.8 * width


def test_question_ids_of_other_groups_are_other_questions() -> None:
    system, other = drawn(12, 2, 0.3, 0)
    prompts = prompts_of(1, 12)
    renamed = [
        prompt.model_copy(
            update={"question_id": str(place % 6), "group": "" if place < 6 else "new topics"}
        )
        for place, prompt in enumerate(prompts)
    ]
    found, all_of_one = ratio(system, other, renamed), ratio(system, other, prompts)
    assert found.value == all_of_one.value
    assert math.log(found.high / found.low) == pytest.approx(
        math.log(all_of_one.high / all_of_one.low), rel=0.25
    )


def test_a_system_over_itself_is_conclusive() -> None:
    system, _ = drawn(6, 2, 0.3, 0.1)
    found = ratio(system, system, prompts_of(3, 2))
    assert (found.value, found.low, found.high) == pytest.approx((1, 1, 1))
    assert found.is_conclusive


def test_a_drift_of_both_widens_nothing() -> None:
    system, other = drawn(12, 2, 0.1, 0, repeats=2)
    slower = [
        x.model_copy(update={"seconds": [x.seconds[0], [3 * y for y in x.seconds[1]]]})
        for x in (system, other)
    ]
    steady, drifting = (ratio(*pair, prompts_of(3, 4)) for pair in ((system, other), slower))
    assert drifting.low == pytest.approx(steady.low)
    assert drifting.high == pytest.approx(steady.high)


def test_one_prompt_a_task_is_resampled_over_tasks() -> None:
    system, other = drawn(6, 2, 0.1, 0)
    by_task, of_one = ratio(system, other, prompts_of(6, 1)), ratio(system, other, prompts_of(1, 6))
    assert (by_task.low, by_task.high) == (of_one.low, of_one.high)


def test_speed() -> None:
    system, other = drawn(480, 2, 0.3, 0.05)
    prompts = prompts_of(6, 80)
    cells = [None, *([6 * row + task for row in range(80)] for task in range(6)), None]
    began = time.process_time()
    for _ in range(10):
        for places in cells:
            ratio(system, other, prompts, places)
    # a second is what ten systems may take on a quiet core
    assert time.process_time() - began < 4


# What is conclusive, and what would be


def check(found: Any) -> None:
    """The documented rule, from the bounds alone."""
    has_side = found.low > 1 or found.high < 1
    is_one = max(found.high, 1 / found.low) <= (1 + ALIKE) * 1.0001
    assert found.is_conclusive == (has_side or is_one)


@pytest.mark.parametrize("speedup", [1.0, 1.02, 0.97, 1.1, 2.5])
@pytest.mark.parametrize("between", [0.01, 0.05, 0.1, 0.2, 0.5])
def test_rule(speedup: float, between: float) -> None:
    for seed in range(5):
        check(ratio(*drawn(24, speedup, between, 0.01, seed=seed), prompts_of(6, 4)))


SLIGHT = 1.25
"""A speedup that many questions are needed for, where they differ by half."""


def remedies(prompts: list[PromptReport], *drawing: Any, **more: Any) -> list[str]:
    """Of those of ten benchmarks that are not conclusive, which are most."""
    found = [
        ratio(*drawn(len(prompts), *drawing, seed=seed, **more), prompts) for seed in range(10)
    ]
    texts = [interval.remedy for interval in found if interval.remedy is not None]
    assert len(texts) > 5
    return texts


def share_conclusive(size: int, *drawing: Any) -> float:
    found = [
        ratio(*drawn(6 * size, *drawing, seed=seed), prompts_of(6, size)) for seed in range(10, 50)
    ]
    return float(np.mean([interval.is_conclusive for interval in found]))


def test_more_prompts_where_prompts_differ() -> None:
    texts = remedies(prompts_of(6, 4), SLIGHT, 0.5, 0.02)
    numbers = [int(text.split()[1]) for text in texts]
    assert texts == [f"about {number} prompts a task instead of 4" for number in numbers]
    number = int(np.median(numbers))
    assert 0.1 < share_conclusive(number, SLIGHT, 0.5, 0.02) < 0.95
    assert share_conclusive(4 * number, SLIGHT, 0.5, 0.02) > 0.9
    assert share_conclusive(number // 4, SLIGHT, 0.5, 0.02) < 0.4


def test_prompts_a_task_are_those_of_the_benchmark() -> None:
    """Of a part of the prompts, too: the benchmark is asked for prompts a task."""
    prompts = prompts_of(6, 6)
    grouped = [
        prompt.model_copy(update={"group": "new topics" if place % 3 == 0 else ""})
        for place, prompt in enumerate(prompts)
    ]
    part = [place for place, prompt in enumerate(grouped) if prompt.group]
    pair = drawn(36, SLIGHT, 0.7, 0.02)
    texts = [ratio(*pair, grouped, places).remedy for places in (None, part)]
    numbers = [int(str(text).split()[1]) for text in texts]
    assert all(str(text).endswith(" prompts a task instead of 6") for text in texts)
    assert min(numbers) > 6


def test_quiet_cores_or_repeats_where_repeats_differ() -> None:
    texts = remedies(prompts_of(6, 4), 1.1, 0.01, 0.4)
    either = [text for text in texts if text.startswith("quiet cores, or about ")]
    assert len(either) > 5
    numbers = [int(text.split()[4]) for text in either]
    assert either == [f"quiet cores, or about {number} repeats instead of 2" for number in numbers]
    number = int(np.median(numbers))
    assert 0.3 < share_conclusive(4, 1.1, 0.01, 0.4, number) < 0.95
    assert share_conclusive(4, 1.1, 0.01, 0.4, 2 * number) > 0.9


def test_both_where_quiet_cores_do_not_suffice() -> None:
    texts = remedies(prompts_of(1, 8), SLIGHT, 0.3, 0.5)
    assert any(text.startswith("quiet cores, and about ") for text in texts)


def test_repeats_of_sampled_answers_need_no_quiet_cores() -> None:
    system, other = drawn(24, 1.1, 0.01, 0.4, seed=1)
    lengths_of_second = np.random.default_rng(1).permutation(system.num_tokens[1]).tolist()
    sampled = [
        answered.model_copy(
            update={
                "num_tokens": [answered.num_tokens[0], lengths_of_second],
                "seconds": [
                    answered.seconds[0],
                    [
                        seconds * new / old
                        for seconds, new, old in zip(
                            answered.seconds[1],
                            lengths_of_second,
                            answered.num_tokens[1],
                            strict=True,
                        )
                    ],
                ],
            }
        )
        for answered in (system, other)
    ]
    text = ratio(*sampled, prompts_of(6, 4)).remedy
    assert text is not None
    assert text.startswith("about ")
    assert text.endswith(" repeats instead of 2")


def test_one_repeat_does_not_tell_noise() -> None:
    for text in remedies(prompts_of(6, 4), SLIGHT, 0.5, 0.02, repeats=1):
        assert text.endswith("and two repeats or more, which show the noise of the machine")


def test_a_single_question_has_no_interval() -> None:
    system, other = drawn(2, 2, 0.1, 0.1)
    found = ratio(system, other, prompts_of(1, 1, turns=2))
    assert found.low == found.value == found.high
    assert found.remedy == (
        "a single question has no interval: answer two or more questions of each task"
    )


@pytest.mark.parametrize(("between", "noise"), [(0.1, 0.05), (0.1, 0.2), (0.0, 0.1), (0.2, 0.0)])
def test_share_of_noise(between: float, noise: float) -> None:
    """Against the variances that answers were drawn with, of a speedup of many questions."""
    repeats = 3
    system, other = drawn(2000, 2, between, noise, repeats)
    totals = np.stack([system.num_tokens, system.seconds, other.num_tokens, other.seconds], axis=-1)
    found = estimate(totals.sum(0), POWERS, ["task"] * 2000)
    share = noise_share(totals, range(repeats), found)
    expected = (2 * noise**2 / repeats) / (2 * noise**2 / repeats + between**2)
    assert share == pytest.approx(expected, abs=0.08)
    assert noise_share(totals, [0], found) is None


# Accepted lengths and quantiles


def test_lengths() -> None:
    gained = [[[1, 2, 3], [4]], [[1, 2, 3]]]
    found = lengths(gained, prompts_of(1, 2))
    assert found is not None
    assert found.counts == [0, 2, 2, 2, 1]
    assert found.mean == pytest.approx(16 / 7)
    assert found.variance == pytest.approx(np.var([1, 2, 3, 4, 1, 2, 3]))
    assert found.low < found.mean < found.high
    part = lengths(gained, prompts_of(1, 2), places=[1])
    assert part is not None
    assert (part.counts, part.low, part.high) == ([0, 0, 0, 0, 1], 4, 4)
    assert lengths([[[], []]], prompts_of(1, 2)) is None


def test_interval_of_a_mean_length() -> None:
    """Questions of equally many passes: the mean of the questions' means, as textbooks bound it."""
    numbers = np.random.default_rng(0)
    gained = [[numbers.integers(1, 6, 50).tolist() for _ in range(20)]]
    found = lengths(gained, prompts_of(1, 20))
    means = np.mean(gained[0], axis=1)
    half = 2.093 * means.std(ddof=1) / math.sqrt(20)
    assert found is not None
    assert found.low == pytest.approx(means.mean() - half, rel=0.01)
    assert found.high == pytest.approx(means.mean() + half, rel=0.01)


def test_quantiles() -> None:
    found = quantiles([5, 1, 3, 2, 4])
    assert (found.median, found.p95) == (3, pytest.approx(4.8))
    assert quantiles([7]).p95 == 7
