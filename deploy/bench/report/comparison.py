"""A comparison of two reports in a terminal."""

from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console

from polybasic.chain.base.readable import readable_bytes
from polybasic.chain.base.tables import Table, print_table
from polybasic.deploy.bench.comparing import Comparison, NumberChange, SystemChange
from polybasic.deploy.bench.report.lines import UNLIKELY
from polybasic.deploy.bench.report.parts import NOT_KNOWN
from polybasic.deploy.bench.schema import Agreement


class _Figure(NamedTuple):
    """What is compared of each system, and the words for more and less of it."""

    title: str
    unit: str
    of: Callable[[SystemChange], NumberChange | None]
    more: str
    less: str
    notes: tuple[str, ...] = ()


_FIGURES = (
    _Figure("Speedup over target", "x", lambda system: system.speedup, "higher", "lower"),
    _Figure(
        "Tokens/s",
        "",
        lambda system: system.tokens_per_second,
        "faster",
        "slower",
        ("Tokens/s also tell how fast the machine was each time; speedups hardly do.",),
    ),
    _Figure(
        "Tokens/pass of the target", "", lambda system: system.accepted_length, "more", "fewer"
    ),
)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print what differs, what is compared, and what changed, in tables that fit the console."""
    for when, report in (("Before", comparison.before), ("After", comparison.after)):
        console.print(f"{when}: {report}", highlight=False)
    if comparison.differences:
        print_table(_differences(comparison), console)
    else:
        console.print("Chain, machine, versions and settings are the same.")
    for note in (*comparison.notes, _compared(comparison)):
        console.print(note, highlight=False)
    for figure in _FIGURES:
        if (table := _changes(comparison, figure)).rows:
            console.print()
            print_table(table, console)
    for line in _lines(comparison):
        console.print(line, highlight=False)


def _differences(comparison: Comparison) -> Table:
    rows = [
        [
            f"{difference.part} {difference.name}",
            f"{difference.before or NOT_KNOWN}, now {difference.after or NOT_KNOWN}",
        ]
        for difference in comparison.differences
    ]
    return Table("What differs", ["", "before, now after"], rows, wraps=True)


def _compared(comparison: Comparison) -> str:
    before, after = comparison.num_prompts
    if comparison.is_paired:
        text = f"{before} prompts are in both reports: each is compared with itself."
        if any(left_out := comparison.num_left_out):
            text += f" Left out are {left_out[0]} before and {left_out[1]} after."
        return text
    return (
        f"The prompts differ, {before} before and {after} after: they are compared as independent "
        "samples, which takes wider intervals."
    )


def _changes(comparison: Comparison, figure: _Figure) -> Table:
    changes = {name: figure.of(system) for name, system in comparison.systems.items()}
    rows = []
    for name, change in changes.items():
        if change is None:
            continue
        low, high = change.low, change.high
        verdict = figure.more if change.ratio > 1 else figure.less
        rows.append(
            [
                name,
                *(f"{_shown(value)}{figure.unit}" for value in (change.before, change.after)),
                f"{change.ratio:.2f}x {verdict}" if change.is_seen else "no change seen",
                NOT_KNOWN if low is None or high is None else f"{low:.2f}–{high:.2f}",
            ]
        )
    header = ["system", "before", "after", "change", "95% interval"]
    return Table(figure.title, header, rows, figure.notes)


def _shown(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def _lines(comparison: Comparison) -> list[str]:
    """Exactness, systems of one report only, and memory."""
    lines = []
    for name, system in comparison.systems.items():
        before, after = (_agreement(side.agreement) for side in (system.before, system.after))
        if before != after:
            lines.append(f"{name}: answers identical to the target's were {before}, are {after}.")
        for when, side in (("before", system.before), ("after", system.after)):
            if side.law is not None and side.law.p_value < UNLIKELY:
                lines.append(
                    f"{name}: sampled tokens did NOT have the target's distribution {when} "
                    f"(p-value {side.law.p_value:.1g})."
                )
    if not lines:
        lines.append("Exactness is the same.")
    for when, names in (("before", comparison.only_before), ("after", comparison.only_after)):
        if names:
            lines.append(f"Only {when}: {', '.join(names)}.")
    if comparison.memory_bytes is not None:
        sizes = comparison.memory_bytes
        shown = " → ".join(map(readable_bytes, sizes))
        lines.append(f"Memory that stays: {shown} ({sizes[1] / sizes[0]:.2f}x).")
    return lines


def _agreement(agreement: Agreement | None) -> str:
    if agreement is None:
        return "not compared"
    text = f"{agreement.identical} of {agreement.answers}"
    if agreement.near_ties:
        text += f" (+{agreement.near_ties} near ties)"
    if agreement.different:
        text += f" ({agreement.different} DIFFER beyond rounding)"
    return text
