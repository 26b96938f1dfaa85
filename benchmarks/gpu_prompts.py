"""Prompts of about a given length, of real questions."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from systems import read_prompts

from polybasic.deploy import Chain

PROMPTS_PER_TASK = 64
"""Read of a question file; far more than are asked, to choose from and to fill contexts with."""


def prompts_of_lengths(
    chain: Chain, path: Path | None, lengths: Sequence[int], num: int, max_new_tokens: int
) -> dict[int, list[list[int]]]:
    """For each length so many prompts of about as many tokens.

    Short prompts are questions as they are, those whose lengths are nearest. Where the questions
    are all much shorter, other ones stand before each, one after the other, and the first of them
    is cut; then the length is exact.

    Args:
        path: Spec-Bench's question format; None for embedded prompts that were held out.

    Raises:
        UserError: a malformed file, or no prompt that fits the context.
    """
    questions = read_prompts(chain, path, PROMPTS_PER_TASK, max_new_tokens)
    return {length: _of_length(questions, length, num) for length in lengths}


def _of_length(questions: Sequence[list[int]], length: int, num: int) -> list[list[int]]:
    nearest = sorted(questions, key=lambda question: abs(len(question) - length))[:num]
    if all(4 * len(question) >= 3 * length for question in nearest):
        return nearest
    last = sorted(questions, key=lambda question: len(question) > length)[:num]
    return [_filled(questions, number, question, length) for number, question in enumerate(last)]


def _filled(questions: Sequence[list[int]], number: int, last: list[int], length: int) -> list[int]:
    """Other questions, from another one on for each number, and `last` behind them."""
    needed = length - len(last)
    before: list[int] = []
    for place in count(number * len(questions) // 3 + 1):
        if len(before) >= needed:
            break
        before += questions[place % len(questions)]
    return [*before[len(before) - needed :], *last]
