"""The report of a chain whose answers need not all run by the same members."""

import json
from pathlib import Path

import pytest
import torch

from polybasic.chain.formats.card import record_plan
from polybasic.chain.formats.plan import EarlyPlan, Flush, MeasuredPlan, Ngram, Plan, Tree
from polybasic.deploy.bench import running
from polybasic.deploy.bench.running import bench_chain
from polybasic.deploy.bench.schema import Report
from polybasic.deploy.planner.settings import BenchSettings
from polybasic.deploy.runtime.hardware import hardware_name

COPYING = Ngram(min_match=1)
TREE = Tree(depth=1, top_k=1, rows=4)


@pytest.fixture
def report(tiny_four_chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """Of two short prompts and a long one, which no answer is long enough for the model to read."""
    monkeypatch.setattr(running, "write_page", lambda path, report: None)
    plan = Plan(
        members=("target", "small"), tree=TREE, flush={"target": Flush(length=4)}, ngram=COPYING
    )
    early = EarlyPlan(
        plan=Plan(members=("target",), tree=TREE, ngram=COPYING),
        seconds_per_token=2.0,
        reading_seconds=0.5,
    )
    record_plan(
        tiny_four_chain,
        MeasuredPlan(
            plan=plan,
            seconds_per_token=1.0,
            hardware=hardware_name(torch.device("cpu")),
            dtype="float32",
            temperature=0.0,
            early=early,
            explanation={"decision": "run small"},
        ),
    )
    turns = ("w5 w9", " ".join(["w1"] * 60), "w7")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"question_id": place, "category": "qa", "turns": [turn]}) + "\n"
            for place, turn in enumerate(turns)
        )
    )
    settings = BenchSettings(
        prompts=str(prompts),
        max_new_tokens=20,
        dtype="float32",
        systems=("target", "ngram", "polybasic"),
        repeats=1,
    )
    return bench_chain(tiny_four_chain, settings, command="polybasic bench it")


def test_members_are_counted_in_the_answers_that_they_ran_in(report: Report) -> None:
    planned = report.systems["polybasic"]
    assert planned.answers.accepted_lengths is not None
    (by_target,) = planned.answers.accepted_lengths["target"]
    (by_small,) = planned.answers.accepted_lengths["small"]
    assert [bool(gained) for gained in by_small] == [True, False, True]
    assert all(by_target)
    assert planned.answers.token_ids == report.systems["target"].answers.token_ids
    for name in ("target", "small"):
        cost = planned.members[name]
        assert cost.rows_per_token is not None
        assert cost.accepted_length is not None
        gained = cost.accepted_length.mean * cost.passes
        assert cost.passes <= cost.rows_per_token * gained <= 5 * cost.passes, name


def test_no_theorem_is_judged_by_answers_without_the_member(report: Report) -> None:
    assert report.insertions == []
