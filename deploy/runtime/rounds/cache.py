"""Keys and values of one sequence."""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig
from polybasic.chain.kernels.cpu.library import FixedTensors, kernels_for
from polybasic.chain.kernels.executor import Executor
from polybasic.deploy.runtime.rounds.lazy_rows import LazyRows, SharedRows

_MAX_INDEXED = (1 << 31) - 1
"""Elements of a tensor that PyTorch's kernels index on a GPU: they count in 32 bits."""


class KeyValueCache:
    """A fixed number of rows a layer; `length` of them are committed.

    A pass writes its rows after the committed ones. `keep` then commits some of them, in the order
    given, and drops the others: rejecting rows only shortens the cache.

    Args:
        num_layers: of the decoder, or 1 for a draft head.
        capacity: rows, committed and provisional together.

    Attributes:
        block: [layers, 2 * key/value heads, capacity, head size], keys first; initially zeros.
        layers: views of `block`, one for each layer.
        num_written: leading rows that may take memory, beside the provisional ones.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_layers: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2 * config.num_kv_heads, capacity, config.head_dim)
        self._rows: LazyRows | None = LazyRows(shape, dtype=dtype, device=device)
        self.block = self._rows.tensor
        self.layers = FixedTensors(self.block)
        self.capacity, self.length, self.num_written = capacity, 0, 0

    def leading_layers(self, num_layers: int) -> "KeyValueCache":
        """The same rows of the first layers, of which another length is committed."""
        other = copy(self)
        other._rows = None  # which belong to the whole cache
        other.block = self.block[:num_layers]
        other.layers = FixedTensors(other.block)
        return other

    @classmethod
    def of(cls, model: Executor, capacity: int) -> "KeyValueCache":
        """The cache of a model."""
        num_layers = len(model.weights.layers)
        return cls(model.config, num_layers, capacity, model.dtype, model.device)

    def keep(self, rows: Sequence[int]) -> None:
        """Commit provisional rows, given as offsets from `length` in ascending order."""
        moved = [(row, place) for place, row in enumerate(rows) if row != place]
        if moved:
            sources = [self.length + row for row, _ in moved]
            self.move(sources, self.length + moved[0][1])
        self._commit(self.length + len(rows))

    def move_on_device(self, sources: Tensor, first: Tensor) -> None:
        """Move rows, in place and on the device, to consecutive places from `first` on.

        `length` does not change.

        Args:
            sources: int64 [n], rows of the cache in any order, possibly repeated.
            first: int64 [], at most capacity - n. Rows first to first + n - 1 are overwritten.
        """
        places = first + torch.arange(len(sources), device=sources.device)
        for layers in self._parts():
            layers.index_copy_(2, places, layers.index_select(2, sources))

    def move(self, sources: list[int], first: int) -> None:
        """Move rows, given in ascending order, to consecutive places from `first` on."""
        kernels = kernels_for(self.block.device, self.block.dtype)
        if kernels is not None:
            kernels.move_rows(self.layers, sources, first)
            return
        moved = torch.tensor(sources, device=self.block.device)
        for layers in self._parts():
            layers[:, :, first : first + len(sources)] = layers[:, :, moved]

    def copy_from(self, other: "KeyValueCache", num_rows: int) -> None:
        """Take over the first committed rows of a cache of the same shape, at most `num_rows`."""
        assert self._rows is not None
        assert other._rows is not None
        self.length = self.num_written = min(num_rows, other.length)
        self._rows.take_over(other._rows, self.length)

    def fill(self, length: int) -> None:
        """Commit so many rows, which then hold zeros, written, so that they lie in memory."""
        self.truncate(0)
        self.block[:, :, :length] = 0
        self._commit(length)

    def truncate(self, length: int) -> None:
        """Drop all rows from `length` on."""
        assert 0 <= length <= self.length, f"truncate to {length} of {self.length} rows"
        self.length = length
        if self._rows is not None:
            self._rows.truncate(length)

    @property
    def is_view(self) -> bool:
        """Whether the rows are those of another cache."""
        return self._rows is None

    def num_shareable(self, num_rows: int) -> int:
        """Of the first rows those for which `copy_from` of this cache takes no memory again."""
        num_rows = min(num_rows, self.length)
        return 0 if self._rows is None else self._rows.num_shareable(num_rows)

    @property
    def num_shared(self) -> int:
        """Leading rows that take no memory of this cache alone, but that of `shared`."""
        return 0 if self._rows is None else self._rows.num_shared

    @property
    def shared(self) -> Sequence[SharedRows]:
        """What may hold rows of other caches, too."""
        return () if self._rows is None else self._rows.shared

    def give_back(self) -> None:
        """Return the memory of rows that are not committed to the system, between two passes."""
        if self._rows is not None and self.num_written > self.length:
            self._rows.give_back(self.length)
        self.num_written = self.length

    def _commit(self, length: int) -> None:
        self.length = length
        self.num_written = max(self.num_written, length)

    def _parts(self) -> Sequence[Tensor]:
        """As many layers at a time as can be indexed."""
        return self.block.split(max(1, _MAX_INDEXED // self.block[0].numel()))
