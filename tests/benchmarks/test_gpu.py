"""The GPU benchmark, rehearsed on the CPU: every part, what it leaves out, and what it reads."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.deploy import load_chain
from tests.benchmarks.growth.growing import write_tied_parts
from tests.benchmarks.scripts import load_script

gpu, parts, sessions = (load_script(name) for name in ("gpu", "gpu_parts", "gpu_session"))
attention, timeline = (load_script(name) for name in ("attention", "timeline"))

CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


def session_of(chain: Path, work: Path) -> Any:
    return sessions.GpuSession(chain, [None], work / "record.md", work, CPU)


@pytest.mark.proof
def test_rehearsal_measures_every_part(
    tiny_chain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "record.md"
    question = {"question_id": 1, "category": "qa", "turns": ["Who was the first to say so?"]}
    (tmp_path / "real.jsonl").write_text(json.dumps(question))
    words = ["gpu.py", str(tiny_chain), "--record", str(path), "--rehearse", "--minutes", "5"]
    words += ["--prompts", "shipped", str(tmp_path / "real.jsonl")]
    monkeypatch.setattr(sys, "argv", words)
    assert gpu.main() == 0
    text = path.read_text()
    assert str(tmp_path) not in text, "no place on this machine stays in a record"
    command = "python benchmarks/gpu.py CHAIN --record RECORD --rehearse --minutes 5"
    assert f"{command} --prompts shipped real.jsonl" in text
    session = session_of(tiny_chain, tmp_path)
    session.prompts = [None, tmp_path / "real.jsonl"]
    names = [part.name for part in parts.parts_of(session)]
    sections = text.split("\n## ")[1:]
    assert [section.splitlines()[0] for section in sections] == names
    assert {section.splitlines()[2].split(",")[0] for section in sections} == {"done"}, text
    found = dict(zip(names, sections, strict=True))
    # a chain's answers are the target's, and there is no device whose gaps a trace could show
    assert found["gpu-7b answers after 20, greedy"].count("1/1") == 3
    assert "Prompts of real" in found["gpu-7b answers after 20, greedy, prompts 2"]
    assert "intermediate" in found["gpu-7b passes"]
    shown = capfd.readouterr().out
    for name in gpu.WANTED:
        row = next(line for line in shown.splitlines() if line.startswith(f"| {name}"))
        assert ("not measured" in row) == ("host gaps" in name)
    trace = timeline.read_trace(path.with_suffix(".trace.json.gz"))
    assert any(event.get("name") == timeline.ROUND for event in trace)


# Time


def test_parts_end_fail_and_are_left_out(tmp_path: Path) -> None:
    session = session_of(tmp_path, tmp_path)
    saved: list[list[str]] = []

    def whole(session: Any, found: Any) -> None:
        found.report.say("a figure")
        found.figures["figure"] = 1.0

    def wrong(session: Any, found: Any) -> None:
        found.report.say("found before")
        raise RuntimeError("kernel is wrong")

    def slow(session: Any, found: Any) -> None:
        assert found.attempt("what fits", lambda: 3) == 3
        found.until = time.time() - 1
        assert found.all_of([("what does not fit", lambda: [3])]) == []

    def never(session: Any, found: Any) -> None:
        raise AssertionError("there is no time for it")

    listed = [
        parts.GpuPart("first", 60, whole),
        parts.GpuPart("wrong", 60, wrong),
        parts.GpuPart("slow", 60, slow),
        parts.GpuPart("never", 60, never, least=100.0),
        parts.GpuPart("last", 60, whole),
    ]

    def save() -> None:
        saved.append([part["status"] for part in session.parts.values()])

    parts.run_parts(listed, session, time.time() + 90, save)
    assert saved[-1] == ["done", "partly", "partly", "left out", "done"]
    assert ["done", "running"] in saved, "written at the beginning of each part"
    found = session.parts
    assert found["wrong"]["left_out"] == ["wrong: RuntimeError: kernel is wrong"]
    assert "found before" in found["wrong"]["text"]
    assert found["slow"]["left_out"] == ["what does not fit: no time was left"]
    assert found["first"]["figures"] == {"figure": 1.0}
    # another process goes on after what the record has
    parts.run_parts([*listed, parts.GpuPart("new", 60, whole)], session, time.time() + 90, save)
    assert list(session.parts) == ["first", "wrong", "slow", "never", "last", "new"]


WORKER = """
import json, pathlib, signal, sys, time
state = pathlib.Path(sys.argv[sys.argv.index("--state") + 1])
signal.signal(signal.SIGUSR1, lambda *_: print("is at its line", flush=True))
part = {"seconds": 0.0, "begun": time.time(), "until": 0, "text": "", "figures": {}, "left_out": []}
if not state.exists():
    parts = {"hangs": {**part, "status": "running"}}
    (state.parent / "part").write_text(json.dumps({"head": "# Head", "parts": parts}))
    (state.parent / "part").rename(state)
    while True:
        time.sleep(1)
content = json.loads(state.read_text())
content["parts"]["next"] = {**part, "status": "done"}
state.write_text(json.dumps(content))
"""


def test_a_process_that_hangs_is_ended_and_another_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    record = tmp_path / "record.md"
    words = ["gpu.py", "chain", "--record", str(record), "--rehearse", "--minutes", "1"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "worker.py"))
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 1.0)
    assert gpu.main() == 0
    text = record.read_text()
    assert "## hangs\n\nended" in text
    assert "its process ended with code -9" in text
    assert "## next\n\ndone" in text


def test_time_is_over_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker.py").write_text("import time\nwhile True: time.sleep(1)\n")
    words = ["gpu.py", "chain", "--record", str(tmp_path / "record.md"), "--minutes", "0.025"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "worker.py"))
    monkeypatch.setattr(gpu, "RESERVE_SECONDS", 0.5)
    assert gpu.main() != 0, "there is no record"


def test_what_fails_before_its_first_part_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["gpu.py", str(tmp_path), "--record", str(tmp_path / "record.md"), "--minutes", "1"]
    monkeypatch.setattr(sys, "argv", words)
    assert gpu.main() == 2
    assert capfd.readouterr().err.count("error: no GPU: torch finds none") == 1


def test_figures_beside_what_they_are_to_be() -> None:
    figures = {
        "gpu-7b: bf16 pass of 1 row, times its bound": 1.1,
        "gpu-7b: 4-bit pass of 24 rows over it": 0.5,
        "gpu-7b: three models over target (real)": 4.5,
    }
    part = {"status": "partly", "figures": figures, "left_out": ["drafts: no time was left"]}
    rows, rest = gpu.shown_targets({"parts": {"gpu-7b passes": part}}).split("\n\n")
    cells = {row.split("|")[1].strip(): row.split("|")[-2].strip() for row in rows.splitlines()}
    assert cells["gpu-7b: bf16 pass of 1 row, times its bound"] == "yes"
    assert cells["gpu-7b: 4-bit pass of 24 rows over it"] == "no"
    assert cells["gpu-7b: three models over target (real)"] == "yes"
    assert "not measured" in next(row for row in rows.splitlines() if "host gaps" in row)
    assert rest == "gpu-7b passes: partly (drafts: no time was left)"


# What parts measure


def test_a_chain_of_other_members_is_refused(tiny_four_chain: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="chain of other members"):
        session_of(tiny_four_chain, tmp_path).chain("gpu-7b")


@pytest.mark.parametrize("name", [sessions.FIRST, sessions.SECOND])
def test_the_small_shapes_fit_a_published_models_chain(name: str, tmp_path: Path) -> None:
    write_tied_parts(tmp_path).package(tmp_path / "chain")
    (tmp_path / "work").mkdir()
    grown = session_of(tmp_path / "chain", tmp_path / "work").chain(name)
    assert grown.manifest.grown == name


def test_plans_that_are_found_are_the_fastest(
    tiny_chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(tiny_chain, tmp_path)
    session.chains["gpu-7b"] = load_chain(tiny_chain)
    monkeypatch.setattr(sessions.GpuSession, "prompts_of", lambda *_: [[1, 2, 3]])
    shape = {"depth": 2, "top_k": 2, "rows": 4, "least_probability": 0.0}
    asked: list[Any] = []

    class Times:
        def __init__(self, plan: Any) -> None:
            asked.append(plan)
            is_best = plan.tree.model_dump() == shape and len(plan.members) == 3
            flush = [own_flush.length for own_flush in plan.flush.values()]
            self.median = 3.0 - is_best - (is_best and flush == [4])
            self.per_token = self

    def measure(answering: Any, plans: Any, *_: Any) -> Any:
        return {"here": {name: Times(plan) for name, plan in plans.items()}}

    monkeypatch.setattr(parts, "measure_end_to_end", measure)
    found = parts.Found(time.time() + 60)
    parts._plans("gpu-7b", session, found)
    assert found.plans["polybasic_full"]["tree"] == shape
    assert found.plans["polybasic_full"]["flush"]["target"]["length"] == 4
    assert found.plans["eagle2"]["tree"] != shape, "none was faster"
    assert len(asked) == 5, "each plan once"
    session.parts["gpu-7b plans"] = {"plans": found.plans}
    assert session.plans("gpu-7b")["polybasic_full"].tree.model_dump() == shape


@pytest.mark.parametrize("builds", [True, False])
def test_a_system_that_fails_takes_no_others_answers_with_it(
    builds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers that cannot be set up, or that fails after a while."""
    asked: list[list[str]] = []

    def made(chain: Any) -> str:
        if not builds:
            raise ImportError("cannot import name 'GenerationMixin'")
        return "transformers"

    def measure(answering: Any, plans: Any, *_: Any) -> Any:
        asked.append(list(plans))
        assert answering["here"].keys() == plans.keys()
        if "hf_generate" in plans:
            raise RuntimeError("out of memory")
        return {"here": {name: f"times of {name}" for name in plans}}

    session = SimpleNamespace(
        chain=lambda name: "chain", settings=sessions.REHEARSAL, prompts_of=lambda *_: [[1]],
        plans=lambda name: {"target": "its plan"}, work=tmp_path,
    )  # fmt: skip
    reported: list[Any] = []
    monkeypatch.setattr(parts.HfGenerate, "of", made)
    monkeypatch.setattr(parts, "measure_end_to_end", measure)
    monkeypatch.setattr(parts, "shown_plans", lambda plans, chain: list(plans))
    monkeypatch.setattr(parts, "report_end_to_end", lambda *given: reported.append(given[1:]))
    found = parts.Found(time.time() + 60)
    parts._hf_generate("gpu-7b", session, found)
    assert reported == [({"here": {"target": "times of target"}}, ["target"])]
    why = "RuntimeError: out of memory"
    if builds:
        assert asked == [["target", "hf_generate"], ["target"], ["hf_generate"]]
        assert found.left_out == [f"answers in turns: {why}", f"hf_generate: {why}"]
    else:
        assert asked == [["target"]]
        assert found.left_out == ["hf_generate: ImportError: cannot import name 'GenerationMixin'"]


def test_kinds_of_attention_see_the_same(tiny_chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    verifier = load_chain(tiny_chain, dtype="float32").engine.verifiers["target"]
    model, cache = verifier.decoder, verifier.cache
    cache.block.normal_(generator=torch.Generator().manual_seed(0))
    layer, context, rows = cache.layers[1], 40, 6
    found = attention.sdpa(model, cache, context, rows)(layer)
    other = attention.flex(model, cache, context, rows)(layer)
    torch.testing.assert_close(found, other, rtol=0, atol=1e-5)
    # the first row sees its own column and none after it
    changed = layer.clone()
    changed[:, context + 1 :] = 0
    again = attention.sdpa(model, cache, context, rows)(changed)
    torch.testing.assert_close(again[:, :, 0], found[:, :, 0], rtol=0, atol=1e-5)
    assert not torch.allclose(again[:, :, 1], found[:, :, 1], rtol=0, atol=1e-3)
    assert attention.runtime(model, cache, context, rows)(layer).shape == (rows, 4 * 32)


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
    assert (found.rounds, found.milliseconds, found.launches) == (2, 0.1, 1)
    # 115-145, 150-165, 180-290
    assert found.busy_milliseconds == pytest.approx((30 + 15 + 110) / 2e3)
    # 100-115, 165-180 and, after all, 290-300; the launch at 160 came before 165
    assert found.host_gaps == pytest.approx((15 + 10) / 200)
    assert found.device_gaps == pytest.approx((5 + 15) / 200)
    assert (found.longest_gaps[0].microseconds, found.longest_gaps[0].before) == (15, "begin")
    # rounds that take half as long without a profiler leave the host nothing of its own
    own = (30 + 15 + 110 + 5 + 15) / 200
    assert found.host_gaps_of(0.1) == pytest.approx(1 - own)
    later = [dict(entry) for entry in TRACE]
    later[5]["ts"] = 170
    assert timeline.timeline(later).host_gaps == pytest.approx((15 + 15 + 10) / 200)
    assert timeline.timeline(TRACE[:4]).host_gaps is None, "no work of a device"
    with pytest.raises(ValueError, match="no mark"):
        timeline.timeline(TRACE[4:])


def test_trace_of_the_cpu_has_rounds_and_no_gaps(tiny_chain: Path, tmp_path: Path) -> None:
    path, chain = tmp_path / "answer.trace.json.gz", load_chain(tiny_chain)
    kernels = timeline.trace_rounds(chain, [3, 1, 4], chain.plan_of(["target"]), 5, path)
    found = timeline.timeline(timeline.read_trace(path))
    assert found.rounds >= 1
    assert found.milliseconds > 0
    assert found.host_gaps is None
    assert "aten::" in kernels
    assert list(tmp_path.glob("*.json*")) == [path], "nothing else is left"
