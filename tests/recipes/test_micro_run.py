"""The whole way, everything real, in one process per attempt: killed, continued, the same."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STAGES = ("data", "target", "draft", "intermediate", "chain", "report")
WEIGHTS = (
    "data/conversations.jsonl",
    "data/prompts.jsonl",
    "target/model.safetensors",
    "draft/model.safetensors",
    "intermediate/model.safetensors",
    "chain/draft/model.safetensors",
    "chain/intermediate/model.safetensors",
)
KILLED_WHEN = {
    "data": "data/conversations.jsonl",
    "target": "target/training_state.pt",
    "draft": "draft/checkpoints/*",
    "intermediate": "intermediate/model.safetensors",
    "chain": "chain",
    "report": "report",
}
"""In each stage, the file below its temporary folder at whose appearance the run is killed."""

pytestmark = pytest.mark.slow


def run_until_killed(recipe: Path, folder: Path, stage: str) -> None:
    """Start a run and kill it with SIGKILL as soon as `stage` has written something."""
    name, _, inside = KILLED_WHEN[stage].partition("/")
    partial = folder / "out" / f".{name}.partial"
    command = [sys.executable, "-m", "polybasic.recipes.cli", "run", recipe, "--out", "out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / f"{stage}.log").open("w") as log:
        running = subprocess.Popen(command, cwd=folder, env=environment, stderr=log, stdout=log)
        deadline = time.monotonic() + 120
        while not (list(partial.glob(inside)) if inside else partial.exists()):
            assert running.poll() is None, (folder / f"{stage}.log").read_text("utf-8")
            assert time.monotonic() < deadline
            time.sleep(0.002)
        running.kill()
        assert running.wait() == -signal.SIGKILL


def records(out: Path) -> dict[str, dict]:
    found = {}
    for stage in STAGES:
        path = out / stage / "stage.json"
        if path.is_file():
            found[stage] = json.loads(path.read_text("utf-8"))
    return found


def test_killed_in_every_stage_and_continued(micro_run, micro_recipe, polybasic, tmp_path) -> None:
    whole_before: dict[str, dict] = {}
    for position, stage in enumerate(STAGES):
        run_until_killed(micro_recipe, tmp_path, stage)
        whole = records(tmp_path / "out")
        assert tuple(whole) == STAGES[:position], f"killed in {stage}"
        for name, record in whole_before.items():
            assert whole[name] == record, f"{name} was whole and done again"
        whole_before = whole
    done = polybasic("run", micro_recipe, "--out", "out")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("skipped") == len(STAGES) - 1
    for log in ("target", "draft"):
        following = STAGES[STAGES.index(log) + 1]
        text = (tmp_path / f"{following}.log").read_text("utf-8")
        assert f"{log}: continues (interrupted earlier)" in text
    for name in WEIGHTS:
        assert (tmp_path / "out" / name).read_bytes() == (micro_run / name).read_bytes(), name
    leftovers = {path.name for path in (tmp_path / "out").iterdir()} - {*STAGES, "recipe.yaml"}
    assert leftovers == {".lock"}


def test_the_report_and_the_chain_are_whole(micro_run: Path) -> None:
    report = json.loads((micro_run / "chain" / "report" / "report.json").read_text("utf-8"))
    assert report["schema"] == "polybasic.report/1"
    assert set(report["systems"]) == {
        "target",
        "hf_generate",
        "eagle2",
        "polybasic_full",
        "polybasic",
    }
    for system in report["systems"].values():
        assert set(system["tasks"]) == {
            "mt_bench",
            "translation",
            "summarization",
            "qa",
            "math_reasoning",
            "rag",
        }
    manifest = json.loads((micro_run / "chain" / "chain.json").read_text("utf-8"))
    assert manifest["results"] is not None
    assert manifest["provenance"]["recipe"]["name"] == "micro"
    assert manifest["provenance"]["command"].startswith("polybasic run ")
    assert manifest["quality"]["num_tokens"] > 0
    assert manifest["training"]["steps"] == 12


def test_a_second_run_does_nothing_and_says_where_the_report_is(
    micro_run, micro_recipe, polybasic
) -> None:
    before = records(micro_run)
    again = polybasic("run", micro_recipe, "--out", micro_run)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("skipped") == len(STAGES)
    assert f"report: {micro_run / 'chain' / 'report' / 'report.md'}" in again.stdout
    assert records(micro_run) == before
    dry = polybasic("run", micro_recipe, "--out", micro_run, "--dry-run")
    assert "0 of 6 stages would run" in dry.stdout


def test_an_unrelated_key_redoes_only_what_depends_on_it(
    micro_run, micro_recipe, polybasic
) -> None:
    changed = polybasic(
        "run", micro_recipe, "bench.max_new_tokens=20", "--out", micro_run, "--dry-run"
    )
    assert "1 of 6 stages would run" in changed.stdout
    assert "changed: bench.max_new_tokens" in " ".join(changed.stdout.split())
    changed = polybasic("run", micro_recipe, "train.num_steps=20", "--out", micro_run, "--dry-run")
    assert "3 of 6 stages would run" in changed.stdout
    changed = polybasic("run", micro_recipe, "seed=2", "--out", micro_run, "--dry-run")
    assert "6 of 6 stages would run" in changed.stdout
