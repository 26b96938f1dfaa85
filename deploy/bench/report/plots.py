"""The plots of a report, each a function of it."""

import math
from collections.abc import Callable, Mapping

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from polybasic.deploy.bench.report.colours import (
    INK,
    LINE,
    NUM_PARTS,
    PAPER,
    SOFT,
    Style,
    colour,
    styles,
)
from polybasic.deploy.bench.report.drawing import WIDTH, Plot, drawing
from polybasic.deploy.bench.report.member_rows import (
    PREFILL,
    REST,
    acceptances,
    part_names,
    spent_by_system,
)
from polybasic.deploy.bench.report.parts import Figure, shown_rate, shown_times
from polybasic.deploy.bench.report.rows import compared, groups_of, speculating, tasks_of
from polybasic.deploy.bench.schema import Ratio, Report, SystemReport, Totals

_MOST_LETTERS = 24
"""Of a name beside a plot; tables show all of it."""
_MOST_IN_LEGENDS = 36
_ROW = 15.0
"""Points of height of a row of bars or dots."""
_INSERTED = {True: Style(colour("blue"), "o"), False: Style(colour("vermilion"), "X")}
"""Dots by whether the inserted member made the chain faster."""


def draw(figure: Figure, report: Report) -> Markup:
    """The SVG of a figure."""
    with drawing():
        plot = _PLOTS[figure.name](report)
        return plot.svg(figure.name, figure.title, figure.caption)


def _rates(report: Report) -> Plot:
    names, by_system = list(report.systems), _styles(report)
    rates = [system.totals.tokens_per_second for system in report.systems.values()]
    plot = Plot(40 + _ROW * len(names))
    [axes] = plot.axes
    axes.barh(
        range(len(names)), rates, height=0.68, color=[by_system[name].colour for name in names]
    )
    for row, rate in enumerate(rates):
        axes.annotate(
            shown_rate(rate), (rate, row), (4, 0), textcoords="offset points", va="center"
        )
    axes.set_xlim(0, 1.25 * max(rates))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.set_xlabel("tokens per second")
    _rows_of(axes, names)
    return plot


def _task_speedups(report: Report) -> Plot:
    return _speedups(report, tasks_of(report), lambda system: system.tasks)


def _group_speedups(report: Report) -> Plot:
    return _speedups(report, groups_of(report), lambda system: system.groups)


def _speedups(
    report: Report, kinds: list[str], parts_of: Callable[[SystemReport], Mapping[str, Totals]]
) -> Plot:
    systems, by_system = compared(report), _styles(report)
    plot = Plot(45 + len(kinds) * (7 * len(systems) + 10) + _legend_height(list(systems)))
    [axes] = plot.axes
    step = 0.78 / len(systems)
    shown: list[Ratio] = []
    for place, (name, system) in enumerate(systems.items()):
        style = by_system[name]
        for row, kind in enumerate(kinds):
            totals = parts_of(system).get(kind)
            if totals is None:
                continue
            ratio, at = totals.speedup, row + (place + 0.5) * step - 0.39
            shown.append(ratio)
            axes.plot([ratio.low, ratio.high], [at, at], color=style.colour, linewidth=1.6)
            fill = style.colour if ratio.is_conclusive else colour(PAPER)
            _dot(axes, ratio.value, at, style, fill)
        axes.plot(
            [],
            [],
            style.marker,
            color=style.colour,
            markersize=5.5,
            label=_short(name, _MOST_IN_LEGENDS),
        )
    axes.axvline(1, color=colour(INK), linewidth=1)
    for row in range(len(kinds) - 1):
        axes.axhline(row + 0.5, color=colour(SOFT), linewidth=0.3)
    axes.set_xlabel("speedup over target")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}x"))
    highest = max((ratio.high for ratio in shown if math.isfinite(ratio.high)), default=1)
    axes.set_xlim(0, 1.05 * max(1, min(highest, 1.5 * max(ratio.value for ratio in shown))))
    _rows_of(axes, kinds)
    _legend(plot, list(systems))
    return plot


def _accepted_lengths(report: Report) -> Plot:
    systems, by_system = speculating(report), _styles(report)
    lengths = {
        name: system.totals.accepted_length
        for name, system in systems.items()
        if system.totals.accepted_length is not None
    }
    plot = Plot(30 + 62 * len(lengths), len(lengths))
    for axes, (name, accepted) in zip(plot.axes, lengths.items(), strict=True):
        shares = [count / sum(accepted.counts) for count in accepted.counts]
        axes.bar(range(len(shares)), shares, width=0.8, color=by_system[name].colour)
        axes.axvline(accepted.mean, color=colour(INK), linewidth=1.2)
        axes.set_title(
            f"{_short(name, 14)}: mean {accepted.mean:.2f}, variance {accepted.variance:.1f}",
            loc="left",
            fontsize=8.8,
            color=colour(INK),
        )
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.yaxis.set_major_locator(MaxNLocator(2))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.grid(axis="y")
    plot.axes[0].set_xlim(left=0.4)
    plot.axes[-1].set_xlabel("tokens gained by a pass of the target")
    plot.figure.supylabel("share of passes", fontsize=8.8, color=colour(SOFT))
    return plot


def _time_parts(report: Report) -> Plot:
    by_system = spent_by_system(report)
    names, parts = list(by_system), part_names(by_system)
    plot = Plot(45 + _ROW * len(names) + _legend_height(parts))
    [axes] = plot.axes
    left = [0.0] * len(names)
    members = [part for part in parts if part not in (PREFILL, REST)]
    for part in parts:
        widths = [1e3 * cost.seconds.get(part, 0.0) for cost in by_system.values()]
        hatch = {PREFILL: "////", REST: "...."}.get(part)
        if part in members:
            filled = colour(f"part{members.index(part) % NUM_PARTS}")
        else:
            filled = colour(PAPER)
        axes.barh(
            range(len(names)),
            widths,
            left=left,
            height=0.68,
            label=_short(part, _MOST_IN_LEGENDS),
            color=filled,
            edgecolor=colour(SOFT) if hatch else colour(PAPER),
            linewidth=0.5,
            hatch=hatch,
        )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_xlabel("milliseconds for each new token")
    _rows_of(axes, names)
    _legend(plot, parts)
    return plot


def _predictions(report: Report) -> Plot:
    by_system = _styles(report)
    pairs = {
        name: (system.predicted_seconds_per_token, system.measured_seconds_per_token)
        for name, system in report.systems.items()
        if system.predicted_seconds_per_token is not None
        and system.measured_seconds_per_token is not None
    }
    plot = Plot(40 + _ROW * len(pairs))
    [axes] = plot.axes
    for row, (name, (predicted, measured)) in enumerate(pairs.items()):
        style = by_system[name]
        axes.plot([1e3 * predicted, 1e3 * measured], [row, row], color=style.colour, linewidth=1.6)
        _dot(axes, 1e3 * measured, row, style, style.colour)
        _dot(axes, 1e3 * predicted, row, style, colour(PAPER))
    axes.set_xlabel("milliseconds a token, decode only")
    axes.set_xlim(left=0)
    _rows_of(axes, list(pairs))
    return plot


def _insertions(report: Report) -> Plot:
    plot = Plot(170)
    [axes] = plot.axes
    sides = [side for inserted in report.insertions for side in (inserted.left, inserted.right)]
    low, high = min(0.0, *sides), 1.15 * max(sides)
    axes.plot([low, high], [low, high], color=colour(INK), linewidth=1)
    axes.fill_between([low, high], [low, high], high, color=colour(LINE), alpha=0.5, linewidth=0)
    for inserted in report.insertions:
        speedup = inserted.speedup
        style = _INSERTED[speedup.value > 1]
        _dot(
            axes,
            inserted.left,
            inserted.right,
            style,
            style.colour if speedup.is_conclusive else colour(PAPER),
        )
        is_left = inserted.left < high / 2
        axes.annotate(
            f"{_short(inserted.member, 24)}: {shown_times(speedup.value)}x",
            (inserted.left, inserted.right),
            (6 if is_left else -6, 3),
            textcoords="offset points",
            ha="left" if is_left else "right",
        )
    axes.set_xlabel("T_new / T_i")
    axes.set_ylabel("L_new (1 / L_i - 1 / L_i_new)")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.grid(axis="both")
    return plot


def _tree_acceptance(report: Report) -> Plot:
    return _acceptance(report, False, "depth in the draft tree")


def _block_acceptance(report: Report) -> Plot:
    return _acceptance(report, True, "place in the block")


def _acceptance(report: Report, of_blocks: bool, place: str) -> Plot:
    by_system = _styles(report)
    lines = acceptances(report, of_blocks)
    plot = Plot(150 + _legend_height(list(lines)))
    [axes] = plot.axes
    for label, shares in lines.items():
        style = by_system[label.split(": ")[0]]
        axes.plot(
            range(1, len(shares) + 1),
            shares,
            style.marker,
            linestyle="-",
            color=style.colour,
            label=_short(label, _MOST_IN_LEGENDS),
            markersize=4.5,
            linewidth=1.4,
        )
    axes.set_xlabel(place)
    axes.set_ylabel("share accepted")
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(axis="y")
    _legend(plot, list(lines))
    return plot


def _styles(report: Report) -> dict[str, Style]:
    return styles({name: system.runtime for name, system in report.systems.items()})


def _dot(axes: Axes, x: float, y: float, style: Style, fill: str) -> None:
    axes.plot(
        [x],
        [y],
        style.marker,
        markersize=5.5,
        markerfacecolor=fill,
        markeredgecolor=style.colour,
        markeredgewidth=1.2,
        clip_on=False,
    )


def _short(name: str, most: int = _MOST_LETTERS) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _legend(plot: Plot, labels: list[str]) -> None:
    columns = _legend_columns(labels)
    plot.figure.legend(
        loc="outside upper left",
        ncols=columns,
        handlelength=1.2,
        handletextpad=0.4,
        columnspacing=1,
        labelspacing=0.25,
        borderpad=0.1,
    )


def _legend_columns(labels: list[str]) -> int:
    """As many as the longest label leaves room for, up to four."""
    return max(1, min(4, int(WIDTH / (24 + 5.4 * max(map(len, labels))))))


def _legend_height(labels: list[str]) -> float:
    return 12.5 * math.ceil(len(labels) / _legend_columns(labels))


def _rows_of(axes: Axes, names: list[str]) -> None:
    """The first row on top, names at the left, grid lines along the values."""
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x")


_PLOTS: dict[str, Callable[[Report], Plot]] = {
    "rates": _rates,
    "task_speedups": _task_speedups,
    "group_speedups": _group_speedups,
    "accepted_lengths": _accepted_lengths,
    "time_parts": _time_parts,
    "predictions": _predictions,
    "insertions": _insertions,
    "tree_acceptance": _tree_acceptance,
    "block_acceptance": _block_acceptance,
}
