"""Answers of a system as numbers: of each, and in total over tasks and groups of prompts."""

from collections.abc import Callable, Mapping, Sequence

from polybasic.deploy.bench.bench import Bench
from polybasic.deploy.bench.intervals import lengths, quantiles, ratio
from polybasic.deploy.bench.journal import Taken
from polybasic.deploy.bench.schema import Answers, Lengths, Totals
from polybasic.deploy.bench.system import System
from polybasic.deploy.request import Statistics


def answers_of(bench: Bench, system: System) -> Answers:
    """The figures of each answer."""
    taken = bench.of(system)

    def each(number: Callable[[Taken], float]) -> list[list[float]]:
        return [[number(one) for one in repeat] for repeat in taken]

    everything = [one for repeat in taken for one in repeat]
    is_own = all(one.answer.statistics is not None for one in everything)
    decode = bench.chain.tokenizer.decode
    lengths: dict[str, list[list[list[int]]]] = {}
    for repeat in taken if is_own else ():
        for name in statistics_of(repeat[0]).accepted_lengths if repeat else ():
            of_repeat = [statistics_of(one).accepted_lengths[name] for one in repeat]
            lengths.setdefault(name, []).append(of_repeat)
    return Answers(
        num_tokens=each(lambda one: len(one.answer.token_ids)),
        seconds=each(lambda one: one.answer.seconds),
        num_first=each(lambda one: one.answer.num_first),
        first_seconds=each(lambda one: one.answer.first_seconds),
        joules=each(lambda one: one.joules or 0.0)
        if all(one.joules is not None for one in everything)
        else None,
        passes=each(lambda one: len(next(iter(statistics_of(one).accepted_lengths.values()))))
        if is_own
        else None,
        token_ids=[[one.answer.token_ids for one in repeat] for repeat in taken],
        texts=[
            [decode(one.answer.token_ids, skip_special_tokens=True) for one in repeat]
            for repeat in taken
        ],
        accepted_lengths=lengths if is_own else None,
    )


def places_by(bench: Bench, key: str) -> dict[str, list[int]]:
    """Places of prompts that were answered, by task or group, in the prompts' order."""
    found: dict[str, list[int]] = {}
    for place, prompt in enumerate(bench.described):
        if (0, place) in bench.turns:
            found.setdefault(getattr(prompt, key), []).append(place)
    return found


def totals_of(
    bench: Bench, system: System, answers: Mapping[str, Answers], places: Sequence[int]
) -> Totals:
    """Of the prompts at some places, one of which was answered.

    Args:
        answers: of all systems.
    """
    found = [one for of_place in bench.at(system, places) for one in of_place]
    timed = [one.answer for one in found]
    tokens, seconds = sum(len(one.token_ids) for one in timed), sum(one.seconds for one in timed)
    later = [
        (len(one.token_ids) - one.num_first, one.seconds - one.first_seconds)
        for one in timed
        if len(one.token_ids) > one.num_first
    ]
    joules = [one.joules for one in found if one.joules is not None]
    own, target, library = answers[system.name], answers["target"], answers.get("hf_generate")
    prompts, statistics = bench.described, timed[0].statistics
    verifying = None if statistics is None else next(iter(statistics.accepted_lengths))
    return Totals(
        num_answers=len(found),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        decode_tokens_per_second=sum(num for num, _ in later) / sum(taken for _, taken in later)
        if later
        else None,
        first_token_seconds=quantiles([one.first_seconds for one in timed]),
        seconds_per_token=quantiles([taken / num for num, taken in later]) if later else None,
        speedup=ratio(own, target, prompts, places),
        decode_speedup=ratio(own, target, prompts, places, decode=True),
        over_hf=None if library is None else ratio(own, library, prompts, places),
        accepted_length=None if verifying is None else lengths_of(bench, system, verifying, places),
        joules_per_token=sum(joules) / tokens if len(joules) == len(found) else None,
    )


def lengths_of(
    bench: Bench, system: System, verifying: str, places: Sequence[int]
) -> Lengths | None:
    """Tokens gained by the passes of a member; None where it made none."""
    gained = [
        [statistics_of(one).accepted_lengths.get(verifying, []) for one in repeat]
        for repeat in bench.of(system)
    ]
    return lengths(gained, bench.described, places)


def statistics_of(taken: Taken) -> Statistics:
    """Of an answer of this runtime."""
    found = taken.answer.statistics
    assert found is not None, "an answer of another runtime"
    return found
