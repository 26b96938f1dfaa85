"""Rows of several sequences in one pass: each gets what it gets alone, on every executor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels import selection
from polybasic.chain.kernels.cpu import executor as cpu
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rows import Rows, consecutive_rows, split_rows, tree_rows
from polybasic.chain.kernels.torch.backends import DeviceBackend
from polybasic.chain.kernels.torch.rows import DeviceRows
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from tests.chain.native_models import CONFIG, cache_of, decoder, head_of, threads

PARENTS = [-1, 0, 0, 1, 2, 2, 5]
EXECUTORS = ["cpu float32", "cpu bfloat16", "cpu 4 bits", "torch", "device", "cuda"]
ROUNDING = 1e-5
"""Of the largest value in float32: products over other numbers of rows add in another order."""


@dataclass(frozen=True)
class Continued:
    """A text that was read, and the rows that are read after it."""

    prompt: int
    rows: Callable[[int], Rows]

    @property
    def read(self) -> Rows:
        return self.rows(self.prompt)


MIXED = [
    Continued(20, lambda start: tree_rows(start, PARENTS)),
    Continued(0, lambda start: consecutive_rows(start, 33)),
    Continued(41, lambda start: consecutive_rows(start, 1)),
    Continued(7, lambda start: tree_rows(start, PARENTS, Window(tokens=4, sinks=1))),
    Continued(60, lambda start: consecutive_rows(start, 12, Window(tokens=16, sinks=2))),
    Continued(700, lambda start: tree_rows(start, PARENTS)),
    Continued(600, lambda start: consecutive_rows(start, 2)),
]


@pytest.fixture(params=EXECUTORS)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Executor:
    name, _, kind = request.param.partition(" ")
    if name == "cuda":
        pytest.importorskip("triton")
        from polybasic.chain.kernels.cuda.executor import CudaExecutor

        monkeypatch.setattr(selection, "DeviceBackend", partial(DeviceBackend, kind=CudaExecutor))
    wanted = {"cpu": "native", "torch": "eager"}.get(name, "device")
    monkeypatch.setenv("POLYBASIC_KERNELS", wanted)
    dtype = torch.float32 if kind in ("", "float32") else torch.bfloat16
    found = decoder(dtype, "int4" if kind == "4 bits" else "dense")
    assert found.name == {"device": "torch"}.get(name, name)
    return found


def random_ids(num: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, CONFIG.vocab_size, (num,), generator=generator)


def after_prompts(model: Executor, sequences: Sequence[Continued]) -> list[KeyValueCache]:
    caches = []
    for seed, sequence in enumerate(sequences):
        cache = cache_of(model)
        if sequence.prompt:
            prompt = consecutive_rows(0, sequence.prompt)
            model.forward(random_ids(sequence.prompt, seed), [cache.layers], [prompt])
        caches.append(cache)
    return caches


def taken(model: Executor, rows: Rows) -> Rows | DeviceRows:
    """As the executor's own rounds give them."""
    return DeviceRows.of(rows, model.device) if model.runs_on_device else rows


def copies_of(model: Executor, caches: Sequence[KeyValueCache]) -> list[KeyValueCache]:
    copies = [cache_of(model) for _ in caches]
    for copy, cache in zip(copies, caches, strict=True):
        copy.block.copy_(cache.block)
    return copies


NUMS = [(name, num) for name in EXECUTORS for num in (2, 3, 7) if name != "cuda" or num == 7]
"""Kernels that are interpreted take the most, among which are the few."""


@torch.inference_mode()
@pytest.mark.parametrize(("model", "num"), NUMS, indirect=["model"])
def test_each_sequence_gets_what_it_gets_alone(model: Executor, num: int) -> None:
    sequences = MIXED[:num]
    rows = [sequence.read for sequence in sequences]
    ids = [random_ids(part.num_rows, 100 + seed) for seed, part in enumerate(rows)]
    caches = after_prompts(model, sequences)
    alone_caches, others = copies_of(model, caches), copies_of(model, caches)
    alone = [
        model.forward(own_ids, [cache.layers], [taken(model, part)])  # type: ignore[list-item]
        for own_ids, cache, part in zip(ids, alone_caches, rows, strict=True)
    ]
    layers = [cache.layers for cache in caches]
    same = torch.equal if model.name == "cpu" else is_close
    for num_threads in (3, 2, 1) if model.name == "cpu" else (1,):
        with threads(num_threads):
            together = model.forward(torch.cat(ids), layers, [taken(model, part) for part in rows])  # type: ignore[misc]
        assert same(together, torch.cat(alone))
        for cache, own in zip(caches, alone_caches, strict=True):
            assert same(cache.block, own.block)
    # each with the cache of another is something else
    turned = model.forward(
        torch.cat(ids),
        [cache.layers for cache in (*others[1:], others[0])],
        [taken(model, part) for part in rows],  # type: ignore[misc]
    )
    assert not is_close(turned, together)


def is_close(found: Tensor, expected: Tensor) -> bool:
    difference = (found.float() - expected.float()).abs().max()
    return bool(difference <= ROUNDING * expected.float().abs().max())


@torch.inference_mode()
def test_heads_read_several_sequences(model: Executor) -> None:
    head = head_of(model)
    rows = [consecutive_rows(0, 9), tree_rows(5, PARENTS), consecutive_rows(12, 3)]
    num_rows = sum(own_rows.num_rows for own_rows in rows)
    ids, features = random_ids(num_rows, 1), torch.randn(num_rows, CONFIG.hidden_size)
    features = features.to(model.dtype)
    caches = [[torch.randn_like(cache_of(head, 1).layers[0])] for _ in rows]
    copies = [[cache[0].clone()] for cache in caches]
    together = head.forward(ids, caches, rows, features)
    alone, first = [], 0
    for cache, own_rows in zip(copies, rows, strict=True):
        part = slice(first, first + own_rows.num_rows)
        alone.append(head.forward(ids[part], [cache], [own_rows], features[part]))
        first = part.stop
    same = torch.equal if model.name == "cpu" else is_close
    assert same(together, torch.cat(alone))


@torch.inference_mode()
def test_a_pass_of_too_many_rows_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(torch.float32)
    rows = [consecutive_rows(0, 400), tree_rows(0, PARENTS), consecutive_rows(0, 300)]
    ids = random_ids(sum(own_rows.num_rows for own_rows in rows), 3)
    calls: list[int] = []
    call = model.kernels.library.polybasic_pass  # type: ignore[attr-defined]
    monkeypatch.setattr(
        model.kernels.library,  # type: ignore[attr-defined]
        "polybasic_pass",
        lambda *arguments: (calls.append(1), call(*arguments)),
    )
    together = model.forward(ids, [cache_of(model).layers for _ in rows], rows)
    assert len(calls) == -(-len(ids) // cpu.MAX_ROWS)
    alone, first = [], 0
    for own_rows in rows:
        part = ids[first : first + own_rows.num_rows]
        alone.append(model.forward(part, [cache_of(model).layers], [own_rows]))
        first += own_rows.num_rows
    assert torch.equal(together, torch.cat(alone))


def test_rows_are_divided_between_passes_but_trees_are_not() -> None:
    rows = [consecutive_rows(2, 5), tree_rows(0, PARENTS), consecutive_rows(9, 1)]
    passes = list(split_rows(rows, 8))
    shown = [
        [(place, tokens, part.num_rows, part.start) for place, tokens, part in group]
        for group in passes
    ]
    assert shown == [
        [(0, slice(0, 5), 5, 2)],
        [(1, slice(5, 12), 7, 0), (2, slice(12, 13), 1, 9)],
    ]
    assert [
        [(tokens, part.start, part.num_rows) for _, tokens, part in group]
        for group in split_rows(rows[:1], 2)
    ] == [[(slice(0, 2), 2, 2)], [(slice(2, 4), 4, 2)], [(slice(4, 5), 6, 1)]]
