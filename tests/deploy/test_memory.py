"""Stated memory against the tensors that are loaded; what an answer leaves; refusals."""

import dataclasses
import gc
import json
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from polybasic.chain.errors import UserError
from polybasic.chain.formats.manifest import (
    MAX_TREE_ROWS,
    NUM_PROBABILITY_BINS,
    AdaptiveFlush,
    Flush,
    Member,
    Plan,
    Reference,
    Tree,
)
from polybasic.chain.formats.package import Part
from polybasic.chain.formats.verify import check_chain
from polybasic.chain.kernels.cpu.library import load_kernels
from polybasic.chain.model import linear
from polybasic.chain.model.loading import load_decoder
from polybasic.deploy import Chain, load_chain
from polybasic.deploy import chain as runtime
from polybasic.deploy import memory as memory_of_chains
from polybasic.deploy.hardware import available_bytes
from polybasic.deploy.memory import Memory, state_memory
from polybasic.deploy.rounds.sampling import GreedyRows, GreedySampler, Sampling
from polybasic.deploy.rounds.stages import TreeStage
from polybasic.deploy.weight_memory import Kernels, Layout
from tests.checkpoints import write_family
from tests.head_kinds import trim, write_eagle3

CPU = torch.device("cpu")
CONTEXT_TOKENS = 100
DRAFTED = torch.arange(64)
PLAN = Plan(members=("target",), tree=Tree(depth=3, top_k=2, rows=6))


@pytest.fixture(params=["eager", "native", "device"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """What multiplies while a test runs."""
    if request.param == "native":
        if load_kernels() is None:
            pytest.skip("no native kernels here")
    elif request.param == "device":
        monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    else:
        for module in (linear, runtime):
            monkeypatch.setattr(module, "kernels_for", lambda *_: None)
    return request.param


def kept_bytes(*roots: object, seen: set[Any]) -> int:
    """Bytes of all tensors that objects hold.

    Args:
        seen: storages and objects that were counted before; is added to.
    """
    total, pending = 0, list(roots)
    while pending:
        one = pending.pop()
        if isinstance(one, Tensor):
            key, num_bytes = storage_of(one)
            total += num_bytes if key not in seen else 0
            seen.add(key)
        elif not isinstance(one, ModuleType | type) and id(one) not in seen:
            seen.add(id(one))
            pending += children_of(one)
    return total


def storage_of(tensor: Tensor) -> tuple[Any, int]:
    if tensor.is_mkldnn:
        return ("mkldnn", id(tensor)), torch.ops.mkldnn._nbytes(tensor)
    storage = tensor.untyped_storage()
    return ("storage", storage.data_ptr()), storage.nbytes()


def children_of(one: object) -> list[Any]:
    if isinstance(one, dict):
        return list(one.values())
    if isinstance(one, list | tuple):
        return list(one)
    if isinstance(one, FunctionType):
        return [cell.cell_contents for cell in one.__closure__ or ()]
    return list(getattr(one, "__dict__", {}).values())


def loaded_bytes(chain: Chain) -> dict[str, int]:
    """By member; what several share counts for the first."""
    engine, seen = chain.engine, set()
    found = {}
    for member in chain.manifest.members:
        name = member.name
        if name in engine.verifiers:
            verifier = engine.verifiers[name]
            held = [verifier.decoder, getattr(verifier.decoder, "native", None), verifier.cache]
        else:
            model = engine.models.drafters[name]
            drafter = engine.drafters.named(name, chain.plan.tree)
            held = [model, getattr(model, "native", None), vars(drafter)]
        found[name] = kept_bytes(*held, seen=seen)
    return found


def stated_bytes(memory: Memory) -> dict[str, int]:
    return {name: sum(kinds.values()) for name, kinds in memory.members.items()}


def state_decoder(folder: Path, layout: Layout) -> Memory:
    member = Member(
        name="target",
        role="target",
        kind="decoder",
        reference=Reference(path="target"),
        dtype=layout.dtype,
        num_parameters=1,
        num_bytes=1,
        files={"model.safetensors": "0" * 64},
    )
    return state_memory([member], {"target": folder}, folder, PLAN, layout, CONTEXT_TOKENS)


@pytest.mark.parametrize(
    "family", ["llama2", "vicuna", "llama32", "qwen25", "qwen3", "phi3", "gemma2", "gemma3"]
)
def test_stated_weights_are_those_that_are_loaded(
    tmp_path: Path, family: str, kernels: Kernels
) -> None:
    write_family(tmp_path / family, family)
    capacity = CONTEXT_TOKENS + MAX_TREE_ROWS
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        layout = Layout("cpu", name, kernels, kernels != "device")
        memory = state_decoder(tmp_path / family, layout)
        decoder = load_decoder(tmp_path / family, dtype, CPU, capacity)
        found = kept_bytes(decoder, getattr(decoder, "native", None), seen=set())
        stated = memory.staying_bytes - memory.members["target"]["cache"]
        assert found == stated
        assert found < memory.loading_bytes < 3 * found


def test_a_tied_lm_head_is_a_copy_only_where_weights_are_laid_out_anew(tmp_path: Path) -> None:
    write_family(tmp_path, "llama32")
    kept, copied = (
        state_decoder(tmp_path, Layout("cuda", "float16", "eager", copies)).members["target"]
        for copies in (False, True)
    )
    assert "lm_head" not in kept
    assert copied["lm_head"] == copied["embedding"] == 320 * 128 * 2


def write_chain(case: str, parts: Any, four: Any, folder: Path) -> None:
    if case == "four members":
        four.package(folder)
    elif case == "draft model":
        small = Part("small", "drafter", "awq", four.small)
        members = ("target", "intermediate", "small")
        plan = Plan(members=members, tree=PLAN.tree, flush={"target": Flush(length=5)})
        intermediate, *_ = four.parts
        four.package(folder, parts=[intermediate, small], plan=plan, training={})
    else:
        token_ids = DRAFTED[::1] if "trimmed" in case else None
        if "eagle3" in case:
            write_eagle3(parts.draft, parts.target, token_ids)
        elif token_ids is not None:
            trim(parts.draft, token_ids)
        intermediate, draft = parts.parts
        kind = "eagle3" if "eagle3" in case else "eagle2"
        parts.package(folder, parts=[intermediate, dataclasses.replace(draft, kind=kind)])


@pytest.mark.parametrize(
    "case",
    ["eagle2", "trimmed eagle2", "eagle3", "trimmed eagle3", "four members", "draft model"],
)
def test_stated_bytes_are_those_of_the_tensors(
    tiny_chain_parts: Any, tiny_four_chain_parts: Any, tmp_path: Path, case: str, kernels: str
) -> None:
    write_chain(case, tiny_chain_parts, tiny_four_chain_parts, tmp_path / "chain")
    chain = load_chain(tmp_path / "chain", context_tokens=CONTEXT_TOKENS)
    memory = chain.memory.stated
    assert memory.layout.kernels == kernels
    stated = stated_bytes(memory)
    assert loaded_bytes(chain) == stated
    assert "cache" not in memory.members["intermediate"]
    # what is not stated is noticed
    target = chain.engine.models.target
    target.forgotten = torch.zeros(3)  # type: ignore[attr-defined]
    assert loaded_bytes(chain)["target"] == stated["target"] + 12
    if kernels == "native":
        models = [*chain.engine.models.decoders.values(), *chain.engine.models.drafters.values()]
        buffers = sum(one.native.workspace_bytes for one in models if one.native is not None)
        assert buffers < memory.workspace_bytes < 1.5 * buffers


def peak_bytes_of(run: Callable[[], object]) -> int:
    """Most bytes of tensors that a function holds at a time beside those before."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        run()
    found = profiler.profiler.kineto_results.events()
    events = sorted((one.start_ns(), one.nbytes()) for one in found if one.name() == "[memory]")
    return max(accumulate(num_bytes for _, num_bytes in events))


@pytest.mark.parametrize("case", ["eagle2", "trimmed eagle3"])
def test_the_device_path_takes_no_more_than_is_stated(
    tiny_chain_parts: Any, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    write_chain(case, tiny_chain_parts, None, tmp_path / "chain")
    loaded = []

    def load() -> None:
        chain = load_chain(tmp_path / "chain", dtype="bfloat16", context_tokens=CONTEXT_TOKENS)
        loaded.append(chain)

    peak, (chain,) = peak_bytes_of(load), loaded
    stated = chain.memory.stated
    assert stated.layout.kernels == "device"
    # the files that weights are mapped from count as tensors here
    mapped = max(one.stat().st_size for one in (tmp_path / "chain").rglob("*.safetensors"))
    assert peak - mapped < stated.loading_bytes < 1.2 * peak
    prompt = [int(token) for token in torch.randint(0, 60, (CONTEXT_TOKENS - 10,))]
    answered = peak_bytes_of(lambda: list(chain.stream_ids(prompt, 8, Sampling(1.0, seed=0))))
    assert answered < stated.workspace_bytes < 4 * answered
    # without what takes weights apart it is too little
    monkeypatch.setattr(memory_of_chains, "_TAKING_APART_BYTES", 0)
    assert state_chain(tmp_path / "chain", stated.layout).workspace_bytes < answered


def state_chain(folder: Path, layout: Layout) -> Memory:
    checked = check_chain(folder)
    manifest = checked.manifest
    return state_memory(
        manifest.members, checked.members, checked.tokenizer, manifest.plan, layout, CONTEXT_TOKENS
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_gpu_holds_what_the_device_path_holds_on_a_cpu(
    tiny_chain: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    chain = load_chain(tiny_chain, dtype=dtype, context_tokens=CONTEXT_TOKENS)
    layout = dataclasses.replace(chain.memory.stated.layout, device="cuda")
    on_gpu = state_chain(tiny_chain, layout)
    assert stated_bytes(on_gpu) == loaded_bytes(chain)
    # the path of a GPU in float32, and without kernels
    eager = state_chain(tiny_chain, dataclasses.replace(layout, kernels="eager"))
    assert on_gpu.members["target"] == eager.members["target"]
    packed, dense = (one.bytes_of("intermediate", ["int4", "linears"]) for one in (on_gpu, eager))
    assert packed < 0.3 * dense
    assert on_gpu.bytes_of("draft", ["linears"]) < 0.3 * eager.bytes_of("draft", ["linears"])


def test_bytes_of_the_context_are_told_by_the_thousand(tiny_chain: Path) -> None:
    short, long = (load_chain(tiny_chain, context_tokens=num).memory.stated for num in (20, 120))
    grown = long.staying_bytes - short.staying_bytes
    assert grown == pytest.approx(short.bytes_per_1000_tokens / 10, rel=1e-3)
    assert long.bytes_per_1000_tokens == pytest.approx(short.bytes_per_1000_tokens, rel=1e-3)
    assert json.loads(json.dumps(long.to_json()))["staying_bytes"] == long.staying_bytes


def test_too_little_memory_is_refused_before_anything_is_loaded(
    tiny_chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = load_chain(tiny_chain, dtype="float32", context_tokens=CONTEXT_TOKENS)
    needed = chain.memory.stated.peak_bytes
    monkeypatch.setattr(runtime, "available_bytes", lambda _: needed)
    load_chain(tiny_chain, dtype="float32", context_tokens=CONTEXT_TOKENS)
    monkeypatch.setattr(runtime, "available_bytes", lambda _: needed - 1)
    monkeypatch.setattr(runtime, "load_decoder", None)
    with pytest.raises(UserError) as refused:
        load_chain(tiny_chain, dtype="float32", context_tokens=CONTEXT_TOKENS)
    line = str(refused.value)
    assert line.startswith("not enough memory: 15")
    assert "MB needed for 100 tokens of context in float32" in line
    assert "use a shorter context (1,000 tokens take 2.8 MB) or dtype bfloat16" in line


def write_system(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A system with 8 GB available."""
    files = {
        "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n",
        "proc/self/cgroup": groups,
    } | files
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_what_is_available_ends_at_the_control_groups_limits(tmp_path: Path) -> None:
    free = write_system(tmp_path / "free", "0::/a\n", {"sys/fs/cgroup/a/memory.max": "max\n"})
    assert available_bytes(CPU, free) == 8_000_000 * 1024
    above = {
        "sys/fs/cgroup/a/memory.max": "5000000000\n",
        "sys/fs/cgroup/a/memory.current": "3000000000\n",
        "sys/fs/cgroup/a/memory.stat": "anon 2\ninactive_file 500000000\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
    }
    new = write_system(tmp_path / "new", "0::/a/b\n", above)
    assert available_bytes(CPU, new) == 2_500_000_000
    within = {
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4000000000\n",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "1000000000\n",
        "sys/fs/cgroup/memory/a/memory.stat": "total_inactive_file 0\n",
    }
    old = write_system(tmp_path / "old", "5:cpu:/a\n4:memory:/a\n0::/\n", within)
    assert available_bytes(CPU, old) == 3_000_000_000
    assert available_bytes(CPU, tmp_path / "nothing") is None


# What an answer leaves


def live_tensors() -> tuple[int, int]:
    """How many there are, and their bytes."""
    gc.collect()
    found = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    return len(found), sum(one.nbytes for one in found)


def pieces_of(chain: Chain, num_tokens: int, temperature: float) -> Iterator[list[int]]:
    flush = Flush(
        length=8,
        adaptive=AdaptiveFlush(break_even=0.01, acceptance=(0.9,) * NUM_PROBABILITY_BINS),
    )
    plan = chain.plan.model_copy(update={"flush": {"target": flush}})
    return chain.stream_ids([5, 9, 2], num_tokens, Sampling(temperature, seed=0), plan)


@pytest.fixture
def chain(tiny_chain: Path) -> Iterator[Chain]:
    loaded = load_chain(tiny_chain)
    loaded.stop_tokens = frozenset()
    gc.collect()
    gc.freeze()  # all that is here by now is not looked at
    yield loaded
    gc.unfreeze()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_long_answer_does_not_grow(chain: Chain, temperature: float) -> None:
    list(pieces_of(chain, 20, temperature))
    before = live_tensors()
    found = [live_tensors() for _ in pieces_of(chain, 110, temperature)]
    assert len(found) > 5
    assert len({num for num, _ in found[:-1]}) == 1
    # a block's distributions, one row for each of its tokens
    num_bytes = [num for _, num in found]
    assert max(num_bytes) - min(num_bytes) <= (temperature > 0) * 9 * 64 * 4
    assert live_tensors() == before


def test_an_answer_that_grows_is_noticed(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    observe, kept = TreeStage._round, []

    def leaking(self: TreeStage, limit: int) -> Any:
        one = observe(self, limit)
        kept.append(one.distributions.logits)
        return one

    list(pieces_of(chain, 20, 0.0))
    before = live_tensors()
    monkeypatch.setattr(TreeStage, "_round", leaking)
    found = [live_tensors() for _ in pieces_of(chain, 110, 0.0)]
    assert found[-1] > found[0]
    assert live_tensors() > before


@pytest.mark.parametrize("is_whole_kept", [False, True])
def test_a_block_holds_no_logits_of_its_rounds(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, is_whole_kept: bool
) -> None:
    run_round, found = TreeStage._round, []

    def counting(self: TreeStage, limit: int) -> Any:
        found.append(live_tensors()[0])
        return run_round(self, limit)

    if is_whole_kept:
        monkeypatch.setattr(
            GreedySampler,
            "take",
            lambda self, rows, chosen: GreedyRows(
                [rows.tokens[row] for row in chosen], rows.logits
            ),
        )
    list(pieces_of(chain, 20, 0.0))
    monkeypatch.setattr(TreeStage, "_round", counting)
    list(pieces_of(chain, 60, 0.0))
    assert (max(found) > found[0]) is is_whole_kept
