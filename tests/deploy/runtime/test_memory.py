"""Memory stated before loading against the tensors of a loaded chain; refusals."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.readable import readable_bytes
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.plan import MAX_TREE_ROWS, Tree
from polybasic.chain.formats.verify import check_chain
from polybasic.chain.kernels.cpu.library import load_kernels
from polybasic.chain.kernels.torch import packed_weight
from polybasic.chain.model.loading import load_decoder
from polybasic.chain.model.medusa import load_medusa
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime import load as loading
from polybasic.deploy.runtime import memory
from polybasic.deploy.runtime.drafters.head import EagleDrafter
from polybasic.deploy.runtime.memory import Kernels, Layout, Memory, state_memory
from polybasic.deploy.runtime.rounds.lazy_rows import LazyRows
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.checkpoints import write_family
from tests.conftest import PLAN, write_intermediate
from tests.head_kinds import trim, write_eagle3, write_early_exit, write_medusa

pytestmark = pytest.mark.processor
CPU = torch.device("cpu")
LONG_CASES = ("trimmed eagle2", "eagle3", "normed eagle3", "early_exit", "four members")
CONTEXT_TOKENS = 100
Result = TypeVar("Result")


@pytest.fixture(params=["eager", "native", "device"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """What multiplies while a test runs."""
    monkeypatch.setenv("POLYBASIC_KERNELS", "auto" if request.param == "native" else request.param)
    monkeypatch.setattr(memory, "_LIBRARY_BYTES", 0)
    # all of a cache, as if it were full; the profiler sees what PyTorch allocates
    monkeypatch.setattr(LazyRows, "__init__", _filled)
    # some rows of a tiny weight at a time, as of one of real size
    monkeypatch.setattr(packed_weight, "_CODES_AT_ONCE", 1 << 12)
    load_kernels.cache_clear()
    if request.param == "native" and load_kernels() is None:
        pytest.skip("no native kernels here")
    yield request.param
    load_kernels.cache_clear()


def _filled(self: LazyRows, shape: Any, **given: Any) -> None:
    self.tensor, self._memory = torch.zeros(shape, **given), None
    self.shared, self.num_shared, self._num_mapped = [], 0, 0


def allocated_by(run: Callable[[], Result]) -> tuple[Result, int, int]:
    """What a function returns, the bytes of tensors that it leaves, and the most at a time."""
    gc.collect()  # what an earlier test left must not be freed meanwhile
    with torch.profiler.profile(profile_memory=True) as profiler:
        result = run()
    found = profiler.profiler.kineto_results.events()
    events = sorted(
        (event.start_ns(), event.nbytes()) for event in found if event.name() == "[memory]"
    )
    held = list(accumulate(num_bytes for _, num_bytes in events))
    return result, held[-1], max(held)


def state_chain(folder: Path, layout: Layout, **options: Any) -> Memory:
    return state_memory(check_chain(folder), layout, CONTEXT_TOKENS, **options)


@pytest.mark.parametrize("family", ["qwen25", "phi3", "gemma3"])
def test_stated_weights_are_those_that_are_loaded(
    tmp_path: Path, family: str, kernels: Kernels
) -> None:
    write_family(tmp_path / "model", family)
    member = SimpleNamespace(name="target", role="target", kind="decoder")
    config = read_config(tmp_path / "model")
    checked: Any = SimpleNamespace(loaded=[member], configs={"target": config})
    _, stays, _ = allocated_by(lambda: load_decoder(config, torch.float32, CPU, 1))
    layout = loading.layout_of(CPU, torch.float32, config.decoder)
    assert layout.kernels == kernels
    stated = state_memory(checked, layout, CONTEXT_TOKENS)
    assert stays == pytest.approx(stated.members["target"]["weights"], rel=0.05)


@pytest.mark.parametrize("intermediate_size", [256, 288])
def test_stated_weights_in_4_bits_are_those_that_are_loaded(
    tmp_path: Path, intermediate_size: int, kernels: Kernels
) -> None:
    write_family(tmp_path / "model", "qwen3", intermediate_size=intermediate_size)
    group_size = 128 if intermediate_size == 256 else 32
    write_intermediate(tmp_path / "int4", tmp_path / "model", group_size)
    member = SimpleNamespace(name="small", role="intermediate", kind="awq")
    config = read_config(tmp_path / "int4")
    checked: Any = SimpleNamespace(loaded=[member], configs={"small": config})
    decoder, stays, _ = allocated_by(
        lambda: load_decoder(config, torch.bfloat16, CPU, 1, is_checked=True)
    )
    layout = loading.layout_of(CPU, torch.bfloat16, config.decoder)
    assert layout.rounds_checked == (kernels == "native")
    stated = state_memory(checked, layout, CONTEXT_TOKENS)
    assert stays == pytest.approx(stated.members["small"]["weights"], rel=0.03)
    if kernels == "native":
        # a half of the bytes in bfloat16
        projection = sum(tensor.nbytes for tensor in decoder.weights.lm_head.tensors)
        assert projection == config.decoder.vocab_size * config.decoder.hidden_size * 34 / 32


def test_stated_weights_of_heads_by_place_are_those_that_are_loaded(
    tiny_chain_parts: Any, kernels: Kernels
) -> None:
    write_medusa(tiny_chain_parts.draft, tiny_chain_parts.target, "hydra")
    target, head = (read_config(each) for each in (tiny_chain_parts.target, tiny_chain_parts.draft))
    decoder = load_decoder(target, torch.bfloat16, CPU, 1)
    member = SimpleNamespace(name="draft", role="drafter", kind="hydra")
    checked: Any = SimpleNamespace(loaded=[member], configs={"draft": head})
    loaded, stays, _ = allocated_by(lambda: load_medusa(head, decoder, 1))
    layout = loading.layout_of(CPU, torch.bfloat16, target.decoder)
    assert layout.kernels == kernels
    stated = state_memory(checked, layout, CONTEXT_TOKENS)
    assert stays == pytest.approx(stated.members["draft"]["weights"], rel=0.1)
    cache = EagleDrafter(loaded, Tree(depth=2, top_k=2, rows=4), CONTEXT_TOKENS + MAX_TREE_ROWS)
    assert stated.members["draft"]["cache"] == cache.observed.inputs.nbytes


@pytest.mark.parametrize(
    "case", ["eagle2", *(pytest.param(case, marks=pytest.mark.proof) for case in LONG_CASES)]
)
def test_what_is_stated_of_a_chain_is_enough(
    tiny_chain_parts: Any, tiny_four_chain_parts: Any, tmp_path: Path, case: str, kernels: Kernels
) -> None:
    parts = tiny_four_chain_parts if case == "four members" else tiny_chain_parts
    changes = {}
    if case == "trimmed eagle2":
        trim(parts.draft, torch.arange(32))
    elif case.endswith("eagle3"):
        # native kernels leave a head that adds to a normed feature to PyTorch's operations
        variants = ("norm_before_residual",) if case == "normed eagle3" else ()
        write_eagle3(parts.draft, parts.target, variants=variants)
        intermediate, draft = parts.parts
        changes = {"parts": [intermediate, replace(draft, kind="eagle3")]}
    elif case == "early_exit":
        write_early_exit(parts.draft, parts.target, adapter_rank=64)
        intermediate, draft = parts.parts
        plan = PLAN.model_copy(update={"members": ("target", "draft")})
        changes = {"parts": [intermediate, replace(draft, kind="early_exit")], "plan": plan}
    folder = tmp_path / "chain"
    parts.package(folder, **changes)
    loaded, stays, loading = allocated_by(
        lambda: load_chain(folder, dtype="bfloat16", context_tokens=CONTEXT_TOKENS)
    )
    prompt = [5, 9, 2] * 30
    _, _, answering = allocated_by(lambda: list(loaded.stream_ids(prompt, 8, Sampling(1, seed=0))))
    stated = loaded.memory
    assert stated.layout.kernels == kernels
    assert stated.staying_bytes == pytest.approx(stays, rel=0.1)
    # the files that weights are mapped from count as tensors here
    mapped = max(file.stat().st_size for file in folder.rglob("*.safetensors"))
    assert max(loading - mapped, stays + answering) < stated.peak_bytes
    # a cache for each is more than is there
    separate = state_chain(folder, stated.layout, share_caches=False)
    taken, shared = (
        sum(parts["cache"] for parts in statement.members.values())
        for statement in (separate, stated)
    )
    assert taken - shared >= stated.members["target"]["cache"] > 0
    if case == "normed eagle3" and kernels == "native":
        # laid out as its target it would take less than half
        assert stated.members["draft"]["weights"] > 2 * separate.members["draft"]["weights"]


def test_a_layout_decides_what_weights_take(tiny_chain: Path) -> None:
    def weights_in(device: str, kernels: Kernels, *widened: str) -> list[int]:
        stated = state_chain(tiny_chain, Layout(device, "bfloat16", kernels, widened))
        return [parts["weights"] for parts in stated.members.values()]

    packed, dense = weights_in("cuda", "device"), weights_in("cuda", "eager")
    assert packed[0] == dense[0]
    assert all(size < 0.5 * other for size, other in zip(packed[1:], dense[1:], strict=True))
    wide = weights_in("cpu", "eager", "bfloat16")
    for size, other in zip(wide, weights_in("cpu", "eager"), strict=True):
        assert 1.5 * other < size < 2 * other


def test_bytes_of_the_context_are_stated_by_the_thousand(tiny_chain: Path) -> None:
    short, long = (load_chain(tiny_chain, context_tokens=num).memory for num in (20, 120))
    grown = long.staying_bytes - short.staying_bytes
    assert grown == pytest.approx(short.bytes_per_1000_tokens / 10, rel=1e-3)
    assert long.bytes_per_1000_tokens == pytest.approx(short.bytes_per_1000_tokens, rel=1e-3)


def test_too_little_memory_is_refused_before_anything_is_loaded(
    tiny_chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> Chain:
        return load_chain(tiny_chain, dtype="float32", context_tokens=CONTEXT_TOKENS)

    needed = load().memory.peak_bytes
    monkeypatch.setattr(loading, "available_bytes", lambda _: needed)
    load()
    monkeypatch.setattr(loading, "available_bytes", lambda _: needed - 1)
    monkeypatch.setattr(loading, "load_decoder", None)
    with pytest.raises(UserError) as refused:
        load()
    line = str(refused.value)
    assert line.startswith(f"not enough memory: {readable_bytes(needed)} needed for 100 tokens of")
    assert "of context in float32" in line
    assert "use a shorter context (1,000 tokens take 2.6 MB) or dtype bfloat16" in line
