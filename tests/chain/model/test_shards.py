"""Parts of a decoder, each by itself, compute with sums what the whole one computes."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints import shard as shards
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.shard import Shard, check_divisible
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rows import consecutive_rows, tree_rows
from polybasic.chain.model.loading import load_decoder
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from tests.checkpoints import VOCAB_SIZE, write_family
from tests.conftest import write_intermediate, write_target

CPU = torch.device("cpu")
CAPACITY = 64
TOLERANCE = 1e-5
FAMILIES = ("llama2", "llama32", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")
"""Heads of their own, tied embeddings, biases, normed heads, fused matrices, norms after sums."""


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", getattr(request, "param", "native"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def write(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name) / "model"
        if name == "4 bits":
            # ten groups of the MLP's values, which four parts cannot share equally
            shape = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
            write_target(folder, **shape, intermediate_size=640)
            write_intermediate(folder.parent / "packed", folder, 64)
            return folder.parent / "packed"
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
        write_family(folder, name, dtype=torch.float32, hidden_size=128, head_dim=32, **heads)
        return folder

    return write


@dataclass
class Sums:
    """Adds what several threads give, as processes' all-reduce does."""

    count: int

    def __post_init__(self) -> None:
        self._meeting = threading.Barrier(self.count, timeout=60)
        self._given: list[Tensor] = [torch.empty(0)] * self.count

    def of(self, rank: int) -> Callable[[Tensor], Tensor]:
        def all_reduce(values: Tensor) -> Tensor:
            self._given[rank] = values
            self._meeting.wait()
            total = torch.stack(self._given).sum(0)
            self._meeting.wait()
            return total

        return all_reduce


def passes(decoder: Executor) -> tuple[Tensor, Tensor]:
    """States of a prompt and of a tree after it, and the tree's logits."""
    ids = torch.arange(7, 29) % VOCAB_SIZE % decoder.config.vocab_size
    cache = KeyValueCache.of(decoder, CAPACITY)
    with torch.inference_mode():
        prompt = decoder.forward(ids, [cache.layers], [consecutive_rows(0, len(ids))])
        tree = tree_rows(len(ids), [-1, 0, 0, 2])
        branches = decoder.forward(ids[:4], [cache.layers], [tree])
        return torch.cat([prompt, branches]), decoder.logits(branches)


def divided(
    folder: Path, count: int, ranks: list[int] | None = None, is_summed: bool = True
) -> tuple[list[Tensor], Tensor]:
    """States by part, and logits of all parts side by side.

    Args:
        ranks: whose parts of the weights each one loads; default: its own.
    """
    file, sums = read_config(folder), Sums(count)
    found: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * count

    def run(rank: int) -> None:
        shard = Shard((ranks or list(range(count)))[rank], count)
        all_reduce = sums.of(rank) if is_summed else torch.clone
        part = load_decoder(file, torch.float32, CPU, CAPACITY, shard, all_reduce)
        assert part.config.num_kv_heads == file.decoder.num_kv_heads // count
        found[rank] = passes(part)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [states for states, _ in found], torch.cat([logits for _, logits in found], -1)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_compute_what_the_whole_model_computes(
    folders: Callable[[str], Path], family: str, count: int
) -> None:
    folder = folders(family)
    states, logits = passes(load_decoder(read_config(folder), torch.float32, CPU, CAPACITY))
    found, of_parts = divided(folder, count)
    for computed in found:
        torch.testing.assert_close(computed, states, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(of_parts, logits, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("kernels", "tolerance"), [("device", TOLERANCE), ("native", 1e-2)], indirect=["kernels"]
)
@pytest.mark.parametrize("count", [2, 4])
def test_groups_of_four_bits_stay_together(
    folders: Callable[[str], Path], count: int, kernels: None, tolerance: float
) -> None:
    # native kernels round activations to bytes, some of them to the neighbour after another sum
    folder = folders("4 bits")
    states, logits = passes(load_decoder(read_config(folder), torch.float32, CPU, CAPACITY))
    found, of_parts = divided(folder, count)
    scale = logits.abs().max().item()
    torch.testing.assert_close(found[1], states, rtol=0, atol=tolerance * states.abs().max().item())
    torch.testing.assert_close(of_parts, logits, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("fault", ["no sums", "two ranks swapped", "a part twice"])
def test_a_fault_is_noticed(folders: Callable[[str], Path], fault: str) -> None:
    folder = folders("llama2")
    _, logits = passes(load_decoder(read_config(folder), torch.float32, CPU, CAPACITY))
    ranks = {"two ranks swapped": [1, 0], "a part twice": [0, 0]}.get(fault)
    _, found = divided(folder, 2, ranks, is_summed=fault != "no sums")
    assert (found - logits).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("size", [640, 1000, 37])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_parts_are_all_and_nearly_equal(size: int, count: int) -> None:
    for unit in (
        multiple for multiple in (1, 8, 128) if size % multiple == 0 and size // multiple >= count
    ):
        parts = [Shard(rank, count).part(size, unit) for rank in range(count)]
        assert [place for part in parts for place in range(size)[part]] == list(range(size))
        sizes = [part.stop - part.start for part in parts]
        assert max(sizes) - min(sizes) in (0, unit)
        assert sizes[-1] == max(sizes)


def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    write_target(tmp_path / "model", num_attention_heads=8, num_key_value_heads=4, head_dim=32)
    config = read_config(tmp_path / "model").decoder

    def refused(count: int, **changes: int) -> str:
        with pytest.raises(UserError) as error:
            check_divisible([("copy", replace(config, **changes), 128)], count)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "3 processes, 4 key/value heads of copy; use 1 or 2 (" in refused(3)
    assert "256 attended values in groups of 128" in refused(4)
    assert "1 groups of the MLP's 4-bit weights" in refused(2, intermediate_size=128)
    check_divisible([("target", config, None), ("copy", config, 64)], 4)
    assert shards.divides(config, 1, 128) is None
