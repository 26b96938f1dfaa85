"""A run's figures against those of a record: slower, faster, or the same within the noise."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table

LEAST_CHANGE = 0.05
"""Smaller changes of a median are never called any."""
LEAST_MILLISECONDS = 0.05
"""Smaller changes of a time neither: what takes no time may double. Shorter times are not shown."""

Verdict = Literal["slower", "faster", ""]


@dataclass(frozen=True)
class Figure:
    """One measured thing.

    Attributes:
        is_time: milliseconds, of which fewer are better; else a factor, of which more are.
        turns: the figure of each turn; how far they lie apart is its noise.
        depends_on_weights: on what the models answer, not on their shapes alone.
    """

    median: float
    turns: tuple[float, ...]
    is_time: bool = True
    depends_on_weights: bool = False

    @classmethod
    def read(
        cls, spread: Mapping[str, Any], is_time: bool = True, depends_on_weights: bool = False
    ) -> "Figure":
        """Of a spread in a record."""
        return cls(spread["median"], tuple(spread["turns"]), is_time, depends_on_weights)

    def times(self, factor: float) -> "Figure":
        """Scaled."""
        turns = tuple(factor * one for one in self.turns)
        return Figure(factor * self.median, turns, self.is_time, self.depends_on_weights)


@dataclass(frozen=True)
class Change:
    """A figure of the record and of now.

    Attributes:
        ratio: now over then.
        related: the ratio of times in relation to the bandwidth of memory in each run; None for
            factors, which need no relation.
    """

    name: str
    then: Figure
    now: Figure
    ratio: float
    related: float | None
    verdict: Verdict


def figures(content: Mapping[str, Any]) -> dict[str, Figure]:
    """All that is compared of a record of benchmarks/bench.py, by name."""
    found: dict[str, Figure] = {}
    for member, by_rows in content["passes"].items():
        for rows, cost in by_rows.items():
            found[f"pass {member}, {rows} rows"] = Figure.read(cost["milliseconds"])
    for drafter, by_shape in content["drafts"].items():
        for shape, cost in by_shape.items():
            found[f"draft {drafter}, {shape}"] = Figure.read(cost["milliseconds"])
    for system, one in content["rounds"]["systems"].items():
        for operation, cost in one["operations"].items():
            name = f"round {system}, {operation}"
            found[name] = Figure.read(cost["milliseconds_per_round"], depends_on_weights=True)
    for system, one in content["end_to_end"]["checkouts"]["here"].items():
        name = f"token {system}"
        found[name] = Figure.read(one["milliseconds_per_token"], depends_on_weights=True)
        if system != "target" and "speedup_vs_target" in one:
            found[f"speedup {system}"] = Figure.read(one["speedup_vs_target"], False, True)
        lengths = one["tokens_per_target_pass"]
        found[f"tokens a pass {system}"] = Figure(lengths, (lengths,), False, True)
    return found


def compare(
    then: Mapping[str, Any], now: Mapping[str, Any], has_same_weights: bool = True
) -> list[Change]:
    """What changed from one record of benchmarks/bench.py to another, name by name.

    A figure is slower or faster where its median moved by more than `LEAST_CHANGE` and the turns
    of the two runs do not overlap. Times must have done so both as they are and in relation to the
    bandwidth of memory that their run measured: a slow hour of a shared machine makes nothing
    slower, and neither does a fast one that only the bandwidth has seen.

    Args:
        has_same_weights: else what depends on answers is shown and not judged.
    """
    known = figures(then)
    speed = now["bandwidth"]["read"]["median"] / then["bandwidth"]["read"]["median"]
    changes = []
    for name, figure in figures(now).items():
        if name not in known:
            continue
        is_judged = has_same_weights or not figure.depends_on_weights
        changes.append(_change(name, known[name], figure, speed, is_judged))
    return changes


def _change(name: str, then: Figure, now: Figure, speed: float, is_judged: bool) -> Change:
    ratio = now.median / then.median if then.median else 1.0
    if not is_judged:
        return Change(name, then, now, ratio, ratio * speed if now.is_time else None, "")
    verdict = _verdict(then, now)
    if not now.is_time:
        return Change(name, then, now, ratio, None, verdict)
    if _verdict(then, now.times(speed)) != verdict:
        verdict = ""
    return Change(name, then, now, ratio, ratio * speed, verdict)


def _verdict(then: Figure, now: Figure) -> Verdict:
    if now.is_time and abs(now.median - then.median) < LEAST_MILLISECONDS:
        return ""
    if now.median > then.median * (1 + LEAST_CHANGE) and min(now.turns) > max(then.turns):
        return "slower" if now.is_time else "faster"
    if now.median < then.median / (1 + LEAST_CHANGE) and max(now.turns) < min(then.turns):
        return "faster" if now.is_time else "slower"
    return ""


def table_of(changes: list[Change]) -> Table:
    """All figures but times next to nothing; the changed ones say so."""
    table = Table(title="against the record", title_justify="left")
    table.add_column("figure", no_wrap=True)
    for column in ("record", "its turns", "now", "its turns", "now/record", "by bandwidth"):
        table.add_column(column, justify="right")
    table.add_column("")
    for change in changes:
        if change.now.is_time and max(change.then.median, change.now.median) < LEAST_MILLISECONDS:
            continue
        table.add_row(
            change.name,
            *_shown(change.then),
            *_shown(change.now),
            f"{change.ratio:.2f}",
            "" if change.related is None else f"{change.related:.2f}",
            change.verdict,
            style={"slower": "red", "faster": "green", "": None}[change.verdict],
        )
    return table


def _shown(figure: Figure) -> tuple[str, str]:
    unit = " ms" if figure.is_time else "x"
    return f"{figure.median:.3f}{unit}", f"{min(figure.turns):.3f} to {max(figure.turns):.3f}"
