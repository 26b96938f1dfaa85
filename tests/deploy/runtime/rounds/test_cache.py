"""Rows of a cache, moved by the host and without it."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polybasic.deploy.runtime.rounds import cache
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from tests.chain.native_models import CONFIG, CPU
from tests.deploy.recorded_graphs import RecordedGraphs

CAPACITY = 24


def filled(dtype: torch.dtype = torch.float32) -> KeyValueCache:
    made = KeyValueCache(CONFIG, 3, CAPACITY, dtype, CPU)
    made.block.copy_(torch.randn(made.block.shape, generator=torch.Generator().manual_seed(0)))
    return made


def test_layers_are_parts_of_one_block() -> None:
    made = KeyValueCache(CONFIG, 3, CAPACITY, torch.float32, CPU)
    assert made.block.shape == (3, 2 * CONFIG.num_kv_heads, CAPACITY, CONFIG.head_dim)
    assert made.block.abs().sum() == 0
    for index, layer in enumerate(made.layers):
        layer.fill_(index)
        assert layer.is_contiguous()
        assert layer.data_ptr() == made.block[index].data_ptr()
    assert made.block.mean((1, 2, 3)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("kernels", ["native", "eager"])
@pytest.mark.parametrize("rows", [[0, 2, 3, 7], [0, 1, 2], [1, 2, 3, 4, 5], [9], []])
def test_rows_are_kept_in_place(
    rows: list[int], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "eager":
        monkeypatch.setattr(cache, "kernels_for", lambda *_: None)
    made, before = filled(), filled().block
    made.length = 10
    made.keep(rows)
    sources = [*range(10), *(10 + row for row in rows)]
    assert made.length == len(sources)
    assert torch.equal(made.block[:, :, : len(sources)], before[:, :, sources])
    assert torch.equal(made.block[:, :, 20:], before[:, :, 20:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rows", [[0, 2, 3, 7], [1, 2, 3, 4, 5], [5, 3, 4], [4, 4, 4, 4], [0, 1, 2]]
)
def test_rows_move_on_the_device_as_if_all_were_read_before(
    rows: list[int], dtype: torch.dtype
) -> None:
    """Where a row is written that another one is read from, too; captured, then replayed."""
    made, before, graphs = filled(dtype), filled(dtype).block, RecordedGraphs()
    made.length = 9
    first, sources = torch.tensor(0), torch.zeros(len(rows), dtype=torch.int64)
    for start in (10, 3, 16):
        made.block.copy_(before)
        first.fill_(start)
        sources.copy_(start + torch.tensor(rows))
        graphs.run("move", lambda: made.move_on_device(sources, first))
        places = range(start, start + len(rows))
        assert torch.equal(made.block[:, :, places], before[:, :, sources])
        others = [row for row in range(CAPACITY) if row not in places]
        assert torch.equal(made.block[:, :, others], before[:, :, others])
    assert made.length == 9
    assert graphs.counts.replays == 2


class Indexed(TorchDispatchMode):
    """Elements of the largest tensor that was indexed."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__.startswith("index"):
            self.most = max(self.most, args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_on_device", [True, False])
def test_a_large_cache_is_indexed_in_parts(
    is_on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a 7B model's at 8,768 rows, here of 5 layers and a limit of two and a half."""
    made = KeyValueCache(CONFIG, 5, CAPACITY, torch.float16, CPU)
    made.block.copy_(torch.randn(made.block.shape))
    before, layer = made.block.clone(), made.block[0].numel()
    monkeypatch.setattr(cache, "_MAX_INDEXED", 5 * layer // 2)
    with Indexed() as indexed:
        if is_on_device:
            made.move_on_device(torch.tensor([7, 9]), torch.tensor(5))
        else:
            made.move([7, 9], 5)
    assert indexed.most == 2 * layer
    assert torch.equal(made.block[:, :, 5:7], before[:, :, [7, 9]])
