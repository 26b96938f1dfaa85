"""The GPU benchmark, rehearsed on the CPU: every part, what it leaves out, and what it reads."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.scripts import load_script

gpu, budget, session = (load_script(name) for name in ("gpu", "gpu_budget", "gpu_session"))
parts, clock, names = (load_script(f"gpu_{name}") for name in ("parts", "clock", "names"))
timeline, targets = load_script("gpu_timeline"), load_script("gpu_targets")

CPU = torch.device("cpu")


@pytest.mark.slow
def test_rehearsal_measures_every_part(
    tiny_chain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "record.json"
    question = {"question_id": 1, "category": "qa", "turns": ["Who was the first to say so?"]}
    (tmp_path / "real.jsonl").write_text(json.dumps(question))
    words = ["gpu.py", str(tiny_chain), "--record", str(path), "--rehearse", "--minutes", "3"]
    words += ["--prompts", "embedded", str(tmp_path / "real.jsonl")]
    monkeypatch.setattr(sys, "argv", words)
    # small products on a busy machine: two threads would wait for each other
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert gpu.main() == 0
    content = json.loads(path.read_text())
    assert str(tmp_path) not in path.read_text(), "no place on this machine stays in a record"
    assert content["schema"] == "polybasic.benchmark.gpu/1"
    assert content["command"] == (
        "python benchmarks/gpu.py CHAIN --record FILE --rehearse --minutes 3 "
        "--prompts embedded real.jsonl"
    )
    measured = content["parts"]
    assert list(measured) == [part.name for part in parts.parts_of(session.REHEARSAL, 2)]
    assert {part["status"] for part in measured.values()} == {"done"}, measured
    shown = capfd.readouterr().out
    assert shown.rstrip().endswith("┘"), "the table comes last"
    for figure in content["targets"]:
        # there is no device whose gaps a trace could show
        assert (figure["measured"] is None) == (targets.HOST_GAPS in figure["name"])
        assert figure["name"].partition(":")[0] in shown
    short = names.answers_part("gpu-7b", 20, 0.0)
    for name in (short, names.answers_part("gpu-8b", 20, 0.0)):
        systems = measured[name]["found"]
        for system in (names.TARGET, names.EAGLE2, names.THREE):
            assert systems[system]["answers_as_target"] == systems[system]["answers"] == 1
        assert systems[names.HF_GENERATE]["answers"] == 1
    other = measured[names.answers_part("gpu-7b", 20, 0.0, 1)]["found"]
    assert (other["prompts"], measured[short]["found"]["prompts"]) == ("real", "embedded")
    assert other["target"]["tokens"] == 12, "no token ends an answer"
    found = measured[short]["found"]
    over = found["speedups"][names.WHOLE]["polybasic_full over target"]
    times = [found[name][names.WHOLE]["median"] for name in ("target", "polybasic_full")]
    assert over == pytest.approx(times[0] / times[1])
    trace = path.with_suffix(f".{'gpu-7b'}.trace.json.gz")
    assert measured["gpu-7b timeline"]["found"]["trace"] == trace.name
    assert any(event.get("name") == timeline.ROUND for event in timeline.read_trace(trace))
    passed = measured["gpu-7b passes"]["found"]["passes"]
    assert list(passed["target"]) == [names.RUNTIME, names.CUBLAS]
    assert passed["intermediate"][names.RUNTIME]["16"]["24"]["milliseconds"]["median"] > 0


# Time


def test_parts_end_fail_and_are_left_out(tmp_path: Path) -> None:
    record = budget.Record(tmp_path / "record.json", {"schema": "x"})
    written: list[dict[str, Any]] = []

    def announce(part: str, seconds: float) -> None:
        record.save()
        written.append(json.loads(record.path.read_text())["parts"])

    def whole(session: Any, found: dict[str, Any], allowance: Any) -> None:
        found["figure"] = 1

    def wrong(session: Any, found: dict[str, Any], allowance: Any) -> None:
        found["figure"] = 2
        raise RuntimeError("kernel is wrong")

    def slow(session: Any, found: dict[str, Any], allowance: Any) -> None:
        assert allowance.allows("what fits")
        assert not allowance.allows("what does not fit", 3.0)

    def never(session: Any, found: dict[str, Any], allowance: Any) -> None:
        raise AssertionError("there is no time for it")

    listed = [
        parts.Part("first", 60, whole),
        parts.Part("wrong", 60, wrong),
        parts.Part("slow", 2, slow, least=1.0),
        parts.Part("never", 60, never, least=100.0),
        parts.Part("last", 60, whole),
    ]
    shared = session.Session(session.REHEARSAL, None, record, CPU)
    parts.run_parts(listed, shared, time.time() + 90, announce)
    found = json.loads(record.path.read_text())["parts"]
    assert [one["status"] for one in found.values()] == [
        "done",
        "failed",
        "partly",
        "left out",
        "done",
    ]
    assert found["wrong"]["error"] == "RuntimeError: kernel is wrong"
    assert found["wrong"]["found"] == {"figure": 2}, "what was found before stays"
    assert found["slow"]["left_out"] == ["what does not fit"]
    # the record was written after each part
    assert [list(one) for one in written] == [
        [],
        ["first"],
        ["first", "wrong"],
        ["first", "wrong", "slow", "never"],
    ]
    lines = targets.left_out(found)
    assert [line.split(":")[0] for line in lines] == ["wrong", "slow", "never"]
    # another process goes on behind what the record has
    again = [*listed[:-1], parts.Part("new", 60, whole)]
    parts.run_parts(again, shared, time.time() + 90, announce)
    assert list(record.parts) == ["first", "wrong", "slow", "never", "last", "new"]


def test_a_process_that_hangs_is_ended_and_another_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        """
import json, pathlib, signal, sys, time
words = sys.argv
record = pathlib.Path(words[words.index("--record") + 1])
running = pathlib.Path(words[words.index("--work") + 1]) / "running.json"
signal.signal(signal.SIGUSR1, lambda *_: print("is at its line", flush=True))
if not record.exists():
    content = {"settings": {"contexts": [20]}, "begun": {"hangs": time.time()}, "parts": {}}
    record.write_text(json.dumps(content))
    running.write_text(json.dumps({"part": "hangs", "until": time.time()}))
    while True:
        time.sleep(1)
content = json.loads(record.read_text())
content["parts"]["next"] = {"status": "done", "found": {}, "seconds": 1}
record.write_text(json.dumps(content))
"""
    )
    record = tmp_path / "record.json"
    words = ["gpu.py", "chain", "--record", str(record), "--rehearse", "--minutes", "1"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 1.0)
    begin = time.monotonic()
    assert gpu.main() == 0
    assert time.monotonic() - begin < 20, "nothing waits for what hangs"
    found = json.loads(record.read_text())["parts"]
    assert (found["hangs"]["status"], found["next"]["status"]) == ("ended", "done")
    assert "code -9" in found["hangs"]["error"]


def test_time_is_over_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import time\nwhile True: time.sleep(1)\n")
    words = ["gpu.py", "chain", "--record", str(tmp_path / "record.json"), "--minutes", "0.05"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setattr(gpu, "RESERVE_SECONDS", 1.0)
    begin = time.monotonic()
    assert gpu.main() != 0, "there is no record"
    assert time.monotonic() - begin < 10


def test_what_fails_before_its_first_part_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["gpu.py", str(tmp_path), "--record", str(tmp_path / "record.json"), "--minutes", "1"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.main() == 1
    assert capfd.readouterr().err.count("error: no GPU: torch finds none") == 1


def test_times_of_a_device_take_turns() -> None:
    called: list[str] = []
    runs = {name: (lambda name=name: called.append(name)) for name in "ab"}
    found = clock.device_seconds(runs, 2, 3, CPU)
    assert len(called) == 2 * (clock.WARM_UP + 6)
    assert [called[number : number + 2] for number in (0, 2)] == [["a", "b"], ["b", "a"]]
    assert all(len(spread.turns) == 2 for spread in found.values())


# Targets


def test_figures_beside_what_they_are_to_be() -> None:
    def cost(milliseconds: float) -> dict[str, Any]:
        return {"milliseconds": {"median": milliseconds}, "times_bound": milliseconds / 3}

    of_target = {names.RUNTIME: {"256": {"1": cost(3.3)}, "8192": {"1": cost(4.0)}}}
    of_copy = {names.RUNTIME: {"256": {"24": cost(1.65)}}}
    level = {"milliseconds_a_level": {"median": 0.165}}
    speedups = {names.WHOLE: {"polybasic_full over target": 4.5}}
    measured = {
        "gpu-7b passes": {
            "found": {
                "passes": {"big": of_target, "copy": of_copy},
                "drafts": {"draft": {"2x2": {"milliseconds_a_level": {"median": 9}}, "6x8": level}},
            }
        },
        "gpu-7b plans": {
            "found": {"chosen": {"polybasic_full": {"tree": {"depth": 6, "top_k": 8}}}}
        },
        names.answers_part("gpu-7b", 100, 0.0): {"found": {"speedups": speedups}},
    }
    found = {one.name: one for one in targets.figures(measured, 100)}
    values = {name: (one.measured, one.is_met) for name, one in found.items()}
    assert values["gpu-7b: bf16 pass of 1 row, times its bound"] == (pytest.approx(1.1), True)
    assert values["gpu-7b: 4-bit pass of 24 rows over it"] == (pytest.approx(0.5), False)
    assert values["gpu-7b: a level of a draft over it"] == (pytest.approx(0.05), True)
    assert values["gpu-7b: host gaps of a round"] == (None, None)
    assert values["gpu-7b: three models over target"] == (4.5, True)
    assert values["gpu-8b: three models over target"] == (None, None)
    assert all(one.measured is None for one in targets.figures({}, 100))
