"""Passes of a verifier over few rows, each a graph over tensors that stay.

#   R = rows of a pass, padding included, W = width of the verifier's states
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor

from polybasic.chain.formats.plan import MAX_TREE_ROWS, Window
from polybasic.chain.kernels.torch.rows import causal_rows
from polybasic.chain.model.decoder import Decoder
from polybasic.chain.model.device_model import DeviceModel
from polybasic.deploy.graphs.capture import Graphs
from polybasic.deploy.rounds.cache import KeyValueCache

Captured = tuple[str, Hashable, Callable[[], None]]
"""What is captured: its name for people, its key, and the function."""
ROW_BUCKETS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, MAX_TREE_ROWS)
"""Rows of captured passes: others are filled up to the next of these."""
MAX_CAPTURED_ROWS = 64
"""Of a pass outside of rounds; longer ones are left to kernels for many rows."""
PADDING = 0
"""The token of rows that only fill up."""


def bucket_of(rows: int, buckets: Sequence[int] = ROW_BUCKETS) -> int:
    """The least bucket of at least so many rows; behind the last in steps of 64."""
    if rows > buckets[-1]:
        return -(-rows // 64) * 64
    return buckets[bisect_left(buckets, rows)]


def device_model(decoder: Decoder) -> DeviceModel:
    """The decoder's passes on the device, which it has."""
    assert decoder.device_model is not None
    return decoder.device_model


class Numbers:
    """Whole numbers that the host hands to captured functions: int64 [size] on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.values = torch.zeros(size, dtype=torch.int64, device=device)

    def set(self, numbers: Sequence[int]) -> None:
        """Set the first numbers; those behind them keep their values.

        The host does not wait: memory that is not pinned is copied aside before the call returns.
        """
        given = torch.tensor(numbers, dtype=torch.int64)
        self.values[: len(numbers)].copy_(given, non_blocking=True)


class CausalPass:
    """A pass over consecutive tokens of one number of rows.

    Attributes:
        states: [R, W] of the last run; the next one writes over them.
    """

    def __init__(self, decoder: Decoder, cache: KeyValueCache, rows: int) -> None:
        self.decoder, self.cache, self.num_rows = decoder, cache, rows
        self.numbers = Numbers(1 + rows, decoder.device)
        self.states = torch.zeros(
            rows, decoder.states_width, dtype=decoder.dtype, device=decoder.device
        )

    def set(self, prefix: int, token_ids: Sequence[int]) -> None:
        """The tokens of the next run, at most R, behind `prefix` committed rows."""
        padding = [PADDING] * (self.num_rows - len(token_ids))
        self.numbers.set([prefix, *token_ids, *padding])

    def forward(self, window: Window | None) -> None:
        """Read the tokens; only tensors that stay are read and written."""
        prefix, token_ids = self.numbers.values[0], self.numbers.values[1:]
        rows = causal_rows(prefix, self.num_rows, window)
        states = device_model(self.decoder).forward(
            token_ids, self.cache.layers, rows, feature_layers=self.decoder.feature_layers
        )
        self.states.copy_(states)


class DevicePasses:
    """The captured passes of one verifier, by their rows."""

    most_rows = MAX_CAPTURED_ROWS

    def __init__(self, name: str, decoder: Decoder, cache: KeyValueCache, graphs: Graphs) -> None:
        self.name, self.decoder, self.cache, self.graphs = name, decoder, cache, graphs
        self._passes: dict[int, CausalPass] = {}

    def read(self, token_ids: Sequence[int], window: Window | None) -> Tensor:
        """States [R, W] of consecutive tokens behind the committed ones."""
        one = self.of(bucket_of(len(token_ids)))
        one.set(self.cache.length, token_ids)
        self.graphs.run(*self._reading(one, window))
        return one.states[: len(token_ids)].clone()

    def captured(self, most_rows: int, window: Window | None) -> Iterator[Captured]:
        """The passes over up to so many rows, for graphs to be captured ahead."""
        most = bucket_of(min(most_rows, MAX_CAPTURED_ROWS))
        for rows in ROW_BUCKETS[: 1 + ROW_BUCKETS.index(most)]:
            yield f"{self.name} over {rows} rows", *self._reading(self.of(rows), window)

    def of(self, rows: int) -> CausalPass:
        """The pass over exactly so many rows."""
        width = self.decoder.states_width
        if rows not in self._passes or self._passes[rows].states.shape[1] != width:
            self._passes[rows] = CausalPass(self.decoder, self.cache, rows)
        return self._passes[rows]

    def _reading(
        self, one: CausalPass, window: Window | None
    ) -> tuple[Hashable, Callable[[], None]]:
        key = "read", self.name, one.num_rows, one.states.shape[1], str(window)
        return key, lambda: one.forward(window)
