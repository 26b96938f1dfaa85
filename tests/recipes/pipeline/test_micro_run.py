"""The whole way, everything real, in one process per attempt: killed, continued, the same."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.verify import check_chain
from polybasic.deploy import load_chain
from polybasic.quantize import writing
from polybasic.recipes.cli import main as cli
from polybasic.train import scratch
from tests import forked
from tests.recipes.command_line import call

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


def package_until_killed(recipe: Path, out: Path, stage: str) -> None:
    """Run `polybasic package`, and die in the midst of `stage`."""
    if stage == "target":
        scratch._SAVE_EVERY_STEPS = 30  # of the recipe's 60
        take_step = scratch._Run._take_step

        def step_or_die(run: Any, step: int, rows: Any) -> Any:
            if step == 40:
                forked.kill_this_process()
            return take_step(run, step, rows)

        scratch._Run._take_step = step_or_die  # type: ignore[method-assign]
    else:
        # after its weights, before its tokenizer
        writing.copy_files = forked.kill_this_process
    cli.main(["package", str(recipe), "--out", str(out)])


def records(out: Path) -> dict[str, dict]:
    found = {}
    for stage in STAGES:
        path = out / stage / "stage.json"
        if path.is_file():
            found[stage] = json.loads(path.read_text("utf-8"))
    return found


@pytest.mark.proof
def test_killed_in_two_stages_and_continued(micro_run, micro_recipe, tmp_path) -> None:
    """In one that goes on where it was, and in one that starts over."""
    out, log = tmp_path / "out", tmp_path / "log.txt"
    whole_before: dict[str, dict] = {}
    for stage in ("target", "intermediate"):
        exit_code = forked.run(package_until_killed, micro_recipe, out, stage, log=log)
        assert exit_code == -signal.SIGKILL, log.read_text("utf-8")
        whole = records(out)
        assert tuple(whole) == STAGES[: STAGES.index(stage)], f"killed in {stage}"
        assert whole | whole_before == whole, "what was whole was done again"
        whole_before = whole
    assert "target: continuing (interrupted earlier)" in log.read_text("utf-8")
    code, _, err = call("package", micro_recipe, "--out", out)
    assert code == 0, err
    assert err.count("skipped") == 3
    assert "intermediate: starting" in err
    for name in WEIGHTS:
        assert (out / name).read_bytes() == (micro_run / name).read_bytes(), name
    leftovers = {path.name for path in out.iterdir()} - {*STAGES[:5], "recipe.yaml"}
    assert leftovers == {".lock"}


def test_the_report_and_the_chain_are_whole(micro_run: Path) -> None:
    report = json.loads((micro_run / "chain" / "report" / "report.json").read_text("utf-8"))
    assert report["schema"] == "polybasic.report/2"
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


def test_a_second_run_does_nothing_and_says_where_the_report_is(micro_run, micro_recipe) -> None:
    before = records(micro_run)
    code, out, err = call("run", micro_recipe, "--out", micro_run)
    assert code == 0, err
    assert err.count("skipped") == len(STAGES)
    assert f"report: {micro_run / 'chain' / 'report' / 'report.html'}" in out
    assert records(micro_run) == before
    assert "0 of 7 stages would run" in dry_run(micro_recipe, micro_run)


def dry_run(recipe: Path, out: Path, *overrides: str) -> str:
    return call("run", recipe, *overrides, "--out", out, "--dry-run")[1]


def test_an_unrelated_key_redoes_only_what_depends_on_it(micro_run, micro_recipe) -> None:
    shown = dry_run(micro_recipe, micro_run, "bench.max_new_tokens=20")
    assert "1 of 7 stages would run" in shown
    assert "changed: bench.max_new_tokens" in " ".join(shown.split())
    for key, num_stages in (("train.num_steps=20", 4), ("seed=2", 7)):
        assert f"{num_stages} of 7 stages would run" in dry_run(micro_recipe, micro_run, key)


@pytest.fixture(scope="module")
def micro_four(micro_run, micro_recipe, tmp_path_factory) -> tuple[Path, str]:
    """The micro run with a smaller model added to it, and what that printed on stderr."""
    out = Path(shutil.copytree(micro_run, tmp_path_factory.mktemp("micro_four") / "out"))
    code, _, err = call("package", micro_recipe, *SMALL, "--out", out)
    assert code == 0, err
    return out, err


def test_a_smaller_model_joins_a_whole_run(micro_four, micro_recipe) -> None:
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
    assert set(checked.manifest.training) == {"target", "draft", "small_draft"}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        tokenizer = (out / "small_target" / name).read_bytes()
        assert tokenizer == (out / "target" / name).read_bytes()
    assert call("package", micro_recipe, *SMALL, "--out", out)[2].count("skipped") == 8


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
