"""What `polybasic trace --timeline` shows: one round event by event, and the answer in sums."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from polybasic.deploy.runtime.timeline import Event, Subtotal, Timeline

_NAMES = {"draw": "draws", "between": "between: Python, cuts of blocks, caches, text"}


def timeline_tables(timeline: "Timeline") -> "Iterator[Table | str]":
    """The round of median time, then the whole answer."""
    number, rates = timeline.median_round, timeline.rates
    seconds = sum(event.seconds for events in timeline.rounds for event in events)
    num_tokens = len(timeline.token_ids)
    rate = ", ".join(
        f"{name} {speed / 1e9:.0f}" for name, speed in rates.multiply_adds_per_second.items()
    )
    yield (
        f"{num_tokens} tokens in {seconds:.2f} s, {1e3 * seconds / num_tokens:.1f} ms a token. "
        f"Bounds: {rates.bytes_per_second / 1e9:.1f} GB/s; 10^9 multiply-adds a second: {rate}."
    )
    if number:
        yield f"\nRound {number} of {len(timeline.rounds) - 1}, which took the median time"
        yield _round(timeline, timeline.rounds[number])
    yield "\nThe answer"
    yield _sums(timeline.shares(), seconds, num_tokens)


def _round(timeline: "Timeline", events: "list[Event]") -> "Table":
    table = _table("what", "rows", "ms", "bound", "over it")
    for event in events:
        bound = timeline.rates.bound(event)
        table.add_row(_name(event), *_cells(event.rows, event.seconds, bound))
    return table


def _sums(shares: "list[Subtotal]", seconds: float, num_tokens: int) -> "Table":
    table = _table("what", "times", "rows", "ms each", "bound", "over it", "share", "ms a token")
    for share in shares:
        bound = None if share.bound_seconds is None else share.bound_seconds / share.num
        table.add_row(
            _name(share),
            str(share.num),
            *_cells(share.rows, share.seconds / share.num, bound),
            f"{share.seconds / seconds:.1%}",
            f"{1e3 * share.seconds / num_tokens:.2f}",
        )
    return table


def _table(first: str, *headers: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column(first)
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _name(entry: "Event | Subtotal") -> str:
    return _NAMES.get(entry.what) or f"{entry.what} of {entry.member}"


def _cells(rows: float, seconds: float, bound: float | None) -> list[str]:
    """Rows, milliseconds, those of the bound, and how many times as long as that."""
    bounds = ["", ""] if bound is None else [f"{1e3 * bound:.3f}", f"{seconds / bound:.2f}"]
    return [f"{rows:.1f}".removesuffix(".0") if rows else "", f"{1e3 * seconds:.3f}", *bounds]
