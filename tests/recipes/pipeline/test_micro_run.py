"""The whole way, everything real, in one process per attempt: killed, continued, the same."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.formats.checkpoints import writing_checkpoints
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.verify import check_chain
from polybasic.deploy import load_chain
from polybasic.recipes.cli import main as cli
from polybasic.train.run.loop import HeadRun
from tests import forked
from tests.checkpoints import write_family
from tests.recipes.command_line import call

STAGES = ("data", "target", "draft", "intermediate", "chain", "plan", "report")
WEIGHTS = (
    "data/prompts.jsonl",
    "data/plan_prompts.jsonl",
    "draft/model.safetensors",
    "intermediate/model.safetensors",
    "chain/draft/model.safetensors",
    "chain/intermediate/model.safetensors",
)


def package_until_killed(recipe: Path, out: Path, stage: str) -> None:
    """Run `polybasic package`, and die in the midst of `stage`."""
    if stage == "draft":
        loss_of = HeadRun._loss

        def loss_or_die(run: Any, batch: Any) -> Any:
            if run._state.step == 7:  # saved after every third
                forked.kill_this_process()
            return loss_of(run, batch)

        HeadRun._loss = loss_or_die  # type: ignore[method-assign]
    else:
        # after its weights, before its tokenizer
        writing_checkpoints.copy_files = forked.kill_this_process
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
    for stage in ("draft", "intermediate"):
        exit_code = forked.run(package_until_killed, micro_recipe, out, stage, log=log)
        assert exit_code == -signal.SIGKILL, log.read_text("utf-8")
        whole = records(out)
        assert tuple(whole) == STAGES[: STAGES.index(stage)], f"killed in {stage}"
        assert whole | whole_before == whole, "what was whole was done again"
        whole_before = whole
    assert "draft: continuing (interrupted earlier)" in log.read_text("utf-8")
    code, _, err = call("package", micro_recipe, "--out", out)
    assert code == 0, err
    assert err.count(", skipped") == 3
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
    for key, num_stages in (("train.num_steps=20", 4), ("seed=2", 5)):
        assert f"{num_stages} of 7 stages would run" in dry_run(micro_recipe, micro_run, key)


@pytest.fixture(scope="module")
def micro_four(micro_run, micro_recipe, tmp_path_factory) -> tuple[Path, str]:
    """The micro run with a smaller model added to it, and what that printed on stderr."""
    out = Path(shutil.copytree(micro_run, tmp_path_factory.mktemp("micro_four") / "out"))
    # another depth and another width than the target's
    shape = {"num_hidden_layers": 1, "hidden_size": 256, "num_attention_heads": 2}
    write_family(out.parent / "small", "llama2", seed=1, num_key_value_heads=1, **shape)
    code, _, err = call("package", micro_recipe, *small_of(out), "--out", out)
    assert code == 0, err
    return out, err


def small_of(out: Path) -> tuple[str]:
    return (f"small.model={out.parent / 'small'}",)


def test_a_smaller_model_joins_a_whole_run(micro_four, micro_recipe) -> None:
    out, stderr = micro_four
    assert stderr.count(", skipped") == 4
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
    assert call("package", micro_recipe, *small_of(out), "--out", out)[2].count("skipped") == 8


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
