"""`polybasic bench` as it is called: a report, another folder, a comparison, wrong input."""

import json
import signal
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from polybasic.chain.base.processes.interruption import Interrupted
from polybasic.chain.formats.manifest import Manifest, read_manifest
from polybasic.chain.formats.plan import MeasuredPlan
from polybasic.deploy.bench.schema import read_report
from polybasic.deploy.bench.systems.chain_systems import ChainSystem
from polybasic.deploy.planner import run
from polybasic.deploy.planner.run import Planning
from polybasic.recipes.cli import measure
from tests.recipes.command_line import call, refusal

QUICK = ("--max-new-tokens", "6", "--repeats", "1", "--dtype", "float32")
TWO = ("--systems", "target,eagle2")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"w{n} w1 w2", "task": "qa"} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def planned(tiny_chain: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A chain that need not be planned first."""
    monkeypatch.setattr(Manifest, "lacks", lambda *_: None)
    return tiny_chain


def test_two_reports_are_compared(planned: Path, prompts: Path, tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        out = tmp_path / name
        code, printed, err = call(
            "bench", planned, *QUICK, *TWO, "--prompts", prompts, "--out", out
        )
        assert code == 0, err
        assert "eagle2" in printed
        assert err.splitlines()[-1].startswith(f"wrote {out / 'report.html'}")
        files.append(out / "report.json")
    report = read_report(files[0])
    assert report.command.startswith("polybasic")
    assert report.settings["prompts"] == "prompts.jsonl"
    for path in (*(tmp_path / "a").rglob("*.*"), planned / "chain.json", planned / "README.md"):
        assert str(tmp_path) not in path.read_text("utf-8"), path
    code, printed, err = call("bench", "--compare", *files)
    assert code == 0, err
    assert "eagle2" in printed
    code, printed, _ = call("bench", "--compare", *files, "--json")
    assert code == 0
    assert json.loads(printed)
    before = json.loads(files[0].read_text())
    files[0].write_text(json.dumps(before | {"schema": "polybasic.report/1"}))
    line = refusal("bench", "--compare", *files)
    assert line.startswith(f"error: report of another schema: {files[0]}")
    files[0].write_text(json.dumps(before | {"noise": {}}))
    assert refusal("bench", "--compare", *files).startswith("error: report is malformed")
    files[0].unlink()
    assert refusal("bench", "--compare", *files).startswith("error: report not found")


def test_a_plan_may_leave_the_chain_as_it_is(
    tiny_chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(chain: Any, *_: Any) -> Planning:
        plan = chain.manifest.plan
        given = {"hardware": "here", "dtype": "float32", "temperature": 0, "seconds_per_token": 1}
        return Planning(MeasuredPlan(plan=plan, **given, explanation={}), ANY, ())

    monkeypatch.setattr(run, "plan_loaded", measured)
    before = [(path, path.stat().st_mtime_ns) for path in sorted(tiny_chain.rglob("*"))]
    out = tmp_path / "plan.json"
    for words, told in ((["--no-write"], "no plan written"), (["--out", out], f"wrote {out}")):
        code, printed, err = call("plan", tiny_chain, *words, "--json")
        assert code == 0, err
        assert err.splitlines()[-1] == f"{told}; the chain is as it was"
    assert json.loads(out.read_text()) == json.loads(printed)
    assert [(path, path.stat().st_mtime_ns) for path in sorted(tiny_chain.rglob("*"))] == before
    assert call("plan", tiny_chain, "--json")[0] == 0
    assert [recorded.hardware for recorded in read_manifest(tiny_chain).plans] == ["here"]


def test_planning_before_is_announced_and_can_be_left_out(
    tiny_chain: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Planning:
        raise Interrupted(signal.SIGTERM, "what was whole is kept")

    monkeypatch.setattr(run, "plan_loaded", interrupted)
    command = ("bench", tiny_chain, *QUICK, "--systems", "target", "--prompts", prompts)
    code, _, err = call(*command)
    assert code == 143
    why, how_long, *_, last = err.splitlines()
    unplanned = "bench: no plan of the chain was measured yet"
    assert why == f"{unplanned}: plans first; --no-plan leaves that out"
    assert "takes at most about 120 seconds" in how_long
    assert how_long.endswith("stopped before its end, it keeps nothing")
    told = "the plan was not finished, and nothing of it is kept; run the command again"
    assert last == f"interrupted by SIGTERM: {told}"
    code, _, err = call(*command, "--no-plan")
    assert code == 0, err
    assert err.splitlines()[0] == f"{unplanned}; by --no-plan it runs as it is"
    assert "bench: turns left to answer: 6, in at most about 0:0" in err


def test_planning_on_a_part_of_the_prompts(
    planned: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def plan(folder: Path, settings: Any, target: Any, named: str) -> None:
        asked.append(Path(settings.prompts).read_text().splitlines())
        assert (named, settings.rule) == ("prompts.jsonl", "block")

    monkeypatch.setattr(measure, "_plan", plan)
    code, printed, err = call(
        *("bench", planned, *QUICK, "--systems", "target", "--prompts", prompts),
        *("--plan-here", "--num-prompts-per-task", "9", "--json", "--rule", "block"),
    )
    assert code == 0, err
    assert json.loads(printed)["plan"]["rule"] == "block"
    assert len(asked[0]) == 2
    report = json.loads(printed)
    assert [prompt["question_id"] for prompt in report["prompts"]] == ["2", "3", "5", "6"]
    assert {json.loads(line)["question_id"] for line in asked[0]} == {"1", "4"}
    prompts.write_text(json.dumps({"prompt": "w1"}))
    line = refusal("bench", planned, "--plan-here", "--no-plan")
    assert line.startswith("error: to plan and not to plan")
    line = refusal("bench", planned, "--prompts", prompts, "--plan-here")
    assert line.startswith("error: too few prompts to plan on a part of them")


def test_an_interrupt_leaves_a_partial_report(
    planned: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, num_asked = ChainSystem.answer, 0

    def answer(self: ChainSystem, *asked: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 7:
            raise Interrupted(signal.SIGTERM, "what was whole is kept")
        return usual(self, *asked)

    monkeypatch.setattr(ChainSystem, "answer", answer)
    command = ("bench", planned, *QUICK, *TWO, "--prompts", prompts)
    code, _, err = call(*command)
    assert code == 143
    partial = planned / "report" / "partial"
    told = f"interrupted by SIGTERM: 2 of 6 turns are kept; wrote {partial / 'report.md'}; the same"
    assert err.splitlines()[-1].startswith(told)
    assert not read_report(partial / "report.json").complete
    assert read_manifest(planned).results is None
    code, _, err = call(*command)
    assert code == 0, err
    assert "bench: 2 of 6 turns are kept from before" in err
    kept = read_report(planned / "report" / "report.json")
    assert kept.complete
    results = read_manifest(planned).results
    # one of other conditions lies beside, and its figures are not the chain's
    few = ("--temperature", "1", "--max-new-tokens", "3", "--systems", "target")
    code, _, err = call(*command, *few)
    assert code == 0, err
    beside = planned / "report" / "temperature-1-3-tokens"
    assert err.splitlines()[-1].startswith(f"wrote {beside / 'report.html'}; next: ")
    assert read_report(planned / "report" / "report.json") == kept
    assert read_manifest(planned).results == results
    code, _, err = call(*command, "--num-prompts-per-task", "1", "--systems", "target")
    assert code == 0, err
    assert f"wrote {planned / 'report' / '1-prompt-a-task-systems-target' / 'report.html'}" in err
    assert read_report(planned / "report" / "report.json") == kept, "of more prompts and systems"
    shown = " ".join(call("inspect", planned)[1].split())
    assert "float32, temperature 0, 6 prompts (prompts.jsonl), 6 new tokens" in shown
    assert (
        "further reports: report/1-prompt-a-task-systems-target, report/temperature-1-3-tokens"
        in shown
    )


def test_wrong_input(planned: Path, prompts: Path, tmp_path: Path) -> None:
    assert "peers" in refusal("bench", planned, "--peers", "llama.cpp,foo")
    assert "systems" in refusal("bench", planned, "--systems", "target,foo")
    assert "no baseline" in refusal("bench", planned, "--systems", "eagle2")
    line = refusal("bench", planned, "--systems", "target,eagle3", "--prompts", prompts)
    assert line.startswith("error: system without members: eagle3 in bench.systems")
    prompts.write_text('{"prompt": "w1"}\n{"prompt": 2}\n')
    assert f"{prompts} line 2" in refusal("bench", planned, "--prompts", prompts)
    assert refusal("bench").startswith("error: no chain: polybasic bench; name one")
