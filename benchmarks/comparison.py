"""A run's figures against those of a record: slower, faster, or the same within the noise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from command import ScriptReport
from measuring import Spread

LEAST_CHANGE = 0.05
"""Smaller changes of a median are never called any."""
LEAST_MILLISECONDS = 0.05
"""Smaller changes of a time neither: what takes no time may double. Shorter times are not shown."""

Verdict = Literal["slower", "faster", ""]


@dataclass(frozen=True)
class ComparedFigure:
    """One measured thing.

    Attributes:
        turns: the figure of each turn; how far they lie apart is its noise.
    """

    median: float
    turns: tuple[float, ...]

    @classmethod
    def of(cls, spread: Spread) -> "ComparedFigure":
        return cls(spread.median, spread.turns)

    @classmethod
    def from_json(cls, numbers: Sequence[float]) -> "ComparedFigure":
        return cls(numbers[0], tuple(numbers[1:]))

    def to_json(self) -> list[float]:
        """As a record holds it: the median, then the turns, in five digits."""
        return [float(f"{number:.5g}") for number in (self.median, *self.turns)]

    def times(self, factor: float) -> "ComparedFigure":
        """Scaled."""
        return ComparedFigure(factor * self.median, tuple(factor * turn for turn in self.turns))


def is_time(name: str) -> bool:
    """Whether a figure is in milliseconds, of which fewer are better; else a factor."""
    return not name.startswith(("speedup", "tokens a pass"))


def depends_on_weights(name: str) -> bool:
    """Whether a figure depends on what the models answer, not on their shapes alone."""
    return not name.startswith(("pass", "draft"))


@dataclass(frozen=True)
class Change:
    """A figure of the record and of now.

    Attributes:
        ratio: now over then.
        related: the ratio of times in relation to the bandwidth of memory in each run; None for
            factors, which need no relation.
    """

    name: str
    then: ComparedFigure
    now: ComparedFigure
    ratio: float
    related: float | None
    verdict: Verdict


def compare(
    then: Mapping[str, ComparedFigure],
    now: Mapping[str, ComparedFigure],
    speed: float,
    has_same_weights: bool = True,
) -> list[Change]:
    """What changed from one run of benchmarks/bench.py to another, name by name.

    A figure is slower or faster where its median moved by more than `LEAST_CHANGE` and the turns
    of the two runs do not overlap. Times must have done so both as they are and in relation to the
    bandwidth of memory that their run measured: a slow hour of a shared machine makes nothing
    slower, and neither does a fast one that only the bandwidth has seen.

    Args:
        speed: the bandwidth now over that of then.
        has_same_weights: else what depends on answers is shown and not judged.
    """
    return [
        _change(name, then[name], now[name], speed, has_same_weights)
        for name in now
        if name in then
    ]


def _change(
    name: str, then: ComparedFigure, now: ComparedFigure, speed: float, has_same_weights: bool
) -> Change:
    ratio = now.median / then.median if then.median else 1.0
    related = ratio * speed if is_time(name) else None
    verdict: Verdict = ""
    if has_same_weights or not depends_on_weights(name):
        verdict = _verdict(name, then, now)
        if related is not None and _verdict(name, then, now.times(speed)) != verdict:
            verdict = ""
    return Change(name, then, now, ratio, related, verdict)


def _verdict(name: str, then: ComparedFigure, now: ComparedFigure) -> Verdict:
    if is_time(name) and abs(now.median - then.median) < LEAST_MILLISECONDS:
        return ""
    if now.median > then.median * (1 + LEAST_CHANGE) and min(now.turns) > max(then.turns):
        return "slower" if is_time(name) else "faster"
    if now.median < then.median / (1 + LEAST_CHANGE) and max(now.turns) < min(then.turns):
        return "faster" if is_time(name) else "slower"
    return ""


def report_changes(report: ScriptReport, changes: Sequence[Change]) -> None:
    """All figures but times next to nothing; the changed ones say so."""
    rows = []
    for change in changes:
        if is_time(change.name) and max(change.then.median, change.now.median) < LEAST_MILLISECONDS:
            continue
        related = "" if change.related is None else f"{change.related:.2f}"
        figures = [*_shown(change.name, change.then), *_shown(change.name, change.now)]
        rows.append([change.name, *figures, f"{change.ratio:.2f}", related, change.verdict])
    columns = ["figure", "record", "its turns", "now", "its turns", "now/record", "by bandwidth"]
    report.table("Against the record", [*columns, "verdict"], rows)


def _shown(name: str, figure: ComparedFigure) -> tuple[str, str]:
    unit = " ms" if is_time(name) else "x"
    return f"{figure.median:.3f}{unit}", f"{min(figure.turns):.3f} to {max(figure.turns):.3f}"
