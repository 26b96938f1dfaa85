"""Passes over a few rows that the host knows, of any sequences, as captured graphs take them.

All numbers of a pass, where the caches lie included, are written into tensors that stay. So one
graph serves all passes of as many rows, of whatever sequences; numbers between are padded.

#   R = rows (tokens of one pass), S = sequences, P = most rows of one sequence
#   W = width of the states
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.cuda.attention import Seen, joined_attention, joined_plan
from polybasic.chain.kernels.executor import Layers, Runner
from polybasic.chain.kernels.rows import Rows, narrower_window
from polybasic.chain.kernels.torch.executor import Attend, TorchExecutor

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Of captured passes."""
ROWS_EACH = (1, 8, 16, 32, 64)
"""P of captured passes."""
MAX_SEQUENCES = 64
_OF_SEQUENCE = 4
"""Numbers of a sequence: prefix, first row, number of rows, address."""


@dataclass(frozen=True)
class Size:
    """What a captured pass is of.

    Attributes:
        rows, sequences, rows_each: R, S and P.
        feature_layers: whose inputs are a part of the states.
        has_features: whether the model reads features.
        window: that all of its sequences have.
    """

    rows: int
    sequences: int
    rows_each: int
    feature_layers: tuple[int, ...]
    has_features: bool
    window: Window | None

    @classmethod
    def of(
        cls, rows: Sequence[Rows], feature_layers: tuple[int, ...], has_features: bool
    ) -> "Size | None":
        """The smallest that takes the rows; None if none does."""
        num_rows, window = sum(one.num_rows for one in rows), rows[0].window
        is_taken = 0 < num_rows <= ROWS[-1] and len(rows) <= MAX_SEQUENCES
        if not is_taken or any(one.window != window for one in rows):
            return None
        largest = max(one.num_rows for one in rows)
        return cls(
            _next(ROWS, num_rows),
            1 << (len(rows) - 1).bit_length(),
            _next(ROWS_EACH, largest),
            feature_layers,
            has_features,
            window,
        )

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.sequences} sequences, {self.rows_each} of one at most"


class JoinedPass:
    """A pass of one size: its tensors, and the function over them.

    Attributes:
        states: [R, W] of the last run; the next one overwrites them.
    """

    def __init__(
        self, executor: TorchExecutor, size: Size, cache: Layers, features_width: int
    ) -> None:
        self.executor, self.size, self.capacity = executor, size, cache[0].shape[1]
        device, dtype = executor.device, executor.dtype
        # a layer's addresses are aligned to 16 bytes, for which kernels are compiled
        numbers = 2 * size.rows + _OF_SEQUENCE * max(2, size.sequences)
        self.numbers = torch.zeros(numbers, dtype=torch.int64, device=device)
        kinds = executor.config.kinds
        shape = len(kinds), size.rows, size.rows_each
        self.visible = torch.zeros(shape, dtype=torch.bool, device=device)
        self.windows = [narrower_window(kind, size.window) for kind in kinds]
        width = executor.states_width(size.feature_layers)
        self.states = torch.zeros(size.rows, width, dtype=dtype, device=device)
        self.features = (
            torch.zeros(size.rows, features_width, dtype=dtype, device=device)
            if size.has_features
            else None
        )
        offsets = [[layer.data_ptr() - cache[0].data_ptr()] for layer in cache]
        self._offsets = torch.tensor(offsets, device=device)

    def set(
        self,
        token_ids: Tensor,
        caches: Sequence[Layers],
        rows: Sequence[Rows],
        features: Tensor | None,
    ) -> None:
        """Write the numbers of the next run; the host does not wait for the device."""
        size = self.size
        given = np.zeros(len(self.numbers) - size.rows, np.int64)
        positions, of_sequence = given[: size.rows], given[size.rows :].reshape(_OF_SEQUENCE, -1)
        visible = np.zeros(tuple(self.visible.shape), np.bool_)
        starts = list(accumulate((one.num_rows for one in rows), initial=0))
        for place, (cache, one, first) in enumerate(zip(caches, rows, starts, strict=False)):
            own = slice(first, first + one.num_rows)
            positions[own], seen = _seen(one)
            of_sequence[:, place] = one.start, first, one.num_rows, cache[0].data_ptr()
            for kind, (tokens, sinks) in enumerate(self.windows):
                visible[kind, own, : one.num_rows] = seen & _latest(positions[own], tokens, sinks)
        self.numbers[size.rows :].copy_(torch.from_numpy(given), non_blocking=True)
        self.visible.copy_(torch.from_numpy(visible), non_blocking=True)
        self.numbers[: len(token_ids)].copy_(token_ids)
        if features is not None and self.features is not None:
            self.features[: len(features)].copy_(features)

    def run(self) -> None:
        """The pass, from tensors that stay into `states`."""
        tokens = self.numbers[: self.size.rows]
        operations, layers = self.executor.operations, self.size.feature_layers
        attend, features = self._attend(), self.features
        self.states.copy_(self.executor._pass(operations, tokens, attend, features, layers))

    def _attend(self) -> Attend:
        executor, size = self.executor, self.size
        weights, heads = executor.weights, executor.heads
        positions = self.numbers[size.rows : 2 * size.rows]
        prefix, first_rows, counts, caches = self.numbers[2 * size.rows :].chunk(_OF_SEQUENCE)
        addresses = self._offsets + caches
        seen = [
            Seen(positions, visible, prefix, 0, tokens or 0, sinks, first_rows, counts)
            for visible, (tokens, sinks) in zip(self.visible, self.windows, strict=True)
        ]

        def attend(index: int, qkv: Tensor) -> Tensor:
            kind, own = weights.layers[index].kind, heads[index]
            plan = joined_plan(executor.device, own, self.capacity, size.rows_each, size.sequences)
            rotation = weights.rotary.tables[kind]
            return joined_attention(plan, qkv, addresses[index], seen[kind], own, rotation)

        return attend


class JoinedPasses:
    """The passes of one executor, by their sizes.

    Args:
        runner: runs them.
    """

    def __init__(self, executor: TorchExecutor, runner: Runner) -> None:
        self._executor, self._runner = executor, runner
        self._passes: dict[tuple[Size, tuple[int, int]], JoinedPass] = {}

    def forward(
        self,
        token_ids: Tensor,
        caches: Sequence[Layers],
        rows: Sequence[Rows],
        features: Tensor | None,
        feature_layers: tuple[int, ...],
    ) -> Tensor | None:
        """As `Executor.forward`; None of rows that no size takes, or of caches of two shapes."""
        size = Size.of(rows, feature_layers, features is not None)
        layouts = {_layout(cache) for cache in caches}
        if size is None or len(layouts) > 1:
            return None
        key = size, layouts.pop()
        if key not in self._passes:
            width = 0 if features is None else features.shape[1]
            self._passes[key] = JoinedPass(self._executor, size, caches[0], width)
        one = self._passes[key]
        one.set(token_ids, caches, rows, features)
        self._runner.run(("joined", id(self._executor), *key), one.run, str(size))
        return one.states[: len(token_ids)].clone()


def _next(sizes: Sequence[int], num: int) -> int:
    return sizes[bisect_left(sizes, num)]


def _layout(cache: Layers) -> tuple[int, int]:
    """Rows of each layer, and bytes from the first to the last: layers lie at equal distances."""
    first = cache[0]
    return first.shape[1], cache[-1].data_ptr() - first.data_ptr()


def _seen(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Positions int64 [R], and which provisional rows each row sees, bool [R, R]."""
    num = rows.num_rows
    if rows.paths is None:
        return np.arange(rows.start, rows.end), np.tri(num, dtype=np.bool_)
    seen = np.zeros((num, num), np.bool_)
    for row, path in enumerate(rows.paths):
        seen[row, [place - rows.start for place in path]] = True
    return rows.start + seen.sum(1) - 1, seen


def _latest(positions: np.ndarray, tokens: int | None, sinks: int) -> np.ndarray:
    """Which rows of a sequence's pass a window leaves to each of them, bool [R, R]."""
    if tokens is None:
        return np.ones((1, 1), np.bool_)
    return (positions > positions[:, None] - tokens) | (positions < sinks)
