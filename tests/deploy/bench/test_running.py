"""The benchmark on a tiny chain: prompts, counting, agreement, files, refusals."""

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from polybasic.chain.errors import UserError
from polybasic.chain.formats.manifest import read_manifest, write_manifest
from polybasic.chain.formats.verify import check_chain
from polybasic.deploy import load_chain
from polybasic.deploy.bench import running
from polybasic.deploy.bench.exactness import gap_at_divergence
from polybasic.deploy.bench.report import (
    baseline_line,
    print_report,
    rounding_line,
    rounding_rows,
)
from polybasic.deploy.bench.rereading import ONE_ROW, ReadPattern, answer_logits
from polybasic.deploy.bench.running import bench_chain
from polybasic.deploy.prompts import Question, choose_questions, read_questions
from polybasic.deploy.rounds.sampling import GreedySampler, Sampling
from polybasic.deploy.settings import BenchSettings
from tests.conftest import ChainParts


def write_prompts(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def question(number: int, category: str, *turns: str) -> dict[str, Any]:
    return {"question_id": number, "category": category, "turns": list(turns)}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(
        tmp_path_factory.mktemp("prompts") / "prompts.jsonl",
        question(1, "writing", "w5 w9", "w7"),
        question(2, "qa", "w1 w2 w3"),
        question(3, "qa", "w4"),
        question(4, "rag", " ".join(["w1"] * 200)),
    )


@pytest.fixture(scope="module")
def benched(
    _tiny_models: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A chain and its report, which tests only read."""
    folder = tmp_path_factory.mktemp("benched")
    models = shutil.copytree(_tiny_models, folder / "models")
    ChainParts(*(models / name for name in ("target", "intermediate", "draft"))).package(
        folder / "chain"
    )
    settings = BenchSettings(prompts=str(prompts), max_new_tokens=20, dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        # in whatever dtype transformers is faster: answers are compared in one
        patch.setattr(running, "candidate_dtypes", lambda own, *_: ([own], []))
        return folder / "chain", bench_chain(folder / "chain", settings)


def test_report_counts_what_was_run(benched: tuple[Path, dict[str, Any]]) -> None:
    _, report = benched
    assert report["schema"] == "polybasic.report/1"
    assert report["settings"]["num_prompts"] == 4  # two turns and two questions
    assert report["settings"]["num_questions_left_out_as_too_long"] == 1
    systems = report["systems"]
    assert list(systems) == ["target", "hf_generate", "eagle2", "polybasic_full", "polybasic"]
    for system in systems.values():
        assert system["tokens"] == systems["target"]["tokens"]
        agreement = system["identical_to_target"]
        assert (agreement["prompts"], agreement["identical"], agreement["near_ties"]) == (4, 4, 0)
        assert agreement["tolerance"] < 1e-4
        assert list(system["tasks"]) == ["mt_bench", "qa"]
        for total in ("tokens", "seconds"):
            by_task = sum(task[total] for task in system["tasks"].values())
            assert system[total] == pytest.approx(by_task)
        assert system["tokens_per_second"] == system["tokens"] / system["seconds"]
    assert systems["target"]["speedup_vs_target"] == 1
    assert systems["target"]["mean_accepted_length"] == 1
    full = systems["polybasic_full"]
    assert set(full["forward_passes"]) == {"target", "intermediate", "draft"}
    tokens_a_repeat = full["tokens"] / 2
    assert full["mean_accepted_length"] == pytest.approx(
        tokens_a_repeat / full["forward_passes"]["target"]
    )
    assert full["plan"]["flush"]["target"]["length"] == 5  # as packed
    assert full["seconds_per_token"]["predicted"] is None
    assert 0 < full["seconds_per_token"]["measured"] < full["seconds"] / full["tokens"]
    assert report["plan"]["members"] == ["target", "intermediate", "draft"]
    assert report["plan"]["explanation"] is None


def test_results_reach_files_and_manifest(benched: tuple[Path, dict[str, Any]]) -> None:
    chain, report = benched
    assert json.loads((chain / "report" / "report.json").read_text()) == report
    markdown = (chain / "report" / "report.md").read_text()
    assert report["adaptations"] == []
    assert "Adapted members" not in markdown
    memory = report["memory"]
    assert memory["stated"]["context_tokens"] == 128
    assert set(memory["stated"]["members"]) == {"target", "intermediate", "draft"}
    measured = memory["measured"]
    assert 0 < measured["staying_bytes"] <= measured["peak_bytes"]
    assert memory["ratio"] == measured["staying_bytes"] / memory["stated"]["staying_bytes"]
    assert "## Memory" in markdown
    assert "of weights and caches for 128 tokens of context (cpu, float32" in markdown
    assert report["draft_vocabulary"] == []
    assert "Draft vocabulary" not in markdown
    assert f"{baseline_line(report)}." in markdown
    for line in ("# Speedup over the source target", "| polybasic_full |", "| qa |", "- plan: "):
        assert line in markdown
    manifest = read_manifest(chain)
    assert manifest.results == report
    check_chain(chain)
    console = Console(record=True, width=120)
    print_report(report, console)
    printed = console.export_text()
    assert "polybasic_full" in printed
    assert f"{report['systems']['eagle2']['speedup_vs_target']:.2f}x" in printed


SAMPLED = BenchSettings(
    prompts="",
    max_new_tokens=20,
    temperature=1.0,
    repeats=1,
    systems=("target", "hf_generate", "eagle2", "polybasic"),
)


def test_samples_of_a_seed_are_the_targets(tiny_chain: Path, prompts: Path) -> None:
    report = bench_chain(tiny_chain, SAMPLED.model_copy(update={"prompts": str(prompts)}))
    systems = report["systems"]
    for name in ("eagle2", "polybasic"):
        assert systems[name]["identical_to_target"]["identical"] == 4
    assert "identical_to_target" not in systems["hf_generate"], "drawn by its own numbers"
    assert report["rounding"]["others"] == {}
    markdown = (tiny_chain / "report" / "report.md").read_text()
    assert "## Rounding" in markdown
    row = next(line for line in markdown.splitlines() if line.startswith("| hf_generate"))
    assert row.endswith("| - |")


@pytest.mark.usefixtures("noise_of_another_seed")
def test_samples_that_part_from_the_targets_are_counted(tiny_chain: Path, prompts: Path) -> None:
    systems = bench_chain(tiny_chain, SAMPLED.model_copy(update={"prompts": str(prompts)}))[
        "systems"
    ]
    assert systems["target"]["identical_to_target"]["identical"] == 4
    assert systems["eagle2"]["identical_to_target"]["identical"] < 4


def test_independent_samples_are_not_compared(
    tiny_chain: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read_manifest(tiny_chain)
    plan = manifest.plan.model_copy(update={"rule": "block"})
    write_manifest(tiny_chain, manifest.model_copy(update={"plan": plan}))
    systems = bench_chain(tiny_chain, SAMPLED.model_copy(update={"prompts": str(prompts)}))[
        "systems"
    ]
    assert systems["target"]["plan"]["rule"] == "coupled"
    assert systems["polybasic"]["plan"]["rule"] == "block"
    assert "identical_to_target" not in systems["polybasic"]


@pytest.mark.parametrize("kernels", ["auto", "device"])
def test_rounding_is_measured_and_stated(
    tiny_chain: Path, prompts: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", kernels)
    settings = BenchSettings(prompts=str(prompts), max_new_tokens=20, repeats=1)
    report = bench_chain(tiny_chain, settings)
    rounding = report["rounding"]
    assert rounding["dtype"] == "bfloat16"
    assert rounding["num_positions"] == report["systems"]["target"]["tokens"]
    # trees of 6 rows alone, and blocks of 6 to 9 above the intermediate
    assert list(rounding["ways"]) == [
        "1 row",
        "trees of 6 rows, 3 deep",
        *(f"blocks of {rows} rows" for rows in (6, 8, 9)),
    ]
    assert list(rounding["others"]) == ["hf_generate"]
    assert all(change["is_sound"] for change in (rounding["ways"] | rounding["others"]).values())
    systems = report["systems"]
    for name in ("eagle2", "polybasic_full", "polybasic"):
        assert systems[name]["identical_to_target"]["tolerance"] == rounding["tolerance"]
    library = systems["hf_generate"]["identical_to_target"]["tolerance"]
    assert library == max(rounding["tolerance"], rounding["others"]["hf_generate"]["from_one_row"])
    assert 0 < library < 5 * rounding["usual"]
    for system in systems.values():
        agreement = system["identical_to_target"]
        assert agreement["identical"] + agreement["near_ties"] == agreement["prompts"]
        assert agreement["widest_near_tie"] <= agreement["tolerance"]
    markdown = (tiny_chain / "report" / "report.md").read_text()
    assert f"- {rounding_line(report)}" in markdown
    assert "| trees of 6 rows, 3 deep |" in markdown


def test_the_report_names_what_is_wrong(benched: tuple[Path, dict[str, Any]]) -> None:
    report = deepcopy(benched[1])
    assert "0 near ties" in rounding_line(report)
    assert "WRONG" not in rounding_line(report)
    wrong = {"from_one_row": None, "from_reference": None, "is_sound": False}
    report["rounding"]["ways"]["blocks of 8 rows"] = wrong
    report["systems"]["eagle2"]["identical_to_target"] |= {"near_ties": 2, "widest_near_tie": 0.25}
    line = rounding_line(report)
    assert "2 near ties, the widest 0.25" in line
    assert line.endswith("WRONG, not rounding, and excused by nothing: passes in blocks of 8 rows")
    assert ["blocks of 8 rows", "not finite", "not finite", "WRONG"] in rounding_rows(report)


def test_a_baseline_in_another_dtype_is_a_reference_for_speed(
    benched: tuple[Path, dict[str, Any]],
) -> None:
    report = deepcopy(benched[1])
    library = report["systems"]["hf_generate"]
    answer = {"prompt_tokens": 30, "new_tokens": 20, "left_out": []}
    change = {"from_one_row": 0.5, "from_reference": 0.5, "is_sound": False}
    report["rounding"]["others"]["hf_generate"] = change
    library |= {"dtype": "float32", "answer": answer | {"seconds": {"float32": 1.25}}}
    assert ["hf_generate", "0.5", "0.5", "WRONG"] in rounding_rows(report)
    line = baseline_line(report)
    assert line == (
        "hf_generate computes in float32, as the target: an answer of 20 tokens to a prompt of 30 "
        "takes 1.25 s"
    )
    library["dtype"] = "bfloat16"
    library["answer"] = answer | {
        "seconds": {"float32": 1.25, "bfloat16": 1.0},
        "left_out": ["float16"],
    }
    assert ["hf_generate in bfloat16", "0.5", "0.5", "another dtype"] in rounding_rows(report)
    assert baseline_line(report) == (
        "hf_generate computes in bfloat16, faster here than the target's float32: an answer of 20 "
        "tokens to a prompt of 30 takes 1.00 s, in float32 1.25 s; float16 was not tried, for want "
        "of memory; other tokens than the target's can come of the other dtype"
    )
    del report["systems"]["hf_generate"]
    assert baseline_line(report) is None


def test_native_kernels_round_alike_in_blocks_of_any_size(tiny_chain: Path) -> None:
    verifier = load_chain(tiny_chain, dtype="bfloat16").engine.verifiers["target"]
    prompt, answer = list(range(1, 10)), list(range(20, 45))
    one_by_one = answer_logits(verifier, prompt, answer, ONE_ROW)
    for pattern in (*map(ReadPattern, (4, 8, 16, 25, 40)), ReadPattern(6, 3), ReadPattern(20, 5)):
        assert torch.equal(answer_logits(verifier, prompt, answer, pattern), one_by_one)
    best, second = one_by_one[-1].topk(2).indices.tolist()
    sampler = GreedySampler(Sampling(), len(prompt))
    one, other = [*answer[:-1], best, 3], [*answer[:-1], second, 4]
    gap = gap_at_divergence(verifier, sampler, prompt, one, other)
    assert gap == float(one_by_one[-1, best] - one_by_one[-1, second])


def test_questions_are_spread_over_the_file() -> None:
    questions = [Question(str(i), "qa" if i % 2 else "rag", ("x",)) for i in range(20)]
    chosen = choose_questions(questions, 3)
    assert [one.task for one in chosen] == ["qa"] * 3 + ["rag"] * 3
    assert [one.question_id for one in chosen] == ["1", "7", "13", "0", "6", "12"]
    assert len(choose_questions(questions, 99)) == 20


def test_spec_bench_categories_become_its_task_groups(tmp_path: Path) -> None:
    rows = [question(i, c, "x") for i, c in enumerate(("writing", "stem", "math_reasoning"))]
    questions = read_questions(write_prompts(tmp_path / "q.jsonl", *rows))
    assert [one.task for one in questions] == ["mt_bench", "mt_bench", "math_reasoning"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "prompts are empty: {path}; give at least one question"),
        ("\n{\n", "prompt is not JSON: {path} line 2"),
        ("[]\n", "prompt is not an object: {path} line 1"),
        ('{"question_id": 1, "turns": ["x"]}\n', "prompt without category: {path} line 1"),
        ('{"question_id": 1, "category": "qa", "turns": []}\n', "prompt without turns: {path}"),
    ],
)
def test_malformed_prompts_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(UserError) as refusal:
        read_questions(path)
    assert str(refusal.value).startswith(message.format(path=path))


def test_refusals_before_anything_runs(tiny_chain: Path, prompts: Path, tmp_path: Path) -> None:
    def refuse(message: str, **changed: Any) -> None:
        settings = BenchSettings(**({"prompts": str(prompts)} | changed))
        with pytest.raises(UserError) as refusal:
            bench_chain(tiny_chain, settings)
        assert str(refusal.value).startswith(message)

    refuse("prompts not found", prompts=str(tmp_path / "none.jsonl"))
    refuse("no baseline: bench.systems=eagle2", systems=("eagle2",))
    refuse("no prompt fits the context", max_new_tokens=128)
    assert not (tiny_chain / "report").exists()
