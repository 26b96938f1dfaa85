"""Tensors whose rows take memory when they are written, and can give it back."""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch


class LazyRows:
    """Zeros [..., rows, values], of which a CPU's memory holds the pages that were written.

    Args:
        shape: the last but one dimension is that of rows.

    Attributes:
        tensor: all of them.

    Raises:
        OSError: the system grants no such range of addresses.
    """

    def __init__(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> None:
        self._memory: mmap.mmap | None = None
        self._row_bytes = shape[-1] * dtype.itemsize
        self._part_bytes = shape[-2] * self._row_bytes
        if device.type != "cpu" or not (num_bytes := prod(shape) * dtype.itemsize):
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
            return
        self._memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with suppress(OSError):  # of kernels that have no huge pages
                # the first row of each part would take two megabytes
                self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor = torch.frombuffer(self._memory, dtype=dtype).view(shape)

    def give_back(self, num_kept: int) -> None:
        """Return the memory of all rows but the first `num_kept`, as far as they fill pages.

        What they hold afterwards is undefined. On a GPU nothing happens.
        """
        if self._memory is None:
            return
        for start in range(0, len(self._memory), self._part_bytes):
            first = -(-(start + num_kept * self._row_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (start + self._part_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if first < end:
                self._memory.madvise(mmap.MADV_DONTNEED, first, end - first)
