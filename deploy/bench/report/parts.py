"""What a report for people consists of, however it is shown: sections of text, tables and plots."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from polybasic.chain.base.tables import Table
from polybasic.deploy.bench.schema import Quantiles, Ratio

NOT_KNOWN = "-"


@dataclass(frozen=True)
class Figure:
    """A plot.

    Attributes:
        name: of its function in `plots`.
        title: what it shows.
        caption: how to read it.
    """

    name: str
    title: str
    caption: str


@dataclass(frozen=True)
class Section:
    """Of a report.

    Attributes:
        parts: a string is a paragraph.
        is_summary: whether a terminal shows it too.
    """

    title: str
    parts: list[str | Table | Figure]
    is_summary: bool = False


def shown_times(factor: float) -> str:
    """In three digits: "23.8", "2.14", "0.093"."""
    digits = 0 if factor >= 99.95 else 1 if factor >= 9.995 else 2 if factor >= 0.0995 else 3
    return f"{factor:.{digits}f}"


def shown_interval(ratio: Ratio) -> str:
    """As "2.05–2.23", or the value where there is no interval."""
    if ratio.low == ratio.high:
        return shown_times(ratio.value)
    return f"{shown_times(ratio.low)}–{shown_times(ratio.high)}"


def shown_ratio(ratio: Ratio | None) -> str:
    """As "2.14x (2.05–2.23)": the value, and its interval where it has one."""
    if ratio is None or ratio.low == ratio.high:
        return shown_value(ratio)
    return shown_value(ratio, f" ({shown_interval(ratio)})")


def shown_value(ratio: Ratio | None, more: str = "") -> str:
    """As "2.14x", with `more` behind it; whether it is not conclusive stands below."""
    if ratio is None:
        return NOT_KNOWN
    shown = f"{shown_times(ratio.value)}x{more}"
    return shown if ratio.is_conclusive else f"{shown}\nnot conclusive"


ITSELF = Ratio(value=1.0, low=1.0, high=1.0)
"""Of a baseline over itself."""

_NEEDED = re.compile(r"about (\d+)")
"""In a remedy: how much is needed."""

Named = Mapping[tuple[str, str], Ratio | None]
"""Ratios by what they are of: a system, and the kind of prompts, "" for all."""


def not_conclusive(ratios: Named) -> tuple[str, ...]:
    """A sentence for each kind of remedy of the ratios that need one."""
    lacking = {
        name: ratio.remedy
        for name, ratio in ratios.items()
        if ratio is not None and ratio.remedy is not None
    }
    compared = [ratio for ratio in ratios.values() if ratio is not None and ratio != ITSELF]
    by_kind: dict[str, dict[tuple[str, str], str]] = {}
    for name, remedy in lacking.items():
        by_kind.setdefault(_NEEDED.sub("about {}", remedy), {})[name] = remedy
    if len(by_kind) == 1 and len(lacking) == len(compared) > 1:
        return (f"No ratio is conclusive. What would help: {_together([*lacking.values()])}.",)
    return tuple(
        f"Not conclusive: {_named(names)}. What would help: {_together([*names.values()])}."
        for names in by_kind.values()
    )


def _named(names: Iterable[tuple[str, str]]) -> str:
    """Systems and kinds of prompts, as "eagle2 in qa, rag; ngram"."""
    kinds_by_system: dict[str, list[str]] = {}
    for system, kind in names:
        kinds_by_system.setdefault(system, []).append(kind)
    systems_by_kinds: dict[str, list[str]] = {}
    for system, kinds in kinds_by_system.items():
        where = "" if kinds == [""] else f" in {', '.join(kind or 'all' for kind in kinds)}"
        systems_by_kinds.setdefault(where, []).append(system)
    return "; ".join(f"{', '.join(all_)}{where}" for where, all_ in systems_by_kinds.items())


def _together(remedies: Sequence[str]) -> str:
    """Remedies that differ in what is needed of a thing, as one: "about 8 to 93 prompts"."""
    needed = [int(match[1]) for remedy in remedies if (match := _NEEDED.search(remedy))]
    if not needed or min(needed) == max(needed):
        return remedies[0]
    return _NEEDED.sub(f"about {min(needed)} to {max(needed)}", remedies[0])


def shown_rate(per_second: float) -> str:
    """Tokens per second, in three digits or more."""
    return f"{per_second:.3g}" if per_second < 99.5 else f"{per_second:.0f}"


def shown_milliseconds(seconds: float | None, digits: int = 2) -> str:
    """Of seconds, without the unit."""
    return NOT_KNOWN if seconds is None else f"{1e3 * seconds:.{digits}f}"


def shown_quantiles(quantiles: Quantiles | None) -> str:
    """Median and 95th percentile in milliseconds, as "1.41 / 2.03"."""
    if quantiles is None:
        return NOT_KNOWN
    return " / ".join(map(shown_milliseconds, (quantiles.median, quantiles.p95)))


def shown_number(number: float | None, form: str = ".2f") -> str:
    """In a format, or that it is not known."""
    return NOT_KNOWN if number is None else format(number, form)


def shown_share(share: float, digits: int = 1) -> str:
    """0.125 -> "12.5%"."""
    return f"{100 * share:.{digits}f}%"
