"""Tables for people: what they hold, and how they fit a terminal of any width."""

from dataclasses import dataclass, replace

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as ShownTable

_BESIDE_A_COLUMN = 3
"""Space on both sides, and to the next one."""
_MIN_WRAPPED = 20
"""Least width of a column of text that is broken between words, where it is not shorter anyway."""


@dataclass(frozen=True)
class Table:
    """A table; a line feed in a cell begins a new line of it.

    Attributes:
        title: without a full stop; may be empty.
        header: of the columns; the first one names the rows.
        rows: of as many cells.
        notes: sentences below it.
        num_text_columns: the first columns, which are aligned to the left; they name the rows, and
            stay beside each part of a table that is too wide.
        text_columns: names of others that are aligned to the left.
        wraps: whether the last column is text that may be broken between words.
        may_turn: whether rows and columns can change places.
        is_detail: whether a terminal's summary leaves it out.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: tuple[str, ...] = ()
    num_text_columns: int = 1
    text_columns: tuple[str, ...] = ()
    wraps: bool = False
    may_turn: bool = False
    is_detail: bool = False

    def turned(self) -> "Table":
        """The same with rows for columns."""
        header, *rows = map(list, zip(self.header, *self.rows, strict=True))
        return replace(self, header=header, rows=rows)

    def is_text(self, column: int) -> bool:
        """Whether a column is aligned to the left."""
        is_last = column == len(self.header) - 1
        is_named = self.header[column] in self.text_columns
        return column < self.num_text_columns or is_named or (self.wraps and is_last)


def print_table(table: Table, console: Console) -> None:
    """Print a table with its notes; one that is too wide turned, or in several parts.

    No cell is cut, and none is broken but between words.
    """
    first, *further = _fitting(table, console)
    for part in (first, *(replace(piece, title="") for piece in further)):
        console.print(_shown(part), highlight=False)
    for note in table.notes:
        console.print(note, style="dim", highlight=False)


def _fitting(table: Table, console: Console) -> list[Table]:
    """The table as it is, turned, or in parts with some of its columns."""

    def fits(candidate: Table) -> bool:
        return _width(candidate) <= console.width

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
    num_names = sum(column < table.num_text_columns for column in columns)
    return replace(
        table,
        header=of(table.header),
        rows=[row for row in map(of, table.rows) if any(row[num_names:])],
        num_text_columns=num_names,
        wraps=table.wraps and has_last,
    )


def _width(table: Table) -> int:
    """Least number of columns of a terminal that show the table without breaking a word."""
    widths = [
        max(cell_len(line) for cell in column for line in cell.split("\n"))
        for column in zip(table.header, *table.rows, strict=True)
    ]
    if table.wraps:
        widths[-1] = _least_wrapped(table)
    return sum(widths) + _BESIDE_A_COLUMN * len(widths) + 1


def _least_wrapped(table: Table) -> int:
    """Least width of the last column, which is broken between words."""
    cells = [table.header[-1], *(row[-1] for row in table.rows)]
    longest = max(cell_len(line) for cell in cells for line in cell.split("\n"))
    word = max(cell_len(word) for cell in cells for word in cell.split())
    return max(word, min(longest, _MIN_WRAPPED))


def _shown(table: Table) -> ShownTable:
    shown = ShownTable(title=table.title or None, title_justify="left", box=box.SIMPLE)
    for column, name in enumerate(table.header):
        is_wrapped = table.wraps and column == len(table.header) - 1
        shown.add_column(
            name,
            justify="left" if table.is_text(column) else "right",
            no_wrap=not is_wrapped,
            min_width=_least_wrapped(table) if is_wrapped else None,
        )
    for row in table.rows:
        shown.add_row(*row)
    return shown
