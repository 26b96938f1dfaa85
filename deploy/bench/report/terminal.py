"""A report's summary in a terminal."""

from dataclasses import replace

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as ShownTable

from polybasic.deploy.bench.report.lines import status_lines
from polybasic.deploy.bench.report.parts import Figure, Table
from polybasic.deploy.bench.report.sections import sections_of
from polybasic.deploy.bench.schema import Report

_BESIDE_A_COLUMN = 3
"""Space on both sides, and to the next one."""
_MIN_WRAPPED = 24
"""Least width of a column of text that is broken between words."""


def print_report(report: Report, console: Console) -> None:
    """Print what matters most in tables that fit the console; the headline last, where it stays in
    view."""
    console.print(f"Speed of {report.chain}", style="bold")
    for line in status_lines(report):
        console.print(line, style="yellow")
    headline, *others = (section for section in sections_of(report) if section.is_summary)
    for section in (*others, headline):
        console.print(f"\n{section.title}", style="bold")
        for part in section.parts:
            if isinstance(part, Table):
                if not part.is_detail:
                    print_table(part, console)
            elif not isinstance(part, Figure):
                console.print(part, highlight=False)


def print_table(table: Table, console: Console) -> None:
    """Print a table with its notes; one that is too wide turned, or in several parts.

    No cell is cut, and none is broken but between words.
    """
    for part in _fitting(table, console):
        console.print(_shown(part), highlight=False)
    for note in table.notes:
        console.print(note, style="dim", highlight=False)


def _fitting(table: Table, console: Console) -> list[Table]:
    """The table as it is, turned, or in parts with some of its columns."""

    def fits(one: Table) -> bool:
        return _width(one) <= console.width

    if fits(table):
        return [table]
    if table.may_turn and fits(table.turned()):
        return [table.turned()]
    num_names = 1 if table.wraps else table.num_text_columns
    names = list(range(num_names))
    parts: list[Table] = []
    chosen: list[int] = []
    for column in range(num_names, len(table.header)):
        if chosen and not fits(_of_columns(table, [*names, *chosen, column])):
            parts.append(_of_columns(table, names + chosen))
            chosen = []
        chosen.append(column)
    return [*parts, _of_columns(table, names + chosen)]


def _of_columns(table: Table, columns: list[int]) -> Table:
    def of(cells: list[str]) -> list[str]:
        return [cells[column] for column in columns]

    has_last = columns[-1] == len(table.header) - 1
    return replace(
        table,
        header=of(table.header),
        rows=[of(row) for row in table.rows],
        num_text_columns=sum(column < table.num_text_columns for column in columns),
        wraps=table.wraps and has_last,
    )


def _width(table: Table) -> int:
    """Least number of columns of a terminal that show the table without breaking a word."""
    widths = [
        max(cell_len(line) for cell in column for line in cell.split("\n"))
        for column in zip(table.header, *table.rows, strict=True)
    ]
    if table.wraps:
        longest = max(cell_len(word) for row in table.rows for word in row[-1].split())
        widths[-1] = max(longest, cell_len(table.header[-1]), _MIN_WRAPPED)
    return sum(widths) + _BESIDE_A_COLUMN * len(widths) + 1


def _shown(table: Table) -> ShownTable:
    shown = ShownTable(title=table.title, title_justify="left", box=box.SIMPLE)
    for column, name in enumerate(table.header):
        is_wrapped = table.wraps and column == len(table.header) - 1
        shown.add_column(
            name,
            justify="left" if table.is_text(column) else "right",
            no_wrap=not is_wrapped,
            min_width=_MIN_WRAPPED if is_wrapped else None,
        )
    for row in table.rows:
        shown.add_row(*row)
    return shown
