"""What changed between two reports: of two chains, machines or commits."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from polybasic.deploy.bench.bootstrap import Array, Estimate, estimate
from polybasic.deploy.bench.differences import Difference, differences, named, notes
from polybasic.deploy.bench.intervals import Questions
from polybasic.deploy.bench.schema import Agreement, Answers, LawCheck, Report, SystemReport

LEAST_SHARE = 0.5
"""Of the shorter report's prompts, that both must have if these alone are compared."""

_ROUNDING = 1e-9

Quantity = Literal["tokens", "seconds", "decode_tokens", "decode_seconds", "passes"]
_RATE: tuple[Quantity, ...] = ("tokens", "seconds")
_DECODE: tuple[Quantity, ...] = ("decode_tokens", "decode_seconds")
_LENGTH: tuple[Quantity, ...] = ("tokens", "passes")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NumberChange(_Part):
    """A number of two reports, over the prompts that are compared.

    Attributes:
        ratio: of `after` to `before`.
        low: lower end of its 95 % interval, by bootstrap over questions within their tasks; None
            where there is none.
        high: its upper end.
        is_seen: whether the interval leaves out 1 and the change is larger than what the machine's
            own speed changed by within either benchmark: of a rate always, of a speedup where a
            report warns of noise.
    """

    before: float
    after: float
    ratio: float
    low: float | None
    high: float | None
    is_seen: bool


class Exactness(_Part):
    """What a report says of one system's answers."""

    agreement: Agreement | None
    law: LawCheck | None


class SystemChange(_Part):
    """One system of both reports.

    Attributes:
        tokens_per_second: prefill included; None where one of them has given no token.
        decode_tokens_per_second: of the tokens after the first ones; None where there are none.
        speedup: over `target`, prefill included; None of `target` itself.
        decode_speedup: the same of the decode rates.
        accepted_length: tokens a pass of the target; None of a system of another runtime.
    """

    tokens_per_second: NumberChange | None
    decode_tokens_per_second: NumberChange | None
    speedup: NumberChange | None
    decode_speedup: NumberChange | None
    accepted_length: NumberChange | None
    before: Exactness
    after: Exactness


class Comparison(_Part):
    """What changed between two reports.

    Attributes:
        before: which report, in a line; `after` alike.
        differences: of chain, machine, versions, settings and systems, in this order.
        is_paired: whether the same prompts are compared, each with itself; else the prompts of the
            two reports are taken for independent samples of their tasks.
        num_prompts: compared, of the report before and of the one after.
        num_left_out: prompts that are not, of each.
        notes: what a reader must know before the numbers, a sentence each.
        systems: that both reports have.
        only_before: names of systems; `only_after` alike.
        memory_bytes: that stay, before and after: measured where both are, else as stated.
    """

    before: str
    after: str
    differences: list[Difference]
    is_paired: bool
    num_prompts: tuple[int, int]
    num_left_out: tuple[int, int]
    notes: list[str]
    systems: dict[str, SystemChange]
    only_before: list[str]
    only_after: list[str]
    memory_bytes: tuple[int, int] | None


def compare(before: Report, after: Report) -> Comparison:
    """Compare two reports, system by system.

    Prompts that both have are paired by their token ids, if they are at least half of the shorter
    report's; prompts that one of them lacks are then left out.
    """
    names = [name for name in before.systems if name in after.systems]
    sides = [_Side(report, names) for report in (before, after)]
    matched = _matched(*sides)
    is_paired = matched is not None
    if matched is not None:
        for side, places in zip(sides, matched, strict=True):
            side.places = places
    found = differences(before, after)
    return Comparison(
        before=named(before),
        after=named(after),
        differences=found,
        is_paired=is_paired,
        num_prompts=(len(sides[0].places), len(sides[1].places)),
        num_left_out=(sides[0].num_left_out, sides[1].num_left_out),
        notes=notes(before, after, found),
        systems={name: _system(name, sides[0], sides[1], is_paired) for name in names},
        only_before=[name for name in before.systems if name not in names],
        only_after=[name for name in after.systems if name not in names],
        memory_bytes=_memory(before.memory, after.memory),
    )


# Numbers


class _Side:
    """One of the two reports.

    Attributes:
        places: of the prompts that are compared, which all systems of both reports answered.
    """

    def __init__(self, report: Report, names: Iterable[str]) -> None:
        self.report = report
        answered = (
            max(map(len, report.systems[name].answers.num_tokens), default=0) for name in names
        )
        self.places = list(range(min(answered, default=0)))

    @property
    def num_left_out(self) -> int:
        """Prompts that are not compared."""
        return len(self.report.prompts) - len(self.places)

    def totals(self, name: str, quantities: Sequence[Quantity]) -> Array | None:
        """[P, len(quantities)] of each compared prompt, the mean of its answers.

        None where the system does not tell one of them.
        """
        columns = [_values(self.report.systems[name].answers, quantity) for quantity in quantities]
        if any(column is None for column in columns):
            return None
        return np.array(
            [
                [
                    np.mean([row[place] for row in column or [] if place < len(row)])
                    for column in columns
                ]
                for place in self.places
            ]
        )


def _values(answers: Answers, quantity: Quantity) -> list[list[float]] | None:
    """[repeat][prompt]."""
    if quantity == "passes":
        return answers.passes
    whole = answers.num_tokens, answers.seconds
    tokens, seconds = answers.after_first() if quantity.startswith("decode") else whole
    return tokens if quantity.endswith("tokens") else seconds


def _matched(before: "_Side", after: "_Side") -> tuple[list[int], list[int]] | None:
    """Places of equal prompts; None where they are too few."""
    where = {after.report.prompts[place].sha256: place for place in after.places}
    pairs = [
        (place, where[sha256])
        for place in before.places
        if (sha256 := before.report.prompts[place].sha256) in where
    ]
    if not pairs or len(pairs) < LEAST_SHARE * min(len(before.places), len(after.places)):
        return None
    return [place for place, _ in pairs], [place for _, place in pairs]


def _system(name: str, before: _Side, after: _Side, is_paired: bool) -> SystemChange:
    sides = (before, after)
    noises = [side.report.noise for side in sides]
    of_rates = max(noise.spread for noise in noises)
    of_speedups = of_rates if any(noise.warnings for noise in noises) else 0.0

    def change(
        quantities: tuple[Quantity, ...], over: bool, noise: float = 0.0
    ) -> NumberChange | None:
        names = [name, "target"] if over else [name]
        parts = [[side.totals(system_name, quantities) for system_name in names] for side in sides]
        return _change(parts, sides, is_paired, noise)

    is_target = name == "target" or any("target" not in side.report.systems for side in sides)
    return SystemChange(
        tokens_per_second=change(_RATE, over=False, noise=of_rates),
        decode_tokens_per_second=change(_DECODE, over=False, noise=of_rates),
        speedup=None if is_target else change(_RATE, over=True, noise=of_speedups),
        decode_speedup=None if is_target else change(_DECODE, over=True, noise=of_speedups),
        accepted_length=change(_LENGTH, over=False),
        before=_exactness(before.report.systems[name]),
        after=_exactness(after.report.systems[name]),
    )


def _change(
    parts: list[list[Array | None]], sides: Sequence[_Side], is_paired: bool, noise: float
) -> NumberChange | None:
    """Of a rate [side][system] or a ratio of rates; None where it is not told."""
    joined: list[Array] = []
    for systems in parts:
        told = [totals for totals in systems if totals is not None and (totals.sum(0) > 0).all()]
        if len(told) < len(systems):
            return None
        joined.append(np.concatenate(told, axis=1))
    powers = [1, -1, -1, 1][: joined[0].shape[1]]
    alone = [_estimate(totals, powers, side) for totals, side in zip(joined, sides, strict=True)]
    if is_paired:
        inverse = [-power for power in powers]
        both = np.concatenate([joined[1], joined[0]], axis=1)
        difference = _estimate(both, [*powers, *inverse], sides[0])
    else:
        difference = alone[1] - alone[0]
    low, high = (None, None) if difference.error is None else difference.bounds
    half = difference.half_width
    # equal rates may differ by units in the last place
    least = max(np.log1p(noise), _ROUNDING)
    return NumberChange(
        before=alone[0].value,
        after=alone[1].value,
        ratio=difference.value,
        low=low,
        high=high,
        is_seen=half is not None and abs(difference.log) > max(half, least),
    )


def _estimate(totals: Array, powers: Sequence[int], side: _Side) -> Estimate:
    """Of prompts [P, K], whose turns are added up to questions."""
    questions = Questions.of(side.report.prompts, side.places)
    summed = np.zeros((len(questions.tasks), totals.shape[1]))
    for place, row in zip(side.places, totals, strict=True):
        summed[questions.rows[place]] += row
    return estimate(summed, powers, questions.tasks)


def _exactness(system: SystemReport) -> Exactness:
    return Exactness(agreement=system.agreement, law=system.law)


def _memory(before: dict[str, Any], after: dict[str, Any]) -> tuple[int, int] | None:
    for source in ("measured", "stated"):
        earlier, later = before.get(source), after.get(source)
        if earlier is not None and later is not None:
            return earlier["staying_bytes"], later["staying_bytes"]
    return None
