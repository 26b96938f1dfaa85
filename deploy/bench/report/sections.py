"""The one order of a report's contents, for every way of showing it."""

from polybasic.chain.base.tables import Table
from polybasic.deploy.bench.report.chain_rows import (
    adaptation_table,
    draft_vocabulary_table,
    exactness_table,
    law_table,
    loss_table,
    memory_table,
    origin_table,
    rounding_table,
)
from polybasic.deploy.bench.report.lines import (
    decided_lines,
    exactness_line,
    headline_lines,
    memory_line,
    noise_line,
    plan_line,
    rounding_line,
)
from polybasic.deploy.bench.report.member_rows import (
    acceptance_table,
    acceptances,
    length_table,
    member_table,
    prediction_table,
    spent_table,
)
from polybasic.deploy.bench.report.parts import Figure, Section
from polybasic.deploy.bench.report.rows import (
    description_table,
    group_table,
    headline_table,
    insertion_table,
    latency_table,
    speed_table,
    task_table,
)
from polybasic.deploy.bench.schema import Report

Part = str | Table | Figure | None

_BY_KIND = (
    "Dots are speedups over target, lines their 95 % intervals; a hollow dot is not conclusive. "
    "Shown are this runtime's systems that draft, and of each other runtime the fastest one, in "
    "the target's dtype where it has that."
)


def sections_of(report: Report) -> list[Section]:
    """What a report says, the most important first; without what it has no figures of."""
    sections = [
        _section("Headline", *headline_lines(report), headline_table(report), is_summary=True),
        _section(
            "All systems",
            Figure("rates", "Speed of each system", "Prefill included."),
            speed_table(report),
            latency_table(report),
            description_table(report),
            is_summary=True,
        ),
        _by_kind("Speedup by task", "task_speedups", task_table(report)),
        _by_kind("Groups of prompts", "group_speedups", group_table(report), is_summary=True),
        _lengths(report),
        _time(report),
        _insertion(report),
        _acceptance(report),
        _section(
            "Exactness",
            exactness_line(report),
            exactness_table(report),
            law_table(report),
            loss_table(report),
            is_summary=True,
        ),
        _rounding(report),
        _section("Memory", memory_table(report.memory["stated"]), memory_line(report.memory) + "."),
        _section("Adapted members", adaptation_table(report.adaptations)),
        _section("Draft vocabulary", draft_vocabulary_table(report.draft_vocabulary)),
        _section(
            "Plan",
            f"{plan_line(report)}.",
            *map(_sentence, decided_lines(report)),
            is_summary=True,
        ),
        _section("Noise", noise_line(report), is_summary=True),
        _section(
            "Settings and machine",
            origin_table(report),
            is_summary=True,
        ),
    ]
    return [section for section in sections if section.parts]


def _by_kind(title: str, figure: str, table: Table | None, is_summary: bool = False) -> Section:
    plot = table and Figure(figure, table.title, _BY_KIND)
    return _section(title, plot, table, is_summary=is_summary)


def _lengths(report: Report) -> Section:
    table = length_table(report)
    figure = Figure(
        "accepted_lengths",
        "Tokens gained by a pass of the target",
        "Share of the target's passes that gained so many tokens; the line is their mean.",
    )
    return _section("Accepted length", table and figure, table)


def _time(report: Report) -> Section:
    spent, predicted = spent_table(report), prediction_table(report)
    has_prediction = any(
        system.predicted_seconds_per_token is not None for system in report.systems.values()
    )
    parts = Figure(
        "time_parts",
        "Where the time of a token goes",
        "The whole time of all answers, for each new token.",
    )
    dots = Figure(
        "predictions",
        "Predicted and measured time a token",
        "Decode only: the hollow dot is the planner's prediction, the full one the measurement.",
    )
    return _section(
        "Where the time goes",
        spent and parts,
        spent,
        member_table(report),
        dots if has_prediction else None,
        predicted,
    )


def _insertion(report: Report) -> Section:
    table = insertion_table(report)
    figure = Figure(
        "insertions",
        "Theorem 3.2 and what was measured",
        "Above the line the theorem expects a gain. Each dot is an inserted member, with the "
        "measured speed with it over the speed without; hollow where that is not conclusive.",
    )
    return _section("Insertion", table and figure, table)


def _acceptance(report: Report) -> Section:
    parts: list[Part] = []
    for of_blocks, name, title in (
        (False, "tree_acceptance", "Acceptance by depth of the draft tree"),
        (True, "block_acceptance", "Acceptance by place in the block"),
    ):
        if acceptances(report, of_blocks):
            caption = "Share of the proposals whose token at this place was accepted."
            parts += [Figure(name, title, caption), acceptance_table(report, of_blocks)]
    return _section("Acceptance", *parts)


def _rounding(report: Report) -> Section:
    table = rounding_table(report)
    return _section("Rounding", table, f"{rounding_line(report)}." if table else None)


def _section(title: str, *parts: Part, is_summary: bool = False) -> Section:
    return Section(title, [part for part in parts if part], is_summary)


def _sentence(line: str | None) -> str | None:
    return f"{line[0].upper()}{line[1:].rstrip('.')}." if line else None
