"""Numbers, values and choices for people."""

from collections.abc import Iterable
from typing import Any


def readable_bytes(num_bytes: int) -> str:
    """12_345_678 -> "12.3 MB"."""
    return _scaled(num_bytes, ("B", "kB", "MB", "GB", "TB"), " ")


def readable_count(count: int) -> str:
    """12_345_678 -> "12.3M"."""
    return _scaled(count, ("", "k", "M", "B", "T"), "")


def alternatives(choices: Iterable[object]) -> str:
    """Choices for people: "1, 2 or 4"."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def counted(num: int, what: str) -> str:
    """1 -> "1 token", 1_200 -> "1,200 tokens"; of words whose plural ends in s."""
    return f"{num:,} {what}" if num == 1 else f"{num:,} {what}s"


def readable_value(value: Any) -> str:
    """A value as Python writes it, its beginning where that is long."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]} ..."


def _scaled(value: float, units: tuple[str, ...], space: str) -> str:
    exponent = 0
    while value >= 999.95 and exponent < len(units) - 1:
        value, exponent = value / 1000, exponent + 1
    return f"{value:.1f}{space}{units[exponent]}" if exponent else f"{value:.0f}{space}{units[0]}"
