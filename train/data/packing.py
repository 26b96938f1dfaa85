"""Rows of several conversations each: which ones, window by window, and the places in them."""

from collections.abc import Callable

import torch
from torch import Tensor


class PackedWindows:
    """Where each window of an endless stream of conversations begins, and its rows.

    A window is a given number of rows. Conversations are taken in order, each into the first row
    that has room for it; the window ends before the first one for which no row has. So none is
    split, left out or taken twice, and every window is a function of the stream alone.

    Where a window begins is known when those before it have been packed: the first call for a late
    one asks for the lengths of all conversations before it.

    Args:
        length_of: tokens of the conversation at a position of the stream, at most `row_tokens`;
            0 for one that is passed over.
        num_rows: of a window.
        row_tokens: room of a row.
        patience: after so many positions in a row that are passed over the stream counts as empty.
    """

    def __init__(
        self, length_of: Callable[[int], int], num_rows: int, row_tokens: int, patience: int
    ) -> None:
        self._length_of = length_of
        self._num_rows, self._row_tokens = num_rows, row_tokens
        self._patience = patience
        self._starts = [0]

    def window(self, index: int) -> list[list[int]]:
        """The positions in each row of a window, counted from 0; no rows of an empty stream."""
        rows, end = self._pack(self.start(index))
        if index + 1 == len(self._starts):
            self._starts.append(end)
        return rows

    def start(self, index: int, enough: int | None = None) -> int:
        """The position at which a window begins.

        Args:
            index: of the window, counted from 0.
            enough: do not look on from a window that begins there or later, but return its start.
        """
        while len(self._starts) <= index:
            if enough is not None and self._starts[-1] >= enough:
                return self._starts[-1]
            self._starts.append(self._pack(self._starts[-1])[1])
        return self._starts[index]

    def _pack(self, position: int) -> tuple[list[list[int]], int]:
        """The rows of the window that begins at a position, and where the next one does."""
        rows: list[list[int]] = [[] for _ in range(self._num_rows)]
        free = [self._row_tokens] * self._num_rows
        num_passed_over = 0
        while num_passed_over < self._patience:
            length = self._length_of(position)
            if length:
                row = next((row for row, room in enumerate(free) if room >= length), None)
                if row is None:
                    break
                rows[row].append(position)
                free[row] -= length
            num_passed_over = 0 if length else num_passed_over + 1
            position += 1
        return [row for row in rows if row], position


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """The place of each token in its own conversation, int64 [B, T].

    Args:
        document_ids: int64 [B, T], 0, 1, 2, .. by conversation in the row, -1 where it is padding.
    """
    places = torch.arange(document_ids.shape[1], device=document_ids.device)
    is_first = torch.ones_like(document_ids, dtype=torch.bool)
    is_first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return places - torch.where(is_first, places, 0).cummax(dim=1).values
