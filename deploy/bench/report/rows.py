"""Tables of the systems: how fast each one is, on all prompts and by kind of prompt."""

from collections.abc import Callable, Mapping

from polybasic.chain.base.tables import Table
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS
from polybasic.deploy.bench.report.parts import (
    ITSELF,
    NOT_KNOWN,
    Named,
    not_conclusive,
    shown_interval,
    shown_milliseconds,
    shown_number,
    shown_quantiles,
    shown_rate,
    shown_ratio,
    shown_value,
)
from polybasic.deploy.bench.schema import Ratio, Report, SystemReport, Totals

HEADLINE_SYSTEMS = (*HEAD_KINDS, "polybasic", "polybasic_full")
ALL = "all"
"""Column of the answers to all prompts, beside those by task."""


def tasks_of(report: Report) -> list[str]:
    """Task groups that have figures, in their order."""
    return list(dict.fromkeys(task for system in report.systems.values() for task in system.tasks))


def groups_of(report: Report) -> list[str]:
    """Groups of prompts that have figures, in their order; empty where prompts have none."""
    return list(
        dict.fromkeys(group for system in report.systems.values() for group in system.groups)
    )


def speculating(report: Report) -> dict[str, SystemReport]:
    """Systems of this runtime that draft."""
    return {
        name: system
        for name, system in report.systems.items()
        if system.runtime == "polybasic" and name != "target"
    }


def compared(report: Report) -> dict[str, SystemReport]:
    """Systems that speedups by kind of prompt are shown of.

    All of this runtime that draft, and of each other runtime the fastest one, in the target's dtype
    where it has that.
    """
    ours, dtype = speculating(report), report.systems["target"].dtype

    def rank(name: str) -> tuple[bool, float]:
        system = report.systems[name]
        return system.dtype == dtype, system.totals.tokens_per_second

    best: dict[str, str] = {}
    for name, system in report.systems.items():
        best[system.runtime] = max(best.get(system.runtime, name), name, key=rank)
    return {
        name: system
        for name, system in report.systems.items()
        if name in ours or (system.runtime != "polybasic" and best[system.runtime] == name)
    }


def headline_table(report: Report) -> Table | None:
    """Speedup and accepted length by task, as Table 2 of the paper; None if no such system ran."""
    systems = {name: system for name, system in report.systems.items() if name in HEADLINE_SYSTEMS}
    if not systems:
        return None
    return _speedups(
        systems,
        "Speedup and accepted length, by task",
        tasks_of(report),
        lambda system: system.tasks,
        "Each cell: speedup over `target`, prefill included, and in brackets the accepted length, "
        "in tokens gained by a pass of the target.",
        has_intervals=False,
    )


def speed_table(report: Report) -> Table:
    """All systems: tokens per second with the prefill, and what that is beside the baselines."""
    systems = report.systems
    has_library = any(system.totals.over_hf is not None for system in systems.values())
    speedups = {
        (name, ""): ITSELF if name == "target" else system.totals.speedup
        for name, system in systems.items()
    }
    over_library = {
        (f"{name} vs hf", ""): ITSELF if name == "hf_generate" else system.totals.over_hf
        for name, system in systems.items()
    }
    rows = [
        [
            name,
            shown_rate(system.totals.tokens_per_second),
            shown_ratio(speedups[name, ""]),
            identical_cell(system),
            *([shown_ratio(over_library[f"{name} vs hf", ""])] if has_library else []),
        ]
        for name, system in systems.items()
    ]
    header = ["system", "tokens/s", "speedup", "identical", *(["vs hf"] if has_library else [])]
    notes = (
        "Speedup: total tokens over total seconds, against `target`, which is this runtime with "
        "the target alone; in brackets its 95 % interval."
        + (" vs hf: the same against `hf_generate`." if has_library else ""),
        "Identical: answers that are `target`'s, token for token.",
        *not_conclusive(speedups | over_library),
    )
    return Table("Speed, prefill included", header, rows, notes)


def latency_table(report: Report) -> Table:
    """All systems: the rate after the first tokens, waiting times, and energy where it is known."""
    systems = report.systems
    speedups = {
        (name, ""): ITSELF if name == "target" else system.totals.decode_speedup
        for name, system in systems.items()
    }
    has_energy = any(system.totals.joules_per_token is not None for system in systems.values())
    rows = []
    for name, system in systems.items():
        totals = system.totals
        rate = totals.decode_tokens_per_second
        cells = [
            name,
            NOT_KNOWN if rate is None else shown_rate(rate),
            shown_ratio(speedups[name, ""]),
            shown_quantiles(totals.first_token_seconds),
            shown_quantiles(totals.seconds_per_token),
        ]
        if has_energy:
            cells.append(shown_number(totals.joules_per_token, ".3g"))
        rows.append(cells)
    header = ["system", "tokens/s", "speedup", "first, ms", "a token, ms"]
    header += ["J/token"] if has_energy else []
    notes = (
        "Tokens/s and speedup: of the tokens after the first ones, over the time after these. "
        "First: milliseconds from a prompt to its answer's first tokens. A token: milliseconds "
        "for each of the tokens after these. Both: median / 95th percentile over answers.",
        *(["J/token: energy of the machine for each new token."] if has_energy else []),
        *not_conclusive(speedups),
    )
    return Table("Decode only, and latency", header, rows, notes)


def description_table(report: Report) -> Table:
    """All systems: whose each one is, and what it was given."""
    rows = [
        [
            name,
            system.runtime,
            system.dtype,
            " ".join([f"{system.description.rstrip('.')}.", *system.notes]),
        ]
        for name, system in report.systems.items()
    ]
    header = ["system", "runtime", "dtype", "what it is"]
    return Table("The systems", header, rows, num_text_columns=3, wraps=True)


def task_table(report: Report) -> Table | None:
    """Speedup with its interval, by task and system; None of the target alone."""
    return _all_speedups(report, "Speedup by task", tasks_of(report), lambda system: system.tasks)


def group_table(report: Report) -> Table | None:
    """Speedup and accepted length by group of prompts; None where prompts have none."""
    groups = groups_of(report)
    if not groups:
        return None
    title = "Speedup by group of prompts"
    return _all_speedups(report, title, groups, lambda system: system.groups)


def insertion_table(report: Report) -> Table | None:
    """Theorem 3.2 with measured values, as Table 1 of the paper; None if nothing was inserted."""
    if not report.insertions:
        return None
    rows = [
        [
            f"{insertion.member} into {insertion.without}",
            shown_milliseconds(insertion.above_seconds),
            shown_milliseconds(insertion.new_seconds),
            f"{insertion.accepted:.2f}",
            f"{insertion.accepted_above_new:.2f}",
            f"{insertion.accepted_new:.2f}",
            f"{insertion.left:.3f}",
            f"{insertion.right:.3f}",
            "a gain" if insertion.is_expected_to_pay else "no gain",
            shown_ratio(insertion.speedup),
        ]
        for insertion in report.insertions
    ]
    header = ["inserted", "T_i, ms", "T_new, ms", "L_i", "L_i_new", "L_new", "left", "right"]
    header += ["expected", "measured"]
    notes = (
        "T_i, T_new: milliseconds of a pass of the member above and of the inserted one. L_i, "
        "L_i_new: tokens gained by a pass of the member above, without it and with it; L_new: by "
        "a pass of the inserted one. Theorem 3.2 expects a gain where left, T_new / T_i, is less "
        "than right, L_new (1 / L_i - 1 / L_i_new). Measured: decode speed with it over the speed "
        "without.",
        *not_conclusive(
            {
                (f"{insertion.member} into {insertion.without}", ""): insertion.speedup
                for insertion in report.insertions
            }
        ),
    )
    return Table("An inserted member", header, rows, notes, may_turn=True)


def identical_cell(system: SystemReport) -> str:
    """As "26/28 +2 ties"."""
    agreement = system.agreement
    if system.loss is not None:
        return f"{system.loss.identical}/{system.loss.answers}, lossy"
    if agreement is None:
        return NOT_KNOWN
    text = f"{agreement.identical}/{agreement.answers}"
    ties = agreement.near_ties
    return f"{text} +{ties} {'tie' if ties == 1 else 'ties'}" if ties else text


PartsOf = Callable[[SystemReport], Mapping[str, Totals]]
"""Totals of a system by kind of prompt."""


def _all_speedups(report: Report, title: str, kinds: list[str], parts_of: PartsOf) -> Table | None:
    """Of all systems but the target."""
    systems = {name: system for name, system in report.systems.items() if name != "target"}
    note = (
        "Each cell: speedup over `target`, prefill included, in brackets the accepted length, and "
        "below it the 95 % interval of the speedup."
    )
    return _speedups(systems, title, kinds, parts_of, note) if systems else None


def _speedups(
    systems: Mapping[str, SystemReport],
    title: str,
    kinds: list[str],
    parts_of: PartsOf,
    note: str,
    has_intervals: bool = True,
) -> Table:
    rows: list[list[str]] = []
    ratios: dict[tuple[str, str], Ratio | None] = {}
    for name, system in systems.items():
        parts = {ALL: system.totals} | {kind: parts_of(system).get(kind) for kind in kinds}
        rows.append([name, *(_cell(part, has_intervals) for part in parts.values())])
        ratios |= _named(name, parts)
    header, notes = ["system", ALL, *kinds], (note, *not_conclusive(ratios))
    return Table(title, header, rows, notes, may_turn=True)


def _cell(totals: Totals | None, has_interval: bool) -> str:
    if totals is None:
        return NOT_KNOWN
    length = "" if totals.accepted_length is None else f" ({totals.accepted_length.mean:.2f})"
    ratio = totals.speedup
    return shown_value(ratio, f"{length}\n{shown_interval(ratio)}" if has_interval else length)


def _named(system: str, parts: Mapping[str, Totals | None]) -> Named:
    return {
        (system, "" if kind == ALL else kind): None if part is None else part.speedup
        for kind, part in parts.items()
    }
