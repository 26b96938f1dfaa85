"""What the parts of the GPU benchmark do: chains in memory, prompts, kernels, traces, answers."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.chain.errors import UserError
from polybasic.chain.formats import awq
from polybasic.chain.formats.config import read_config
from polybasic.chain.kernels.torch.operations import DeviceLinear, Operations
from polybasic.chain.kernels.torch.packed_weight import PackedWeight
from polybasic.chain.model.loading import load_decoder
from polybasic.deploy import load_chain
from polybasic.deploy.rounds.sampling import Sampling
from polybasic.recipes.growth.chain import grow_chain
from polybasic.recipes.growth.shapes import GrownShape
from tests.benchmarks.scripts import load_script

budget, chains, names = (load_script(f"gpu_{name}") for name in ("budget", "chains", "names"))
passes, products = load_script("gpu_passes"), load_script("gpu_products")
attention, timeline = load_script("gpu_attention"), load_script("gpu_timeline")
answers, prompts = load_script("gpu_answers"), load_script("gpu_prompts")

CPU = torch.device("cpu")
SHAPE = GrownShape(3, 256, 384, 8, 4, 32, 96)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


@pytest.fixture(autouse=True)
def _device_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")


@pytest.fixture
def grown(tiny_chain: Path, tmp_path: Path) -> Iterator[Any]:
    """The tiny chain, grown in memory."""
    serve: list[Any] = []
    with chains.serving(serve):
        yield chains.grow_and_load(
            tiny_chain, SHAPE, "gpu-7b", tmp_path / "grown", serve, CPU, "float32", 200
        )


# Chains in memory


def test_a_chain_in_memory_is_that_of_files(grown: Any, tiny_chain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    grow_chain(tiny_chain, SHAPE, "gpu-7b", folder)
    written = load_chain(folder, dtype="float32", context_tokens=200, beyond_declared=True)
    models, others = grown.chain.engine.models, written.engine.models
    assert torch.equal(models.target.embedding, others.target.embedding)
    rows = torch.randn(5, SHAPE.hidden_size)
    for name, decoder in models.decoders.items():
        for layer, other in zip(decoder.layers, others.decoders[name].layers, strict=True):
            assert torch.equal(layer.qkv(rows), other.qkv(rows))
            assert torch.equal(layer.gate_up(rows), other.gate_up(rows))
    assert grown.chain.manifest.members[1].num_bytes > 0
    alone = grown.chain.plan_of(["target"])
    found, expected = (
        [token for new in chain.stream_ids(TOKENS, 16, Sampling(), alone) for token in new]
        for chain in (grown.chain, written)
    )
    assert len(found) == 16, "no token ends an answer"
    assert found[: len(expected)] == expected
    in_transformers, _ = grown.hf_generate().generate(TOKENS, 16, Sampling())
    assert in_transformers == found


def test_weight_files_of_a_chain_in_memory_are_holes(tiny_chain: Path, tmp_path: Path) -> None:
    serve: list[Any] = []
    with chains.serving(serve):
        grown = chains.grow_and_load(
            tiny_chain, SHAPE, "gpu-7b", tmp_path / "grown", serve, CPU, "float32", 100
        )
        inside = load_decoder(
            read_config(grown.chain.target_folder), torch.float32, CPU, 8
        ).embedding
    weights = grown.chain.target_folder / "model.safetensors"
    assert weights.stat().st_size > 1 << 20 > 512 * weights.stat().st_blocks
    assert inside.count_nonzero() > inside.numel() // 10
    # who is not served reads the holes
    assert not load_decoder(
        read_config(grown.chain.target_folder), torch.float32, CPU, 8
    ).embedding.any()


# Prompts


def test_prompts_have_the_lengths_asked_for(grown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (real,) = prompts.prompts_of_lengths(grown.chain, None, [170], 1, 12)[170]
    assert len(real) == 170
    lengths = [18, 40, 21, 30, 19, 70, 25]
    questions = [[number] * length for number, length in enumerate(lengths)]
    monkeypatch.setattr(prompts, "read_prompts", lambda *_: questions)
    found = prompts.prompts_of_lengths(grown.chain, None, [20, 150, 60], 3, 12)
    assert found[20] == [questions[2], questions[4], questions[0]], "the nearest, as they are"
    assert [len(one) for one in found[150]] == [150] * 3
    for number, one in enumerate(found[150]):
        last = questions[number]
        assert one[-len(last) :] == last
        assert len(set(one)) > 2, "real questions stand before it"
    assert len({tuple(one) for one in found[150]}) == 3
    # one that is longer is no end of a shorter context
    assert [set(one[-18:]) for one in found[60]] == [{0}, {1}, {2}]


# Kernels


def test_products_that_are_wrong_are_not_timed(grown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    verifiers = grown.chain.engine.verifiers
    settings = products.ProductSettings(rows=(1, 3), repeats=2, turns=1)
    found: dict[str, dict[str, Any]] = {name: {} for name in verifiers}
    for name, verifier in verifiers.items():
        model = passes.device_model_of(verifier.decoder, name)
        allowance = budget.Allowance(time.time() + 60)
        products.measure_products(model, settings, 1e9, found[name], allowance)
    dense, packed = found["target"], found["intermediate"]
    parts_of_layer = {"qkv", "out", "gate_up", "down"}
    assert dense.keys() == packed.keys() == {*parts_of_layer, "errors"}
    for name in parts_of_layer:
        assert dense[name]["3"].keys() == {names.RUNTIME, names.CUBLAS}
        # PyTorch's int4 kernel for the CPU computes in bfloat16 alone, the chain in float32
        assert packed[name]["3"].keys() == {names.RUNTIME}
        assert packed["errors"][name][names.RUNTIME] < 1e-5
        assert isinstance(packed["errors"][name][names.PYTORCH_INT4], str)
        (one,) = {cost["times_bound"] for cost in packed[name]["1"].values()}
        weight = products.products_of(model)[name].num_bytes
        microseconds = packed[name]["1"][names.RUNTIME]["microseconds"]["median"]
        assert one == pytest.approx(microseconds * 1e-6 * 1e9 / weight)
    monkeypatch.setattr(products, "pytorch_int4", lambda linear: lambda x: 2 * linear(x))
    again: dict[str, Any] = {}
    allowance = budget.Allowance(time.time() + 60)
    products.measure_products(model, settings, 1e9, again, allowance)
    assert again["errors"]["qkv"][names.PYTORCH_INT4] == pytest.approx(1, abs=1e-3)
    assert again["qkv"]["1"].keys() == {names.RUNTIME}


def test_pytorchs_int4_kernel_reads_the_same_codes() -> None:
    weight = torch.randn(128, 256) / 16
    rounded = awq.round_to_nearest(weight, 128)
    packed = DeviceLinear(Operations(), PackedWeight.pack(rounded, CPU), None)
    found = products.quantized(packed)
    assert torch.equal(found.codes, rounded.codes)
    assert torch.equal(found.zeros, rounded.zeros)
    assert torch.equal(found.scales, rounded.scales.float())
    x = torch.randn(5, 256).bfloat16()
    expected = x.float() @ awq.dequantize(rounded).t()
    difference = products.pytorch_int4(packed)(x).float() - expected
    assert difference.norm() < 0.01 * expected.norm()


def test_kinds_of_attention_see_the_same(grown: Any) -> None:
    verifier = grown.chain.engine.verifiers["target"]
    model, cache = passes.device_model_of(verifier.decoder, "target"), verifier.cache
    cache.block.normal_(generator=torch.Generator().manual_seed(0))
    layer, context, rows = cache.layers[1], 40, 6
    found = attention.sdpa(model, cache, context, rows)(layer)
    other = attention.flex(model, cache, context, rows)(layer)
    torch.testing.assert_close(found, other, rtol=0, atol=1e-5)
    # the first row sees its own column and none behind it
    changed = layer.clone()
    changed[:, context + 1 :] = 0
    again = attention.sdpa(model, cache, context, rows)(changed)
    torch.testing.assert_close(again[:, :, 0], found[:, :, 0], rtol=0, atol=1e-5)
    assert not torch.allclose(again[:, :, 1], found[:, :, 1], rtol=0, atol=1e-3)
    assert attention.runtime(model, cache, context, rows)(layer).shape == (rows, 8 * 32)


# Timeline


def event(cat: str, name: str, begin: float, microseconds: float, **arguments: Any) -> Any:
    return {"cat": cat, "name": name, "ts": begin, "dur": microseconds, "args": arguments}


TRACE = [
    # profiling begins in the first mark, and no round ends in the last
    event("user_annotation", timeline.ROUND, 0, 50),
    event("user_annotation", timeline.ROUND, 100, 100),
    event("user_annotation", timeline.ROUND, 200, 100),
    event("user_annotation", timeline.ROUND, 300, 5),
    event("cuda_runtime", "cudaGraphLaunch", 110, 4, correlation=1),
    event("cuda_runtime", "cudaGraphLaunch", 160, 4, correlation=2),
    event("cuda_runtime", "cudaMemcpyAsync", 205, 4, correlation=3),
    event("kernel", "read", 10, 20, correlation=0),
    event("kernel", "read", 115, 30, correlation=1),
    # waited 5 for its own scheduling, and 15 for a launch at 160
    event("kernel", "choose", 150, 15, correlation=1),
    event("kernel", "read", 180, 40, correlation=2),
    # on another stream, beside the kernel before
    event("gpu_memcpy", "copy", 210, 80, correlation=3),
    event("cpu_op", "aten::mm", 100, 90),
]


def test_gaps_are_the_hosts_where_it_had_not_launched_yet() -> None:
    found = timeline.timeline(TRACE)
    assert (found["rounds"], found["milliseconds"]) == (2, 0.1)
    # 115-145, 150-165, 180-290
    assert found["busy_milliseconds"] == pytest.approx((30 + 15 + 110) / 2e3)
    # 100-115, 165-180 and, behind all, 290-300; the launch at 160 came before 165
    assert found["host_gaps"] == pytest.approx((15 + 10) / 200)
    assert found["device_gaps"] == pytest.approx((5 + 15) / 200)
    assert found["pieces_of_work"] == 2
    assert found["launches"] == 1
    longest = found["longest_gaps"][0]
    assert (longest["microseconds"], longest["before"]) == (15, "begin")
    assert found["costliest"][0]["name"] == "copy"
    later = [dict(one) for one in TRACE]
    later[5]["ts"] = 170
    assert timeline.timeline(later)["host_gaps"] == pytest.approx((15 + 15 + 10) / 200)
    with pytest.raises(ValueError, match="no mark"):
        timeline.timeline(TRACE[4:])


def test_trace_of_the_cpu_has_rounds_and_no_gaps(grown: Any, tmp_path: Path) -> None:
    path = tmp_path / "answer.trace.json.gz"
    plan = answers.base_plans(grown.chain)[names.THREE]
    timeline.trace_rounds(grown.chain, TOKENS, plan, 12, path)
    found = timeline.timeline(timeline.read_trace(path))
    assert found["rounds"] >= 1
    assert found["milliseconds"] > 0
    assert (found["pieces_of_work"], found["host_gaps"]) == (0, None)
    assert list(tmp_path.glob("*.json*")) == [path], "nothing else is left"
    plain = timeline.host_gaps_without_profiler(grown.chain, TOKENS, plan, 12, found)
    assert plain["milliseconds_without_profiler"] > 0
    assert "host_gaps_without_profiler" not in plain
    on_gpu = {"host_gaps": 0.1, "device_gaps": 0.0, "busy_milliseconds": 0.0, "milliseconds": 1}
    plain = timeline.host_gaps_without_profiler(grown.chain, TOKENS, plan, 12, on_gpu)
    assert plain["host_gaps_without_profiler"] == 1


# Answers


def test_answers_stop_when_time_is_over(grown: Any) -> None:
    settings = answers.AnswerSettings(max_new_tokens=6, turns=2, hf_prompts=1)
    plans = answers.base_plans(grown.chain)
    found: dict[str, Any] = {}
    allowance = budget.Allowance(time.time() - 1)
    answers.measure_answers(grown.chain, None, plans, [TOKENS], 0.0, settings, found, allowance)
    assert found == {}
    assert allowance.left_out[:2] == ["answers of target", "answers of eagle2"]
    allowance = budget.Allowance(time.time() + 60)
    answers.measure_answers(grown.chain, None, plans, [TOKENS], 1.0, settings, found, allowance)
    assert found["target"]["tokens_per_target_pass"] == 1
    assert "answers_as_target" not in found["eagle2"], "draws differ"
    assert len(found["polybasic_full"][names.WHOLE]["turns"]) == 2
    assert found["polybasic_full"]["answers"] == 1


def test_a_first_turn_counts_as_far_as_it_came(grown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = answers.AnswerSettings(max_new_tokens=4, turns=3, hf_prompts=1)
    allowance, plans = budget.Allowance(time.time() + 60), answers.base_plans(grown.chain)
    found: dict[str, Any] = {}
    for last, num_turns, num_answers in (("turn 0 from prompt 2 on", 1, 2), ("", 3, 3)):
        monkeypatch.setattr(allowance, "allows", lambda what, _=0.0, last=last: what != last)
        answers.measure_answers(
            grown.chain, None, plans, [TOKENS] * 3, 0.0, settings, found, allowance
        )
        assert found["target"]["answers"] == num_answers
        assert len(found["target"][names.WHOLE]["turns"]) == num_turns


def test_systems_that_fail_are_left_out(grown: Any) -> None:
    settings = answers.AnswerSettings(max_new_tokens=6, turns=1, hf_prompts=1)
    plans = answers.base_plans(grown.chain)
    plans[names.EAGLE2] = plans[names.EAGLE2].model_copy(update={"members": ("nobody",)})
    found: dict[str, Any] = {}
    allowance = budget.Allowance(time.time() + 60)
    answers.measure_answers(
        grown.chain, grown.hf_generate(), plans, [TOKENS], 0.0, settings, found, allowance
    )
    assert found.keys() == {"target", "polybasic_full", "hf_generate", "speedups"}
    assert found["polybasic_full"]["answers_as_target"] == 1
    assert len(allowance.left_out) == 1
    assert allowance.left_out[0].startswith("eagle2: UserError: ")


def test_plans_that_are_found_are_the_fastest(grown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"3x2, 6 rows, flush 5": 4.0, "2x2, 4 rows, flush 5": 3.0, "2x2, 4 rows, flush 7": 2.0}
    monkeypatch.setattr(
        answers, "_milliseconds", lambda chain, plan, *_: times.get(answers.shown_shape(plan), 9.0)
    )
    plans = answers.base_plans(grown.chain)
    trees = [answers.Tree(depth=2, top_k=2, rows=4), answers.Tree(depth=1, top_k=2, rows=3)]
    found: dict[str, Any] = {}
    allowance = budget.Allowance(time.time() + 60)
    chosen = answers.search_plans(grown.chain, plans, [TOKENS], trees, [6, 7], 6, found, allowance)
    assert answers.shown_shape(chosen[names.THREE]) == "2x2, 4 rows, flush 7"
    assert chosen[names.EAGLE2].tree == plans[names.EAGLE2].tree, "none was faster"
    assert found[names.THREE]["1x2, 3 rows, flush 5"] == 9.0
    none = answers.search_plans(
        grown.chain, plans, [TOKENS], trees, [6], 6, {}, budget.Allowance(time.time() - 1)
    )
    assert none == plans


def test_a_chain_of_other_members_is_refused(tiny_four_chain: Path) -> None:
    with pytest.raises(UserError, match="chain of other members"):
        answers.base_plans(load_chain(tiny_four_chain))
