"""Decoders on both paths, and the passes that are compared."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polybasic.chain.formats.config import read_config
from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rows import consecutive_rows, tree_rows
from polybasic.chain.kernels.torch.rows import DeviceRows, device_consecutive_rows, device_tree_rows
from polybasic.chain.model.loading import load_decoder
from polybasic.deploy.rounds.cache import KeyValueCache
from tests.chain.native_models import eager
from tests.checkpoints import FAMILIES, VOCAB_SIZE

CPU = torch.device("cpu")
CAPACITY = 128
TOLERANCE = 1e-5
"""Of the largest value, in float32."""
SINKS_AND_LATEST = Window(tokens=16, sinks=4)
FEATURE_LAYERS = (0, 2, 1)
CASES = [*FAMILIES, "llama-biases", "qwen-windows", "qwen3-biases"]
PARENTS = [-1, 0, 0, 1, 2, 2, 5, 6, 7, 8, 9, 10]
TOP_K = 3
BEAMS = [[-1, -1, -1], [0, 0, 2], [4, 3, 5], [6, 6, 7]]
"""Levels of a draft: the provisional row that is each row's parent."""


@contextmanager
def device_path() -> Iterator[None]:
    """What is loaded inside runs on the device path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYBASIC_KERNELS", "device")
        yield


def load_eager(folder: Path, dtype: torch.dtype = torch.float32) -> Executor:
    with eager():
        return load_decoder(read_config(folder), dtype, CPU, CAPACITY)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Executor:
    with device_path():
        decoder = load_decoder(read_config(folder), dtype, CPU, CAPACITY)
    assert decoder.device_model is not None
    assert decoder.native is None
    return decoder


def random_tokens(number: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (number,), generator=generator)


def cache_of(model: Executor | Executor) -> KeyValueCache:
    num_layers = model.config.num_layers if isinstance(model, Executor) else 1
    return KeyValueCache(model.config, num_layers, CAPACITY, model.dtype, CPU)


# Passes: how rows of a sequence are read, by the two paths


Pass = tuple[Attend, DeviceRows]
"""The same rows, as each path takes them."""


def block(start: int, end: int, window: Window | None = None) -> Pass:
    return consecutive_rows(start, end - start, window), device_consecutive_rows(
        torch.tensor(start), end - start, window
    )


def tree(start: int, parents: Sequence[int], window: Window | None = None) -> Pass:
    ancestors = ancestors_of(parents)
    depths = ancestors.sum(1) - 1
    return tree_rows(start, parents, window), device_tree_rows(
        torch.tensor(start), depths, ancestors, window
    )


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
    expected: Executor, found: Executor, passes: Sequence[Pass], token_ids: Tensor
) -> tuple[Tensor, Tensor, KeyValueCache, KeyValueCache]:
    """Logits and caches of one pass after another, by the eager path and on the device."""
    model = found.device_model
    assert model is not None
    caches = cache_of(expected), cache_of(found)
    answers: tuple[list[Tensor], list[Tensor]] = ([], [])
    read = 0
    for attend, rows in passes:
        ids = token_ids[read : read + rows.num_rows]
        read += rows.num_rows
        states = expected.forward(ids, [caches[0].layers], attend)
        answers[0].append(expected.logits(states))
        states = model.forward(ids, [caches[1].layers], rows, feature_layers=found.feature_layers)
        answers[1].append(model.logits(states))
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


@torch.inference_mode()
def largest_differences(expected: Executor, found: Executor) -> dict[str, float]:
    """Of logits and caches, relative to the largest value of each."""
    differences = {}
    for window in (None, SINKS_AND_LATEST):
        for name, passes in passes_of(window).items():
            logits, ours, cache, our_cache = both_answers(
                expected, found, passes, random_tokens(CAPACITY)
            )
            differences[f"{name}, {window}"] = max(
                relative(ours - logits, logits),
                relative(our_cache.block - cache.block, cache.block),
            )
    return differences
