"""The rows of a pass as the host knows them: where they are written and what they attend to.

#   R = rows (tokens of one sequence in a pass)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from polybasic.chain.formats.checkpoints.decoder_config import LayerKind
from polybasic.chain.formats.plan import Window

NO_ROWS = range(0)


@dataclass(frozen=True)
class Rows:
    """Rows of one sequence: consecutive tokens, or a tree, after the committed rows of its cache.

    A pass may read rows of several sequences, each with a cache of its own.

    Attributes:
        start: committed rows of the cache, each at the position of its index; all rows of the pass
            see them, except what a window hides. The pass writes the rows after them.
        num_rows: R.
        paths: for each row of a tree, the rows of the cache from `start` on that it sees, by
            position, itself last; None for consecutive tokens.
        window: hides the middle of a long context; None hides nothing. Layers with a narrower
            window of their own keep it.
    """

    start: int
    num_rows: int
    paths: Sequence[Sequence[int]] | None = None
    window: Window | None = None

    @property
    def end(self) -> int:
        """Rows of the cache once the pass is done."""
        return self.start + self.num_rows

    def part(self, first: int, end: int) -> "Rows":
        """Rows `first` to `end` - 1 of consecutive tokens, once those before them are committed."""
        assert self.paths is None, f"a part of a tree of {self.num_rows} rows"
        return Rows(self.start + first, end - first, None, self.window)


def consecutive_rows(start: int, num_rows: int, window: Window | None = None) -> Rows:
    """Consecutive tokens after `start` committed ones."""
    return Rows(start, num_rows, None, window)


def tree_rows(start: int, parents: Sequence[int], window: Window | None = None) -> Rows:
    """Rows of a tree after `start` committed tokens.

    Args:
        parents: of each row, an earlier row, or -1 for none.
    """
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        above = paths[parent] if parent >= 0 else []
        paths.append([*above, start + row])
    return Rows(start, len(paths), paths, window)


def split_rows(rows: Sequence[Rows], max_rows: int) -> Iterator[list[tuple[int, slice, Rows]]]:
    """The rows of a pass as passes of at most `max_rows` rows, for the same results.

    Consecutive tokens may be divided; a tree never is, and a larger one has a pass of its own.

    Yields:
        For each pass its parts: place in `rows`, which of the pass's tokens, and how they attend.
    """
    parts: list[tuple[int, slice, Rows]] = []
    room, token = max_rows, 0
    for place, read in enumerate(rows):
        done = 0
        while done < read.num_rows:
            left = read.num_rows - done
            if parts and (room == 0 or (read.paths is not None and left > room)):
                yield parts
                parts, room = [], max_rows
            taken = min(left, room) if read.paths is None else left
            part = read if taken == read.num_rows else read.part(done, done + taken)
            parts.append((place, slice(token, token + taken), part))
            done, token, room = done + taken, token + taken, room - taken
    if parts:
        yield parts


def seen_from(position: int, kind: LayerKind, window: Window | None) -> tuple[range, int]:
    """What a token sees: leading positions, and all from a later one up to its own.

    Positions are those of the whole text even with a window, because the cache holds keys as they
    were rotated when written, for all models that share it.

    Returns:
        Leading positions, none if there is no gap after them, and the later position.
    """
    tokens, sinks = narrower_window(kind, window)
    latest = 0 if tokens is None else max(0, position + 1 - tokens)
    if latest <= sinks:
        return NO_ROWS, 0
    return range(sinks), latest


def narrower_window(kind: LayerKind, window: Window | None) -> tuple[int | None, int]:
    """Latest tokens that layers of a kind see, None for all, and the leading ones in addition."""
    if window is not None and (kind.window is None or window.tokens < kind.window):
        return window.tokens, window.sinks
    return kind.window, 0
