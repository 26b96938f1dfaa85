"""Passes of a verifier over few rows, each captured as a graph over persistent tensors.

#   R = rows of a pass, padding included, W = width of the verifier's states
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor

from polybasic.chain.formats.plan import MAX_TREE_ROWS, Window
from polybasic.chain.kernels.cuda.graphs import Graphs
from polybasic.chain.kernels.torch.executor import TorchExecutor
from polybasic.chain.kernels.torch.rows import device_consecutive_rows
from polybasic.deploy.runtime.rounds.cache import KeyValueCache

NamedStep = tuple[str, Hashable, Callable[[], None]]
"""A function to capture: its name in messages, its key, and the function itself."""
ROW_BUCKETS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, MAX_TREE_ROWS)
"""Rows of captured passes; other numbers of rows are padded to the next of these."""
MAX_CAPTURED_ROWS = 64
"""Of a pass outside of rounds; longer passes use the kernels for many rows."""
PADDING = 0
"""The token of padding rows."""


def bucket_of(rows: int, buckets: Sequence[int] = ROW_BUCKETS) -> int:
    """The smallest bucket that holds `rows` rows; beyond the last one, multiples of 64."""
    if rows > buckets[-1]:
        return -(-rows // 64) * 64
    return buckets[bisect_left(buckets, rows)]


class InputNumbers:
    """Integers that the host passes to captured functions: int64 [size] on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.values = torch.zeros(size, dtype=torch.int64, device=device)

    def set(self, numbers: Sequence[int]) -> None:
        """Set the first numbers; the rest keep their values.

        The host does not wait: memory that is not pinned is staged before the call returns.
        """
        given = torch.tensor(numbers, dtype=torch.int64)
        self.values[: len(numbers)].copy_(given, non_blocking=True)


class CausalPass:
    """A pass over a fixed number of consecutive tokens.

    Attributes:
        states: [R, W] of the last run; the next run overwrites them.
    """

    def __init__(
        self,
        decoder: TorchExecutor,
        cache: KeyValueCache,
        rows: int,
        feature_layers: tuple[int, ...],
    ) -> None:
        self.decoder, self.cache, self.num_rows = decoder, cache, rows
        self.feature_layers = feature_layers
        self.numbers = InputNumbers(1 + rows, decoder.device)
        width = decoder.states_width(feature_layers)
        self.states = torch.zeros(rows, width, dtype=decoder.dtype, device=decoder.device)

    def set(self, prefix: int, token_ids: Sequence[int]) -> None:
        """Set the tokens of the next run, at most R, which follow `prefix` committed rows."""
        padding = [PADDING] * (self.num_rows - len(token_ids))
        self.numbers.set([prefix, *token_ids, *padding])

    def forward(self, window: Window | None) -> None:
        """Read the tokens, using persistent tensors only."""
        prefix, token_ids = self.numbers.values[0], self.numbers.values[1:]
        rows = device_consecutive_rows(prefix, self.num_rows, window)
        states = self.decoder.forward(
            token_ids, [self.cache.layers], [rows], feature_layers=self.feature_layers
        )
        self.states.copy_(states)


class DevicePasses:
    """The captured passes of one verifier, one for each number of rows."""

    max_rows = MAX_CAPTURED_ROWS

    def __init__(
        self, name: str, decoder: TorchExecutor, cache: KeyValueCache, graphs: Graphs
    ) -> None:
        self.name, self.decoder, self.cache, self.graphs = name, decoder, cache, graphs
        self._passes: dict[tuple[int, tuple[int, ...]], CausalPass] = {}

    def read(
        self, token_ids: Sequence[int], window: Window | None, feature_layers: tuple[int, ...]
    ) -> Tensor:
        """States [R, W] of consecutive tokens that follow the committed rows."""
        reading = self.of(bucket_of(len(token_ids)), feature_layers)
        reading.set(self.cache.length, token_ids)
        self.graphs.run(*self._read_step(reading, window))
        return reading.states[: len(token_ids)].clone()

    def steps_to_capture(
        self, max_rows: int, window: Window | None, feature_layers: tuple[int, ...]
    ) -> Iterator[NamedStep]:
        """The passes over up to `max_rows` rows, to be captured in advance."""
        largest = bucket_of(min(max_rows, MAX_CAPTURED_ROWS))
        for rows in ROW_BUCKETS[: 1 + ROW_BUCKETS.index(largest)]:
            reading = self.of(rows, feature_layers)
            yield f"{self.name} over {rows} rows", *self._read_step(reading, window)

    def of(self, rows: int, feature_layers: tuple[int, ...] = ()) -> CausalPass:
        """The pass over exactly `rows` rows."""
        key = rows, feature_layers
        if key not in self._passes:
            self._passes[key] = CausalPass(self.decoder, self.cache, rows, feature_layers)
        return self._passes[key]

    def _read_step(
        self, reading: CausalPass, window: Window | None
    ) -> tuple[Hashable, Callable[[], None]]:
        key = "read", self.name, reading.num_rows, reading.feature_layers, str(window)
        return key, lambda: reading.forward(window)
