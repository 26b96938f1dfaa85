"""Answers of a system as numbers: of each, and in total over tasks and groups of prompts."""

from collections.abc import Callable, Mapping, Sequence

from polybasic.deploy.bench.bench import Bench
from polybasic.deploy.bench.intervals import lengths, quantiles, ratio
from polybasic.deploy.bench.journal import JournalEntry
from polybasic.deploy.bench.schema import Answers, Lengths, Totals
from polybasic.deploy.bench.systems.system import System
from polybasic.deploy.runtime.request import Statistics


def answers_of(bench: Bench, system: System) -> Answers:
    """The figures of each answer."""
    repeats = bench.of(system)

    def each(number: Callable[[JournalEntry], float]) -> list[list[float]]:
        return [[number(taken) for taken in repeat] for repeat in repeats]

    everything = [taken for repeat in repeats for taken in repeat]
    is_own = all(taken.answer.statistics is not None for taken in everything)
    decode = bench.chain.tokenizer.decode
    lengths: dict[str, list[list[list[int]]]] = {}
    for repeat in repeats if is_own else ():
        by_answer = [statistics_of(taken).accepted_lengths for taken in repeat]
        for name in dict.fromkeys(name for gained in by_answer for name in gained):
            lengths.setdefault(name, []).append([gained.get(name, []) for gained in by_answer])
    return Answers(
        num_tokens=each(lambda taken: len(taken.answer.token_ids)),
        seconds=each(lambda taken: taken.answer.seconds),
        num_first=each(lambda taken: taken.answer.num_first),
        first_seconds=each(lambda taken: taken.answer.first_seconds),
        joules=each(lambda taken: taken.joules or 0.0)
        if all(taken.joules is not None for taken in everything)
        else None,
        passes=each(lambda taken: len(next(iter(statistics_of(taken).accepted_lengths.values()))))
        if is_own
        else None,
        token_ids=[[taken.answer.token_ids for taken in repeat] for repeat in repeats],
        texts=[
            [decode(taken.answer.token_ids, skip_special_tokens=True) for taken in repeat]
            for repeat in repeats
        ],
        accepted_lengths=lengths if is_own else None,
    )


def places_by(bench: Bench, key: str) -> dict[str, list[int]]:
    """Places of prompts that were answered, by task or group, in the prompts' order."""
    groups: dict[str, list[int]] = {}
    for place, prompt in enumerate(bench.described):
        if (0, place) in bench.turns:
            groups.setdefault(getattr(prompt, key), []).append(place)
    return groups


def totals_of(
    bench: Bench, system: System, answers: Mapping[str, Answers], places: Sequence[int]
) -> Totals:
    """Of the prompts at some places, one of which was answered.

    Args:
        answers: of all systems.
    """
    answered = [taken for of_place in bench.at(system, places) for taken in of_place]
    timed = [taken.answer for taken in answered]
    tokens, seconds = (
        sum(len(answer.token_ids) for answer in timed),
        sum(answer.seconds for answer in timed),
    )
    later = [
        (len(answer.token_ids) - answer.num_first, answer.seconds - answer.first_seconds)
        for answer in timed
        if len(answer.token_ids) > answer.num_first
    ]
    joules = [taken.joules for taken in answered if taken.joules is not None]
    own, target, library = answers[system.name], answers["target"], answers.get("hf_generate")
    prompts, statistics = bench.described, timed[0].statistics
    verifying = None if statistics is None else next(iter(statistics.accepted_lengths))
    return Totals(
        num_answers=len(answered),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        decode_tokens_per_second=sum(num for num, _ in later)
        / sum(duration for _, duration in later)
        if later
        else None,
        first_token_seconds=quantiles([answer.first_seconds for answer in timed]),
        seconds_per_token=quantiles([duration / num for num, duration in later]) if later else None,
        speedup=ratio(own, target, prompts, places),
        decode_speedup=ratio(own, target, prompts, places, decode=True),
        over_hf=None if library is None else ratio(own, library, prompts, places),
        accepted_length=None if verifying is None else lengths_of(bench, system, verifying, places),
        joules_per_token=sum(joules) / tokens if len(joules) == len(answered) else None,
    )


def lengths_of(
    bench: Bench, system: System, verifying: str, places: Sequence[int]
) -> Lengths | None:
    """Tokens gained by the passes of a member; None where it made none."""
    gained = [
        [statistics_of(taken).accepted_lengths.get(verifying, []) for taken in repeat]
        for repeat in bench.of(system)
    ]
    return lengths(gained, bench.described, places)


def statistics_of(taken: JournalEntry) -> Statistics:
    """Of an answer of this runtime."""
    statistics = taken.answer.statistics
    assert statistics is not None, "an answer of another runtime"
    return statistics
