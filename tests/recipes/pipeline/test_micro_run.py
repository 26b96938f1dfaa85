"""The whole way, everything real, in one process per attempt: killed, continued, the same."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.verify import check_chain
from polybasic.deploy import load_chain

STAGES = ("data", "target", "draft", "intermediate", "chain", "plan", "report")
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
    "plan": "plan/calibration.jsonl",
    "report": "report",
}
"""In each stage, the file below its temporary folder at whose appearance the run is killed."""

SMALL = (
    "small.scratch.num_layers=1",
    "small.scratch.hidden_size=256",
    "small.scratch.intermediate_size=256",
    "small.scratch.num_heads=2",
    "small.scratch.num_kv_heads=1",
    "small.scratch.context_tokens=512",
    "small.scratch.num_steps=20",
    "small.scratch.batch_tokens=512",
    "small.scratch.row_tokens=128",
    "small.scratch.warmup_steps=2",
)
"""A smaller model of another depth and another width than the micro recipe's target."""

pytestmark = pytest.mark.slow


def run_until_killed(recipe: Path, folder: Path, stage: str) -> None:
    """Start a run and kill it with SIGKILL as soon as `stage` has written something."""
    name, _, inside = KILLED_WHEN[stage].partition("/")
    partial = folder / "out" / f".{name}.partial"
    command = [sys.executable, "-m", "polybasic.recipes.cli.main", "run", recipe, "--out", "out"]
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
    assert manifest["quality"]["intermediate"]["num_tokens"] > 0
    assert manifest["training"]["draft"]["steps"] == 12


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
    assert "0 of 7 stages would run" in dry.stdout


def test_an_unrelated_key_redoes_only_what_depends_on_it(
    micro_run, micro_recipe, polybasic
) -> None:
    changed = polybasic(
        "run", micro_recipe, "bench.max_new_tokens=20", "--out", micro_run, "--dry-run"
    )
    assert "1 of 7 stages would run" in changed.stdout
    assert "changed: bench.max_new_tokens" in " ".join(changed.stdout.split())
    changed = polybasic("run", micro_recipe, "train.num_steps=20", "--out", micro_run, "--dry-run")
    assert "4 of 7 stages would run" in changed.stdout
    changed = polybasic("run", micro_recipe, "seed=2", "--out", micro_run, "--dry-run")
    assert "7 of 7 stages would run" in changed.stdout


@pytest.fixture(scope="module")
def micro_four(micro_run, micro_recipe, polybasic_in, tmp_path_factory) -> tuple[Path, str]:
    """The micro run with a smaller model added to it, and what that printed on stderr."""
    folder = tmp_path_factory.mktemp("micro_four")
    shutil.copytree(micro_run, folder / "out")
    done = polybasic_in(["package", micro_recipe, *SMALL, "--out", "out"], folder)
    assert done.returncode == 0, done.stderr
    return folder / "out", done.stderr


def test_a_smaller_model_joins_a_whole_run(micro_four, micro_recipe, polybasic) -> None:
    out, stderr = micro_four
    assert stderr.count("skipped") == 4
    checked = check_chain(out / "chain")
    assert {member.name: member.drafts_for for member in checked.manifest.members} == {
        "target": (),
        "intermediate": (),
        "small": (),
        "draft": ("target", "intermediate"),
        "small_draft": ("small",),
    }
    # the micro target is small: so wide a model is the larger one, and that is told
    (warning,) = checked.warnings
    assert warning.startswith("small is larger than intermediate above it: a pass of small reads ")
    assert f"warning: {warning}\n" in stderr
    assert set(checked.manifest.quality) == {"intermediate", "small"}
    assert set(checked.manifest.training) == {"draft", "small_draft"}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        tokenizer = (out / "small_target" / name).read_bytes()
        assert tokenizer == (out / "target" / name).read_bytes()
    again = polybasic("package", micro_recipe, *SMALL, "--out", out)
    assert again.stderr.count("skipped") == 8


def test_four_trained_members_answer_as_the_target(micro_four) -> None:
    chain = micro_four[0] / "chain"
    plan, members = read_manifest(chain).plan, ("target", "intermediate", "small", "small_draft")
    answers = [
        load_chain(
            chain, dtype="float32", plan=plan.model_copy(update={"members": chosen})
        ).generate("Why is the sky blue?", max_new_tokens=24)
        for chosen in (members, ("target",))
    ]
    assert answers[0].token_ids == answers[1].token_ids
    assert set(answers[0].statistics.forward_passes) == set(members)
