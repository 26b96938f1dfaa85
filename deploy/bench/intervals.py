"""Ratios of two systems, accepted lengths and times, with intervals over the questions.

A ratio is conclusive if its 95 % interval is on one side of 1, so that it is known which system is
the faster one, or within 5 % of 1, so that they are known to be equally fast.

Else its remedy says what would make it so. The variance of a ratio has two parts. What the repeats
of one question differ by is noise of the machine, and falls with the number of repeats; the rest
lies between questions, and falls with their number only. Sampled answers differ between repeats
as well, which is no noise of the machine, and falls alike. An interval says nothing of what all
answers of one benchmark have in common, such as the clock of the machine that day: hence systems
that take turns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np

from polybasic.deploy.bench.bootstrap import Array, Estimate, estimate, student
from polybasic.deploy.bench.schema import (
    Answers,
    Lengths,
    PromptReport,
    Quantiles,
    Ratio,
)

ALIKE = 0.05
"""Systems whose ratio departs from 1 by less are equally fast."""

POWERS = (1, -1, -1, 1)
"""Of tokens and seconds of two systems, in the ratio of their rates."""


@overload
def ratio(
    numerator: Answers,
    denominator: Answers,
    prompts: Sequence[PromptReport],
    places: Sequence[int] | None = None,
    decode: Literal[False] = False,
) -> Ratio: ...


@overload
def ratio(
    numerator: Answers,
    denominator: Answers,
    prompts: Sequence[PromptReport],
    places: Sequence[int] | None = None,
    *,
    decode: Literal[True],
) -> Ratio | None: ...


def ratio(
    numerator: Answers,
    denominator: Answers,
    prompts: Sequence[PromptReport],
    places: Sequence[int] | None = None,
    decode: bool = False,
) -> Ratio | None:
    """How much faster one system is than another: total tokens over total seconds, of both.

    Answers that only one of them has given count for neither. Where there is a single question
    there is no interval: then both bounds are the value, which is not conclusive.

    Args:
        prompts: of both, in the order of their answers.
        places: of the prompts that count; None counts all.
        decode: whether only the tokens after the first ones count, and the time after these.

    Returns:
        None where the tokens that count are none: with `decode`, answers that came in one piece.

    Raises:
        ValueError: there is no answer that both have given, or none of the denominator's has a
            token.
    """
    chosen = list(range(len(prompts)) if places is None else places)
    answered = [
        [place for place in chosen if place < min(len(above), len(below))]
        for above, below in zip(numerator.num_tokens, denominator.num_tokens, strict=False)
    ]
    questions = Questions.of(prompts, chosen)
    totals = np.concatenate(
        [questions.totals(answers, answered, decode) for answers in (numerator, denominator)],
        axis=-1,
    )
    if decode and not (totals.sum((0, 1)) > 0).all():
        return None
    found = estimate(totals.sum(0), POWERS, questions.tasks)
    whole = [repeat for repeat, kept in enumerate(answered) if len(kept) == len(chosen)]
    return Ratio(
        value=found.value,
        low=found.bounds[0],
        high=found.bounds[1],
        remedy=remedy(
            found,
            len(questions.tasks),
            _questions_a_task(prompts),
            len(answered),
            noise_share(totals, whole, found),
            is_machine=_are_same(totals[whole]),
        ),
    )


def share(parts: Sequence[Sequence[tuple[int, int]]], prompts: Sequence[PromptReport]) -> Ratio:
    """Of all tokens, those that count.

    Args:
        parts: [repeat][prompt]: tokens that count, and all.
        prompts: in the order of the answers.
    """
    questions = Questions.of(prompts, range(len(prompts)))
    totals = np.zeros((len(questions.tasks), 2))
    for repeat in parts:
        for place, numbers in enumerate(repeat):
            totals[questions.rows[place]] += numbers
    found = estimate(totals, (1, -1), questions.tasks)
    low, high = found.share_bounds
    return Ratio(value=found.value, low=low, high=high)


def lengths(
    gained: Sequence[Sequence[Sequence[int]]],
    prompts: Sequence[PromptReport],
    places: Sequence[int] | None = None,
) -> Lengths | None:
    """Tokens gained by passes of a member.

    Args:
        gained: [repeat][prompt][pass]; a repeat that was interrupted has fewer prompts.
        prompts: in the order of the answers.
        places: of the prompts that count; None counts all.

    Returns:
        With both bounds the mean where there is a single question; None where there was no pass.
    """
    chosen = list(range(len(prompts)) if places is None else places)
    questions = Questions.of(prompts, chosen)
    totals = np.zeros((len(questions.tasks), 2))
    passes: list[int] = []
    for repeat in gained:
        for place in chosen:
            if place < len(repeat):
                totals[questions.rows[place]] += sum(repeat[place]), len(repeat[place])
                passes += repeat[place]
    if not passes:
        return None
    found = estimate(totals, (1, -1), questions.tasks)
    return Lengths(
        counts=np.bincount(passes).tolist(),
        mean=float(np.mean(passes)),
        low=found.bounds[0],
        high=found.bounds[1],
        variance=float(np.var(passes)),
    )


def quantiles(values: Sequence[float]) -> Quantiles:
    """Of at least one value; between values they are interpolated."""
    median, p95 = np.quantile(values, (0.5, 0.95))
    return Quantiles(median=float(median), p95=float(p95))


@dataclass(frozen=True)
class Questions:
    """What is resampled: the turns of a question stay together.

    Attributes:
        rows: of the question of each prompt, by the prompt's place.
        tasks: of each question, with its group of prompts.
    """

    rows: dict[int, int]
    tasks: list[tuple[str, str]]

    @classmethod
    def of(cls, prompts: Sequence[PromptReport], places: Sequence[int]) -> "Questions":
        names = {
            place: (prompts[place].group, prompts[place].task, prompts[place].question_id)
            for place in places
        }
        numbers = {name: row for row, name in enumerate(dict.fromkeys(names.values()))}
        rows = {place: numbers[name] for place, name in names.items()}
        return cls(rows, [name[:2] for name in numbers])

    def totals(
        self, answers: Answers, answered: Sequence[Sequence[int]], decode: bool = False
    ) -> Array:
        """Tokens and seconds [repeats, Q, 2] of each question.

        Args:
            answered: [repeat], places of the answers that count.
        """
        sums = np.zeros((len(answered), len(self.tasks), 2))
        whole = answers.num_tokens, answers.seconds
        tokens, seconds = answers.after_first() if decode else whole
        for repeat, places in enumerate(answered):
            for place in places:
                sums[repeat, self.rows[place]] += tokens[repeat][place], seconds[repeat][place]
        return sums


def noise_share(totals: Array, whole: Sequence[int], found: Estimate) -> float | None:
    """Which part of a ratio's variance lies between repeats, 0 to 1: noise of the machine.

    The linear part of the ratio's logarithm is taken of each question in each repeat; what is left
    of it without the means of question and repeat is noise.

    Args:
        totals: [repeats, Q, 4], tokens and seconds of both systems.
        whole: repeats that have all answers.

    Returns:
        None where there are not two whole repeats, or the variance is not known.
    """
    num_repeats, num_questions = totals.shape[:2]
    if len(whole) < 2 or num_questions < 2 or not found.error:
        return None
    parts = (totals / totals.sum((0, 1)) * POWERS).sum(-1)[list(whole)]
    left = parts - parts.mean(0) - parts.mean(1, keepdims=True) + parts.mean()
    variance = (left**2).sum() / ((num_questions - 1) * (len(whole) - 1))
    return min(1.0, float(variance) * num_questions * num_repeats / found.error**2)


def remedy(
    found: Estimate,
    num_questions: int,
    by_task: float,
    num_repeats: int,
    noise: float | None,
    is_machine: bool = True,
) -> str | None:
    """What would make a ratio conclusive, in a sentence; None where it is.

    Args:
        num_questions: that `found` is of.
        by_task: questions of each task in the whole benchmark, of which these may be a part.
        noise: share of the variance that lies between repeats; None if it is not known.
        is_machine: whether it is the machine's: the answers of all repeats are equally long.
    """
    if math.isinf(found.log):
        return "no answer has a token: see why"
    half = found.half_width
    if half is None:
        what = "a single question has no interval" if num_questions == 1 else "too few answers"
        return f"{what}: answer two or more questions of each task"
    wanted = _wanted_half_width(found.log)
    # bounds that are computed in another order may differ by a unit in the last place
    if half <= wanted * (1 + 1e-9):
        return None
    factor = _questions_wanted(found, wanted, num_questions) / num_questions
    more = f"about {_about(factor * by_task)} prompts a task instead of {_about(by_task)}"
    if noise is None:
        return f"{more}, and two repeats or more, which show the noise of the machine"
    if noise < 0.5:
        return more
    quiet = "quiet cores" if is_machine else "more repeats"
    # between questions there is a part that repeats do not narrow
    left = (wanted / half) ** 2 - (1 - noise)
    if left > 0:
        repeats = f"about {_about(num_repeats * noise / left)} repeats instead of {num_repeats}"
        return f"{quiet}, or {repeats}" if is_machine else repeats
    return f"{quiet}, and {more}"


def _are_same(totals: Array) -> bool:
    """Whether questions have as many tokens, of both systems, in each repeat [repeats, Q, 4]."""
    tokens = totals[..., ::2]
    return bool((tokens == tokens[:1]).all())


def _wanted_half_width(log: float) -> float:
    """Of the widest interval of a ratio's logarithm from which can be concluded."""
    return max(abs(log), math.log1p(ALIKE) - abs(log))


def _questions_a_task(prompts: Sequence[PromptReport]) -> float:
    """Their mean; groups of prompts have tasks in common."""
    questions = {(prompt.group, prompt.task, prompt.question_id) for prompt in prompts}
    return len(questions) / len({prompt.task for prompt in prompts})


def _questions_wanted(found: Estimate, wanted: float, num: int) -> float:
    """How many: the error falls with their root, and Student's factor with them."""
    assert found.error is not None
    needed = float(num)
    for _ in range(20):
        freedom = max(math.ceil(needed) - num + found.freedom, found.freedom)
        needed = num * (student(freedom) * found.error / wanted) ** 2
    return needed


def _about(number: float) -> int:
    """Rounded up to two digits."""
    unit = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return unit * math.ceil(number / unit)
