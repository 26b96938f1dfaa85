"""The benchmark on a tiny chain: prompts, counting, agreement, files, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from polybasic.chain.errors import UserError
from polybasic.chain.manifest import read_manifest
from polybasic.chain.verify import check_chain
from polybasic.deploy import load_chain
from polybasic.deploy.benchmark import bench_chain
from polybasic.deploy.exactness import BLOCK_ROWS, is_near_tie, position_logits, spread
from polybasic.deploy.prompts import Question, choose_questions, read_questions
from polybasic.deploy.report import print_report
from polybasic.deploy.settings import BenchSettings
from tests.chain.native_models import eager


def write_prompts(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def question(number: int, category: str, *turns: str) -> dict[str, Any]:
    return {"question_id": number, "category": category, "turns": list(turns)}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(
        tmp_path / "prompts.jsonl",
        question(1, "writing", "w5 w9", "w7"),
        question(2, "qa", "w1 w2 w3"),
        question(3, "qa", "w4"),
        question(4, "rag", " ".join(["w1"] * 200)),
    )


@pytest.fixture
def report(tiny_chain: Path, prompts: Path) -> dict[str, Any]:
    settings = BenchSettings(prompts=str(prompts), max_new_tokens=20, dtype="float32")
    return bench_chain(tiny_chain, settings)


def test_report_counts_what_was_run(tiny_chain: Path, report: dict[str, Any]) -> None:
    assert report["schema"] == "polybasic.report/1"
    assert report["settings"]["num_prompts"] == 4  # two turns and two questions
    assert report["settings"]["num_questions_left_out_as_too_long"] == 1
    systems = report["systems"]
    assert list(systems) == ["target", "hf_generate", "eagle2", "polybasic_full", "polybasic"]
    for system in systems.values():
        assert system["tokens"] == systems["target"]["tokens"]
        assert system["identical_to_target"] == {"prompts": 4, "identical": 4, "near_ties": 0}
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


def test_results_reach_files_and_manifest(tiny_chain: Path, report: dict[str, Any]) -> None:
    assert json.loads((tiny_chain / "report" / "report.json").read_text()) == report
    markdown = (tiny_chain / "report" / "report.md").read_text()
    assert report["adaptations"] == []
    assert "Adapted members" not in markdown
    memory = report["memory"]
    assert memory["stated"]["context_tokens"] == 128
    assert set(memory["stated"]["members"]) == {"target", "intermediate", "draft"}
    measured = memory["measured"]
    assert 0 < measured["staying_bytes"] <= measured["loading_bytes"]
    assert memory["ratio"] == measured["staying_bytes"] / memory["stated"]["staying_bytes"]
    assert "## Memory" in markdown
    assert "of weights and caches for 128 tokens of context (cpu, float32" in markdown
    assert report["draft_vocabulary"] == []
    assert "Draft vocabulary" not in markdown
    for line in ("# Speedup over the source target", "| polybasic_full |", "| qa |", "- plan: "):
        assert line in markdown
    manifest = read_manifest(tiny_chain)
    assert manifest.results == report
    check_chain(tiny_chain)
    console = Console(record=True, width=120)
    print_report(report, console)
    printed = console.export_text()
    assert "polybasic_full" in printed
    assert f"{report['systems']['eagle2']['speedup_vs_target']:.2f}x" in printed


def test_sampling_needs_no_identical_outputs(tiny_chain: Path, prompts: Path) -> None:
    settings = BenchSettings(
        prompts=str(prompts),
        max_new_tokens=8,
        temperature=1.0,
        repeats=1,
        systems=("target", "polybasic"),
    )
    systems = bench_chain(tiny_chain, settings)["systems"]
    assert list(systems) == ["target", "polybasic"]
    assert "identical_to_target" not in systems["polybasic"]


def test_native_kernels_round_alike_in_blocks_of_any_size(tiny_chain: Path) -> None:
    verifier = load_chain(tiny_chain, dtype="bfloat16").engine.verifiers["target"]
    prompt, answer = list(range(1, 10)), list(range(20, 45))
    one_by_one = position_logits(verifier, prompt, answer, rows=1)
    for rows in (*BLOCK_ROWS, 25, 40):
        assert torch.equal(position_logits(verifier, prompt, answer, rows), one_by_one)
    best, second = one_by_one.topk(2).indices.tolist()
    assert not is_near_tie(verifier, prompt, [*answer, best], [*answer, second])


def test_near_ties_need_a_gap_below_the_rounding(tiny_chain: Path) -> None:
    with eager():
        verifier = load_chain(tiny_chain, dtype="bfloat16").engine.verifiers["target"]
    prompt, answer = list(range(1, 10)), list(range(20, 45))
    one_by_one = position_logits(verifier, prompt, answer, rows=1)
    ways = [position_logits(verifier, prompt, answer, rows) for rows in BLOCK_ROWS]
    rounding = max(spread(way - one_by_one) for way in ways)
    assert 0 < rounding < 0.2 * float(one_by_one.abs().max())
    ordered = one_by_one.argsort(descending=True).tolist()
    best = ordered[0]
    for other in ordered[1:]:
        gap = float(one_by_one[best] - one_by_one[other])
        found = is_near_tie(verifier, prompt, [*answer, best], [*answer, other])
        assert found == (gap < rounding)
    assert not is_near_tie(verifier, prompt, [*answer, best], [*answer, ordered[-1]])
    assert not is_near_tie(verifier, prompt, answer, [*answer, 3]), "a missing token is no tie"


def test_ways_of_reading_agree_in_float32(tiny_chain: Path) -> None:
    verifier = load_chain(tiny_chain, dtype="float32").engine.verifiers["target"]
    prompt, answer = list(range(1, 10)), list(range(20, 45))
    one_by_one = position_logits(verifier, prompt, answer, rows=1)
    for rows in (*BLOCK_ROWS, 25, 40):
        assert spread(position_logits(verifier, prompt, answer, rows) - one_by_one) < 1e-4
    best, second = one_by_one.topk(2).indices.tolist()
    assert float(one_by_one[best] - one_by_one[second]) > 1e-3
    assert not is_near_tie(verifier, prompt, [*answer, best], [*answer, second])
    assert spread(position_logits(verifier, prompt[:1], [], rows=1) - one_by_one) > 1


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
