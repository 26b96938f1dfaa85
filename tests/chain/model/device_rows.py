"""Passes over rows that the device knows and over the same rows as the host knows them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rows import Rows, consecutive_rows, tree_rows
from polybasic.chain.kernels.torch.executor import TorchExecutor
from polybasic.chain.kernels.torch.rows import (
    DeviceRows,
    device_consecutive_rows,
    device_tree_rows,
)
from polybasic.chain.model.loading import load_decoder
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from tests.checkpoints import VOCAB_SIZE

CPU = torch.device("cpu")
CAPACITY = 128
TOLERANCE = 1e-5
"""Of the largest value, in float32."""
SINKS_AND_LATEST = Window(tokens=16, sinks=4)
FEATURE_LAYERS = (0, 2, 1)
PARENTS = [-1, 0, 0, 1, 2, 2, 5, 6, 7, 8, 9, 10]
TOP_K = 3
BEAMS = [[-1, -1, -1], [0, 0, 2], [4, 3, 5], [6, 6, 7]]
"""Levels of a draft: the provisional row that is each row's parent."""


@contextmanager
def device_path() -> Iterator[None]:
    """What is loaded inside takes rows that only the device knows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYBASIC_KERNELS", "device")
        yield


def load(folder: Path, dtype: torch.dtype = torch.float32) -> TorchExecutor:
    with device_path():
        decoder = load_decoder(read_config(folder), dtype, CPU, CAPACITY)
    assert isinstance(decoder, TorchExecutor)
    assert decoder.runs_on_device
    return decoder


def random_tokens(number: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (number,), generator=generator)


def cache_of(model: Executor) -> KeyValueCache:
    num_layers = len(model.weights.layers)
    return KeyValueCache(model.config, num_layers, CAPACITY, model.dtype, CPU)


Pass = tuple[Rows, DeviceRows]
"""The same rows, as the host and the device know them."""


def block(start: int, end: int, window: Window | None = None) -> Pass:
    known = consecutive_rows(start, end - start, window)
    return known, device_consecutive_rows(torch.tensor(start), end - start, window)


def tree(start: int, parents: Sequence[int], window: Window | None = None) -> Pass:
    ancestors = ancestors_of(parents)
    depths = ancestors.sum(1) - 1
    known = tree_rows(start, parents, window)
    return known, device_tree_rows(torch.tensor(start), depths, ancestors, window)


def ancestors_of(parents: Sequence[int]) -> Tensor:
    """Which rows lie on the path to each, itself included."""
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            ancestors[row] |= ancestors[parent]
    return ancestors


def level_rows(start: int, level: int, window: Window | None = None) -> DeviceRows:
    """One level of a draft, whose rows see those of earlier levels."""
    parents = [parent for beam in BEAMS[: level + 1] for parent in beam]
    rows = slice(level * TOP_K, None)
    columns = start + torch.arange(level + 1).repeat_interleave(TOP_K)
    visible = ancestors_of(parents)[rows]
    return DeviceRows(torch.tensor(start), columns[rows], columns, visible, window)


def both_answers(
    model: TorchExecutor, passes: Sequence[Pass], token_ids: Tensor
) -> tuple[Tensor, Tensor, KeyValueCache, KeyValueCache]:
    """Logits and caches of one pass after another: by the host's rows, and by the device's."""
    caches = cache_of(model), cache_of(model)
    answers: tuple[list[Tensor], list[Tensor]] = ([], [])
    read = 0
    for rows in passes:
        ids = token_ids[read : read + rows[0].num_rows]
        read += rows[0].num_rows
        for found, cache, own_rows in zip(answers, caches, rows, strict=True):
            found.append(model.logits(model.forward(ids, [cache.layers], [own_rows])))
    return torch.cat(answers[0]), torch.cat(answers[1]), *caches


def passes_of(window: Window | None) -> dict[str, list[Pass]]:
    """Blocks over the edge of families' windows, and trees before, at and after it."""
    sequence = {
        "blocks": [block(0, 20, window), block(20, 21, window), block(21, 33, window)],
        "one token after the other": [block(row, row + 1, window) for row in range(30)],
    }
    for start in (2, 19, 23, 60):
        sequence[f"tree after {start}"] = [block(0, start, window), tree(start, PARENTS, window)]
    return sequence


def relative(difference: Tensor, expected: Tensor) -> float:
    return float(difference.abs().max() / expected.abs().max())
