"""Passes over rows that the host knows, and drafts, of any sequences, in captured graphs.

All numbers of a pass, where the caches lie included, are written into tensors that stay. So one
graph serves all passes of as many rows, of whatever sequences; numbers between are padded.

#   R = rows (tokens of one pass), S = sequences, P = most rows of one sequence
#   W = width of the states
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.cuda.attention import Seen, joined_attention, joined_plan
from polybasic.chain.kernels.cuda.attention_plan import MAX_TICKETS, AttentionPlan
from polybasic.chain.kernels.cuda.products.launch import MAX_ROWS
from polybasic.chain.kernels.drafts import Candidates
from polybasic.chain.kernels.executor import DraftRequest, Layers, Perturbation, Runner
from polybasic.chain.kernels.rows import Rows, narrower_window
from polybasic.chain.kernels.torch.executor import Attend, TorchExecutor
from polybasic.chain.kernels.torch.expansion import Level, expand, expansion

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Of captured passes; beyond `MAX_ROWS` products are PyTorch's."""
ROWS_EACH = (1, 8, 16, 32, 64)
"""P of captured passes."""
MAX_DRAFTED = 16
"""Sequences of one draft: what is between its passes is done for one after the other."""
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
        num_rows, window = sum(read.num_rows for read in rows), rows[0].window
        largest = max(read.num_rows for read in rows)
        is_taken = 0 < num_rows <= ROWS[-1] and largest <= ROWS_EACH[-1]
        if not is_taken or any(read.window != window for read in rows):
            return None
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

    Args:
        plan: of the attention of each layer.
        cache: any of the layout that all have.

    Attributes:
        states: [R, W] of the last run; the next one overwrites them.
    """

    def __init__(
        self,
        executor: TorchExecutor,
        size: Size,
        plan: AttentionPlan,
        cache: Layers,
        features_width: int,
    ) -> None:
        self.executor, self.size, self.plan = executor, size, plan
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
        self._offsets = _offsets(cache)

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
        starts = list(accumulate((read.num_rows for read in rows), initial=0))
        for place, (cache, read, first) in enumerate(zip(caches, rows, starts, strict=False)):
            own = slice(first, first + read.num_rows)
            positions[own], seen = _seen(read)
            of_sequence[:, place] = read.start, first, read.num_rows, cache[0].data_ptr()
            for kind, (tokens, sinks) in enumerate(self.windows):
                visible[kind, own, : read.num_rows] = seen & _latest(positions[own], tokens, sinks)
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
        self.states.copy_(self.executor.run_layers(operations, tokens, attend, features, layers))

    def _attend(self) -> Attend:
        size = self.size
        positions = self.numbers[size.rows : 2 * size.rows]
        prefix, first_rows, counts, caches = self.numbers[2 * size.rows :].chunk(_OF_SEQUENCE)
        addresses = self._offsets + caches
        seen = [
            Seen(positions, visible, prefix, 0, tokens or 0, sinks, first_rows, counts)
            for visible, (tokens, sinks) in zip(self.visible, self.windows, strict=True)
        ]
        return _attend(self.executor, self.plan, seen, addresses)


@dataclass(frozen=True)
class DraftSize:
    """What a captured draft is of: so many sequences, and what is the same of all of them."""

    sequences: int
    depth: int
    top_k: int
    window: Window | None
    has_noise: bool

    @classmethod
    def of(cls, request: DraftRequest) -> "DraftSize":
        """Of one sequence."""
        has_noise = request.perturbation is not None
        return cls(1, request.depth, request.top_k, request.window, has_noise)

    @property
    def most_sequences(self) -> int:
        """Of one draft, whose levels are passes over few rows."""
        return min(MAX_DRAFTED, MAX_ROWS // self.top_k)

    def __str__(self) -> str:
        return f"drafts of {self.sequences} sequences, depth {self.depth}, top {self.top_k}"


class JoinedDraft:
    """The drafts of several sequences, level by level together.

    Absent sequences are copies of the first: they write what it writes. For the arguments see
    `JoinedPass`.
    """

    def __init__(
        self, executor: TorchExecutor, size: DraftSize, plan: AttentionPlan, cache: Layers
    ) -> None:
        self.executor, self.size, self.plan = executor, size, plan
        device, num, config = executor.device, size.sequences, executor.config
        self.numbers = torch.zeros(2 * max(2, num), dtype=torch.int64, device=device)
        self.states = torch.zeros(num, config.hidden_size, dtype=executor.dtype, device=device)
        self.scales = torch.ones(num, device=device)
        self.noise = (
            torch.zeros(num, size.depth, config.vocab_size, device=device)
            if size.has_noise
            else None
        )
        self.counts = torch.full((num,), size.top_k, dtype=torch.int64, device=device)
        self.first_rows = torch.arange(num, device=device) * size.top_k
        self._offsets = _offsets(cache)
        num_found = size.top_k + (size.depth - 1) * size.top_k**2
        self.tokens = torch.zeros(num, num_found, dtype=torch.int64, device=device)
        self.scores = torch.zeros(num, num_found, device=device)
        shape = num, size.depth - 1, size.top_k
        self.beams = torch.zeros(shape, dtype=torch.int64, device=device)

    def set(self, requests: Sequence[DraftRequest]) -> None:
        """Write the numbers of the next run; the host does not wait for the device."""
        num = self.size.sequences
        given = [*requests, *[requests[0]] * (num - len(requests))]
        numbers = torch.zeros(2, len(self.numbers) // 2, dtype=torch.int64)
        numbers[0, :num] = torch.tensor([request.start for request in given])
        numbers[1, :num] = torch.tensor([request.cache[0].data_ptr() for request in given])
        self.numbers.copy_(numbers.flatten(), non_blocking=True)
        states = [request.state[:, : self.states.shape[1]] for request in given]
        torch.cat(states, out=self.states)
        if self.noise is None:
            return
        for place, request in enumerate(given):
            assert request.perturbation is not None
            self.scales[place].fill_(request.perturbation.scale)
            self.noise[place].copy_(request.perturbation.added[: self.size.depth])

    def run(self) -> None:
        """The drafts, from tensors that stay into others."""
        executor, size, num = self.executor, self.size, self.size.sequences
        operations, weights = executor.operations, executor.weights
        starts, caches = self.numbers.chunk(2)
        starts, addresses = starts[:num], self._offsets + caches
        logits = executor.logits_on_device(self.states)
        works = [
            expansion(
                logits[place : place + 1],
                operations,
                self.states[place : place + 1],
                starts[place],
                size.depth,
                size.top_k,
                weights.draft_token_ids,
                size.window,
                None if self.noise is None else Perturbation(self.scales[place], self.noise[place]),
            )
            for place in range(num)
        ]
        run = partial(self._level, starts, addresses)
        for place, found in enumerate(expand(works, run)):
            self.tokens[place].copy_(found.tokens)
            self.scores[place].copy_(found.scores)
            self.beams[place].copy_(found.beams)

    def found(self, num: int) -> list[Candidates]:
        """What the last run drafted for the first sequences."""
        parts = self.tokens[:num].clone(), self.scores[:num].clone(), self.beams[:num].clone()
        return [Candidates(self.size.top_k, *tensors) for tensors in zip(*parts, strict=True)]

    def _level(
        self, starts: Tensor, addresses: Tensor, levels: Sequence[Level]
    ) -> list[tuple[Tensor, Tensor]]:
        """States and logits of a level of each sequence, in one pass."""
        executor, size = self.executor, self.size
        states = torch.cat([level.states for level in levels])
        positions = torch.cat([level.rows.positions for level in levels])
        seen = []
        for kind in executor.config.kinds:
            spans = [level.rows.span_of(kind) for level in levels]
            visible = torch.cat([span.visible for span in spans])
            seen.append(
                Seen(
                    positions, visible, starts, levels[0].rows.first, spans[0].tokens,
                    spans[0].sinks, self.first_rows, self.counts,
                )
            )  # fmt: skip
        attend = _attend(executor, self.plan, seen, addresses)
        found = executor.run_layers(
            executor.operations,
            torch.cat([level.tokens for level in levels]),
            attend,
            states if executor.weights.is_head else None,
            (),
        )
        logits = executor.logits_on_device(found)
        return list(zip(found.split(size.top_k), logits.split(size.top_k), strict=True))


class JoinedPasses:
    """The passes and drafts of one executor, by their sizes.

    Args:
        runner: runs them.
    """

    def __init__(self, executor: TorchExecutor, runner: Runner) -> None:
        self._executor, self._runner = executor, runner
        self._passes: dict[tuple[Size, tuple[int, int]], JoinedPass | None] = {}
        self._drafts: dict[tuple[DraftSize, tuple[int, int]], JoinedDraft] = {}

    def forward(
        self,
        token_ids: Tensor,
        caches: Sequence[Layers],
        rows: Sequence[Rows],
        features: Tensor | None,
        feature_layers: tuple[int, ...],
    ) -> Tensor | None:
        """As `Executor.forward`; None of rows that no size takes, of too many heads for one launch
        of attention, or of caches of two shapes."""
        size = Size.of(rows, feature_layers, features is not None)
        layouts = {_layout(cache) for cache in caches}
        if size is None or len(layouts) > 1:
            return None
        key = size, layouts.pop()
        if key not in self._passes:
            plan = self._plan(caches[0], size.rows_each, size.sequences)
            width = 0 if features is None else features.shape[1]
            self._passes[key] = (
                JoinedPass(self._executor, size, plan, caches[0], width)
                if plan.num_units <= MAX_TICKETS
                else None
            )
        joined = self._passes[key]
        if joined is None:
            return None
        joined.set(token_ids, caches, rows, features)
        self._runner.run(("joined", id(self._executor), *key), joined.run, str(size))
        return joined.states[: len(token_ids)].clone()

    def drafts(self, requests: Sequence[DraftRequest]) -> list[Candidates]:
        """As `Executor.drafts`; levels beyond the least score are drafted, too."""
        found: dict[int, Candidates] = {}
        groups: dict[tuple[DraftSize, tuple[int, int]], list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault((DraftSize.of(request), _layout(request.cache)), []).append(place)
        for (size, layout), places in groups.items():
            for first in range(0, len(places), size.most_sequences):
                own = places[first : first + size.most_sequences]
                asked = [requests[place] for place in own]
                found |= zip(own, self._drafted(size, layout, asked), strict=True)
        return [found[place] for place in range(len(requests))]

    def _drafted(
        self, size: DraftSize, layout: tuple[int, int], requests: Sequence[DraftRequest]
    ) -> list[Candidates]:
        num = min(size.most_sequences, 1 << (len(requests) - 1).bit_length())
        size = replace(size, sequences=num)
        key = size, layout
        if key not in self._drafts:
            cache = requests[0].cache
            plan = self._plan(cache, size.top_k, num)
            self._drafts[key] = JoinedDraft(self._executor, size, plan, cache)
        draft = self._drafts[key]
        draft.set(requests)
        self._runner.run(("drafts", id(self._executor), *key), draft.run, str(size))
        return draft.found(len(requests))

    def _plan(self, cache: Layers, rows_each: int, num_sequences: int) -> AttentionPlan:
        """Of the attention of each layer: all have as many heads, and as many rows in caches."""
        device, heads = self._executor.device, self._executor.heads[0]
        return joined_plan(device, heads, cache[0].shape[1], rows_each, num_sequences)


def _attend(
    executor: TorchExecutor, plan: AttentionPlan, seen: Sequence[Seen], addresses: Tensor
) -> Attend:
    """Attention of all layers, given what each kind of them sees and each layer's addresses."""
    weights = executor.weights

    def attend(index: int, qkv: Tensor) -> Tensor:
        kind, heads = weights.layers[index].kind, executor.heads[index]
        rotation = weights.rotary.tables[kind]
        return joined_attention(plan, qkv, addresses[index], seen[kind], heads, rotation)

    return attend


def _offsets(cache: Layers) -> Tensor:
    """Bytes int64 [layers, 1] from the first layer to each."""
    offsets = [[layer.data_ptr() - cache[0].data_ptr()] for layer in cache]
    return torch.tensor(offsets, device=cache[0].device)


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
