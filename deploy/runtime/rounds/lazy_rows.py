"""Tensors whose rows take memory when they are written, can give it back, and share it."""

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from math import prod
from typing import Any

import torch

MIN_SHARED_BYTES = 1 << 16
"""Of rows in each part, which are worth a file; fewer are copied."""
MAX_MAPPINGS = 16_384
"""Of files, about: Linux grants a process 65,530 in all, and each of these divides another one."""
_MAP_FIXED = 0x10
"""Linux's number, which Python does not name."""
_MAP_FAILED = ctypes.c_void_p(-1).value


class SharedRows:
    """Rows `first` to `end` - 1 in a file without a name, which nobody writes to once it is filled.

    It takes memory as long as this object, or a mapping of the file, is there.

    Args:
        num_bytes: of the tensor that they are rows of; they lie where they lie there.

    Raises:
        OSError: the system grants no such file.
    """

    def __init__(self, first: int, end: int, num_bytes: int) -> None:
        self.first, self.end = first, end
        self.file = os.memfd_create("polybasic-rows")
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, num_bytes)


class LazyRows:
    """Zeros [..., rows, values], of which a CPU's memory holds the pages that were written.

    Args:
        shape: the last but one dimension is that of rows.

    Attributes:
        tensor: all of them.
        shared: files of leading rows, which others may hold, too, in order.
        num_shared: leading rows that are those of the files.

    Raises:
        OSError: the system grants no such range of addresses.
    """

    def __init__(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> None:
        self.shared: list[SharedRows] = []
        self.num_shared = self._num_mapped = 0
        self._memory: mmap.mmap | None = None
        self._row_bytes = shape[-1] * dtype.itemsize
        self._part_bytes = shape[-2] * self._row_bytes
        if device.type != "cpu" or not (num_bytes := prod(shape) * dtype.itemsize):
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
            return
        self._memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._avoid_huge_pages()
        self.tensor = torch.frombuffer(self._memory, dtype=dtype).view(shape)
        _all.add(self)

    def truncate(self, num_kept: int) -> None:
        """The rows from `num_kept` on may be written from now on."""
        self.num_shared = min(self.num_shared, num_kept)

    def give_back(self, num_kept: int) -> None:
        """Return the memory of all rows but the first `num_kept`, as far as they fill pages.

        What they hold afterwards is undefined. On a GPU nothing happens.
        """
        self.truncate(num_kept)
        if self._memory is None:
            return
        for start, end in self._spans(num_kept, self._part_bytes // self._row_bytes):
            first, last = _pages(start, end)
            if first >= last:
                continue
            if self._num_mapped > num_kept:
                self._map(first, last, None)
            else:
                self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
        if self._num_mapped > num_kept:
            self._avoid_huge_pages()
            self._num_mapped = num_kept
        self.shared = [rows for rows in self.shared if rows.first < num_kept]

    def take_over(self, other: "LazyRows", num_rows: int) -> None:
        """Hold the first rows of a tensor of the same shape, dtype and device.

        Under Linux both then have the same pages of a CPU's memory, each of which is copied when
        one of the two writes to it. Rows that fill no page are copied at once, and so are all where
        the system grants no files or mappings.
        """
        self.give_back(0)
        if other.num_shareable(num_rows):
            with suppress(OSError):
                other._share(num_rows)
                self._take_shared(other, num_rows)
                return
            self.shared, self.num_shared = [], 0
        self.tensor[..., :num_rows, :] = other.tensor[..., :num_rows, :]

    def num_shareable(self, num_rows: int) -> int:
        """Of the first rows those for which `take_over` takes no memory again, unless the system
        grants no files or mappings."""
        if self._memory is None or not hasattr(os, "memfd_create") or not _may_map_more():
            return 0
        num_shared = min(self.num_shared, num_rows)
        if self._is_worth_it(num_shared, num_rows):
            return num_rows
        return num_shared if self._is_worth_it(0, num_shared) else 0

    def _share(self, num_rows: int) -> None:
        """Move the first rows into files, as far as that is worth it.

        Raises:
            OSError: the system grants no files or mappings; the rows are what they were.
        """
        assert self._memory is not None
        while self.shared and not self._is_worth_it(self.shared[-1].first, self.num_shared):
            self.num_shared = self.shared.pop().first
        if not self._is_worth_it(self.num_shared, num_rows):
            return
        rows = SharedRows(self.num_shared, num_rows, len(self._memory))
        self._num_mapped = max(self._num_mapped, num_rows)
        with memoryview(self._memory) as memory:
            for start, end in self._spans(rows.first, num_rows):
                at, last = _pages(start, end)
                first = at
                while at < last:
                    at += os.pwrite(rows.file, memory[at:last], at)
                self._map(first, last, rows)
        self.shared.append(rows)
        self.num_shared = num_rows

    def _take_shared(self, other: "LazyRows", num_rows: int) -> None:
        """Hold what another tensor has in files, and copies of its other rows.

        Raises:
            OSError: the system grants no mappings.
        """
        assert self._memory is not None
        assert other._memory is not None
        ends = [*(rows.first for rows in other.shared[1:]), other.num_shared]
        for rows, end_row in zip(other.shared, ends, strict=True):
            end_row = min(end_row, num_rows)
            if not self._is_worth_it(rows.first, end_row):
                break
            self._num_mapped = self.num_shared = end_row
            self.shared.append(rows)
            for start, end in self._spans(rows.first, end_row):
                first, last = _pages(start, end)
                self._map(first, last, rows)
                self._memory[start:first] = other._memory[start:first]
                self._memory[last:end] = other._memory[last:end]
        rest = slice(self.num_shared, num_rows)
        self.tensor[..., rest, :] = other.tensor[..., rest, :]

    @property
    def _num_mappings(self) -> int:
        if self._memory is None:
            return 0
        return len(self.shared) * (len(self._memory) // self._part_bytes)

    def _avoid_huge_pages(self) -> None:
        """The first row of each part would take two megabytes."""
        assert self._memory is not None
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with suppress(OSError):  # of kernels that have no huge pages
                self._memory.madvise(mmap.MADV_NOHUGEPAGE)

    def _is_worth_it(self, first_row: int, end_row: int) -> bool:
        return (end_row - first_row) * self._row_bytes >= MIN_SHARED_BYTES

    def _spans(self, first_row: int, end_row: int) -> Iterator[tuple[int, int]]:
        """Where these rows of each part begin and end."""
        assert self._memory is not None
        for start in range(0, len(self._memory), self._part_bytes):
            yield start + first_row * self._row_bytes, start + end_row * self._row_bytes

    def _map(self, start: int, end: int, rows: SharedRows | None) -> None:
        """Replace pages by those of a file, each of which is copied when it is written to, or by
        empty ones.

        Raises:
            OSError: the system grants no more mappings.
        """
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | (mmap.MAP_ANONYMOUS if rows is None else 0)
        file = -1 if rows is None else rows.file
        access = mmap.PROT_READ | mmap.PROT_WRITE
        place = self.tensor.data_ptr() + start
        if _mmap()(place, end - start, access, flags, file, start) == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _pages(start: int, end: int) -> tuple[int, int]:
    """The whole pages between two places: where they begin and end."""
    return -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE


_all: "weakref.WeakSet[LazyRows]" = weakref.WeakSet()


def _may_map_more() -> bool:
    return sum(rows._num_mappings for rows in _all) < MAX_MAPPINGS


@cache
def _mmap() -> Any:
    """The system's function: Python's maps nothing at a given place."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long
    ]  # fmt: skip
    return function
