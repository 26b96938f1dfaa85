"""`polybasic bench` as it is called: a report, another folder, a comparison, wrong input."""

import json
from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.formats.manifest import read_manifest
from polybasic.deploy.bench.chain_systems import ChainSystem
from polybasic.deploy.bench.schema import read_report
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
    monkeypatch.setattr(measure, "_has_plan", lambda *_: True)
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
    assert str(tmp_path) not in json.dumps(report.to_json()["settings"])
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


def test_planning_on_a_part_of_the_prompts(
    planned: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def plan(folder: Path, settings: Any, named: str) -> None:
        asked.append(Path(settings.prompts).read_text().splitlines())
        assert named == "prompts.jsonl"

    monkeypatch.setattr(measure, "_plan", plan)
    code, printed, err = call(
        *("bench", planned, *QUICK, "--systems", "target", "--prompts", prompts),
        *("--plan-here", "--num-prompts-per-task", "9", "--json"),
    )
    assert code == 0, err
    assert len(asked[0]) == 2
    report = json.loads(printed)
    assert [one["question_id"] for one in report["prompts"]] == ["2", "3", "5", "6"]
    assert {json.loads(line)["question_id"] for line in asked[0]} == {"1", "4"}
    prompts.write_text(json.dumps({"prompt": "w1"}))
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
            raise KeyboardInterrupt
        return usual(self, *asked)

    monkeypatch.setattr(ChainSystem, "answer", answer)
    command = ("bench", planned, *QUICK, *TWO, "--prompts", prompts)
    code, _, err = call(*command)
    assert code == 130
    partial = planned / "report" / "partial"
    assert f"wrote {partial / 'report.md'}; the same command goes on from there" in err
    assert not read_report(partial / "report.json").complete
    assert read_manifest(planned).results is None
    code, _, err = call(*command)
    assert code == 0, err
    assert "bench: 2 of 6 turns are kept from before" in err
    assert read_report(planned / "report" / "report.json").complete


def test_wrong_input(planned: Path, prompts: Path, tmp_path: Path) -> None:
    assert "peers" in refusal("bench", planned, "--peers", "llama.cpp,foo")
    assert "systems" in refusal("bench", planned, "--systems", "target,foo")
    assert "no baseline" in refusal("bench", planned, "--systems", "eagle2")
    line = refusal("bench", planned, "--systems", "target,eagle3", "--prompts", prompts)
    assert line.startswith("error: system without members: eagle3 in bench.systems")
    prompts.write_text('{"prompt": "w1"}\n{"prompt": 2}\n')
    assert f"{prompts} line 2" in refusal("bench", planned, "--prompts", prompts)
    assert refusal("bench").startswith("error: no chain: polybasic bench; name one")
