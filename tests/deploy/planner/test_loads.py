"""Plans by number of sequences, on machines where the best one of each load is known."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.plan import Flush, Plan, Tree
from polybasic.chain.kernels.drafts import ABSENT
from polybasic.deploy import load_chain
from polybasic.deploy.planner.alternatives import Alternative, compared
from polybasic.deploy.planner.explanation import explain
from polybasic.deploy.planner.loads import choose_by_load
from polybasic.deploy.planner.measuring.answers import Calibration, CalibrationPrompt
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.planner.measuring.costs import MIN_SAMPLES, RoundCosts
from polybasic.deploy.planner.measuring.load_costs import NUM_BLOCKS, NUM_ROUNDS, LoadTimer, _usual
from polybasic.deploy.planner.measuring.measurements import DraftCosts, PassCosts, num_candidates
from polybasic.deploy.planner.measuring.traces import Measured
from polybasic.deploy.planner.run import plan_chain
from polybasic.deploy.planner.search import choose_plan
from polybasic.deploy.planner.settings import PlanGrid, PlanSettings
from polybasic.deploy.planner.tables import print_explanation
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.deploy.traces import make_measurements, make_trace

GRID = PlanGrid(depths=(2,), top_ks=(4,), rows=(4, 8, 16), ngram_matches=(), windows=())
LOADS = (1, 2, 4, 8, 16)
DRAFT_SECONDS = 1.2
"""Of a level."""

Machine = Callable[[int, int], tuple[float, float]]
"""Sequences, rows of each -> seconds of a pass that all share, and of a sequence's draft level."""


def reads_weights(sequences: int, rows: int) -> tuple[float, float]:
    """Weights take as long as 16 rows; drafts are not shared.

    A draft's first token is always right, its second is the seventh best candidate, its third is
    none. So a tree of 2 rows gains 2 tokens, one of 8 rows 3. Seconds a token of the machine:

        sequences   alone   2 rows   8 rows
        1           17      9.6      8.8
        2           9       5.6      6.1
        4           5       3.6      4.8
        8           3       2.6      4.1
        16          2       2.1      3.8
    """
    return 16.0 + sequences * rows, DRAFT_SECONDS


def reads_rows_for_nothing(sequences: int, rows: int) -> tuple[float, float]:
    """All passes are shared, and a further row costs what it costs one sequence, which is next to
    nothing: no plan gains more by being shared than another."""
    return 16.0 + rows, DRAFT_SECONDS / sequences


def measured_on(machine: Machine) -> Measured:
    num, rows = 600, (1, 2, 3, 4, 8, 16)
    ranks = np.full((num, 2, 2), ABSENT)
    ranks[:, :, 0], ranks[:, 1, 1] = 1, 7
    _, level = machine(1, 1)
    measurements = make_measurements(
        replace(make_trace({"target": [1.0] * num}), ranks={("draft", "target"): {4: ranks}}),
        drafters={"draft": ("target",)},
        passes={"target": PassCosts(rows, tuple(machine(1, num_rows)[0] for num_rows in rows))},
        drafts={"draft": DraftCosts({4: (level, level)})},
    )
    answered = [CalibrationPrompt("qa", [1, 2], [3, 4], 2)]
    calibration = Calibration(None, answered, frozenset(), Sampling(), GRID, (("coupled",),))  # type: ignore[arg-type]
    return Measured(calibration, (measurements,), (RoundCosts(),), 0.0)


class Timer(LoadTimer):
    """Stands for rounds on such a machine.

    Attributes:
        asked: what was timed, with so many sequences.
    """

    most_sequences = 1000

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.asked: list[tuple[Plan, int]] = []

    def __call__(self, plan: Plan, sequences: int, costs: RoundCosts) -> None:
        self.asked.append((plan, sequences))
        tree, rows = plan.tree, 1
        if plan.members[-1] == "draft":
            rows = min(tree.rows, 1 + num_candidates(tree.depth, tree.top_k))
            seconds = tree.depth * self.machine(sequences, rows)[1]
            costs.levels["draft", tree.top_k, tree.depth] += [seconds] * MIN_SAMPLES
        seconds = self.machine(sequences, rows)[0] / sequences
        costs.trees["target", rows] += [seconds] * MIN_SAMPLES


def found_by(
    timer: Timer, loads: tuple[int, ...] = LOADS, budget: Budget | None = None
) -> list[Alternative]:
    measured = measured_on(timer.machine)
    choice = choose_plan(measured.measurements, GRID)
    return choose_by_load(
        measured, choice, loads, timer, budget or Budget(math.inf), lambda line: None
    )


def rows_of(plan: Plan) -> int:
    return plan.tree.rows if len(plan.members) > 1 else 1


def test_trees_get_narrower_and_drafts_end_as_the_load_grows() -> None:
    found = found_by(Timer(reads_weights))
    assert {load.number: rows_of(load.best.plan) for load in found} == {
        1: 8, 2: 2, 4: 2, 8: 2, 16: 1,
    }  # fmt: skip
    seconds = [load.best.seconds_per_token for load in found]
    assert seconds == pytest.approx([8.8, 5.6, 3.6, 2.6, 2.0], rel=0.01)
    alone = [load.choice.alone.seconds_per_token for load in found]
    assert alone == pytest.approx([17.0, 9.0, 5.0, 3.0, 2.0], rel=0.01)
    of_one = [load.usual.seconds_per_token for load in found]
    assert of_one == pytest.approx([8.8, 6.1, 4.8, 4.1, 3.8], rel=0.02)
    assert all(load.planned()["plan"] == load.best.plan for load in found)


def test_a_load_that_changes_no_cost_changes_no_plan() -> None:
    found = found_by(Timer(reads_rows_for_nothing))
    assert [load.number for load in found] == list(LOADS)
    assert {load.best.plan.model_dump_json() for load in found} == {
        found[0].best.plan.model_dump_json()
    }
    assert rows_of(found[0].best.plan) == 8


def test_narrow_and_wide_trees_are_timed() -> None:
    timer = Timer(reads_weights)
    found_by(timer, (4,))
    shapes = [(rows_of(plan), plan.tree.depth) for plan, _ in timer.asked]
    # the widest is that of one sequence; the best was timed, and none is close to it
    assert shapes == [(2, 1), (5, 1), (8, 2), (1, 1)]
    assert {sequences for _, sequences in timer.asked} == {4}


def test_a_first_timing_that_was_lucky_is_found_out() -> None:
    class LuckyTimer(Timer):
        def __call__(self, plan: Plan, sequences: int, costs: RoundCosts) -> None:
            super().__call__(plan, sequences, costs)
            seconds = costs.trees["target", 2]
            if rows_of(plan) == 2:
                is_first = len(seconds) == MIN_SAMPLES
                seconds[:] = (
                    [0.9 * duration for duration in seconds]
                    if is_first
                    else seconds + 20 * seconds[-1:]
                )

    timer = LuckyTimer(reads_weights)
    (found,) = found_by(timer, (16,))
    assert rows_of(found.best.plan) == 1
    assert len(timer.asked) == 4 + 2 + 2, "with the target alone, to which it is close"


def test_large_loads_are_left_out_where_there_is_no_time_or_no_room() -> None:
    class SlowTimer(Timer):
        now = 0.0

        def __call__(self, plan: Plan, sequences: int, costs: RoundCosts) -> None:
            super().__call__(plan, sequences, costs)
            self.now += 2.0 * sequences

    timer = SlowTimer(reads_weights)
    budget = Budget(100.0, lambda: timer.now)
    found = found_by(timer, (*LOADS, 2000), budget)
    assert [load.number for load in found] == [1, 2, 4]
    assert budget.left_out == [
        "plans for 8 sequences",
        "plans for 16 sequences",
        "plans for 2000 sequences, for which there is no room",
    ]
    timer.now = 100.0
    assert found_by(timer, LOADS, budget) == [], "one sequence alone tells nothing of loads"


def test_independent_draws_are_for_one_sequence_alone() -> None:
    """The best plan draws independently; plans by load do not."""
    measured = measured_on(reads_weights)
    (coupled,) = measured.measurements
    faster = tuple(seconds / 2 for seconds in coupled.passes["target"].seconds)
    independent = replace(
        coupled,
        temperature=1.0,
        rules=("block", "token"),
        passes={"target": replace(coupled.passes["target"], seconds=faster)},
    )
    both = (replace(coupled, temperature=1.0), independent)
    measured = replace(measured, measurements=both, costs=(RoundCosts(), RoundCosts()))
    choice = choose_plan(both, GRID)
    assert choice.rule == "block"
    found = choose_by_load(
        measured, choice, (1, 16), Timer(reads_weights), Budget(math.inf), lambda line: None
    )
    assert {load.best.plan.rule for load in found} == {"coupled"}
    assert [rows_of(load.best.plan) for load in found] == [8, 1]


def test_sequences_change_their_plan_only_for_a_clearly_faster_one() -> None:
    last = found_by(Timer(reads_weights))[-1]
    fastest = last.choice.best
    assert last.best is fastest
    assert last.usual.plan != fastest.plan
    as_fast = replace(last.usual, predicted=fastest.predicted, measurements=fastest.measurements)
    assert replace(last, usual=as_fast).best is as_fast


def test_plans_by_load_are_shown_in_eighty_columns() -> None:
    measured = measured_on(reads_weights)
    choice = choose_plan(measured.measurements, GRID)
    loads = compared(found_by(Timer(reads_weights)), "sequences", "plan_of_one")
    explanation = explain(choice, measured.measurements[0], None, loads)
    for row in explanation["loads"]:
        for key in ("seconds_per_token", "seconds_of_target_alone", "seconds_of_plan_of_one"):
            row[key] /= 1000
    console = Console(width=80, record=True)
    print_explanation(json.loads(json.dumps(explanation)), console)
    _, _, table = console.export_text().partition("Best plan by number of sequences")
    lines = [" ".join(line.split()) for line in table.splitlines()]
    first = lines.index("1 114 58.8 114 target → draft; tree of")
    assert lines[first + 1] == "depth 2, top 4, 8 rows"
    assert "16 500 500 263 target; alone, no drafting" in lines
    assert explain(choice, measured.measurements[0])["loads"] == []


# On a real chain


def questions(folder: Path) -> Path:
    path = folder / "questions.jsonl"
    rows = [
        {"question_id": str(number), "category": "qa", "turns": [text]}
        for number, text in enumerate(("w1 w2 w3", "w4 w5", "w6 w2"))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_chain_gets_plans_by_load(tiny_chain: Path, tmp_path: Path) -> None:
    grid = PlanGrid(depths=(2, 3), top_ks=(2,), rows=(4,), flush_lengths=(4,), ngram_matches=(2,))
    settings = PlanSettings(
        prompts=str(questions(tmp_path)),
        max_new_tokens=16,
        dtype="float32",
        grid=grid,
        max_seconds=100,
        temperature=1.0,
        loads=(1, 2, 3, 99),
    )
    lines: list[str] = []
    planned = plan_chain(tiny_chain, settings, lines.append).measured
    assert [planned_load.sequences for planned_load in planned.by_load] == [1, 2, 3], (
        "of 99 there is no room"
    )
    assert all(planned_load.plan.rule == "coupled" for planned_load in planned.by_load)
    assert "plan: rounds of 3 sequences at a time" in lines
    assert "left out: plans for 99 sequences, for which there is no room" in lines[-1]
    assert read_manifest(tiny_chain).plans == (planned,)
    chain = load_chain(tiny_chain, dtype="float32")
    texts = [
        chain.generate("w1 w2", max_new_tokens=20, plan=plan, temperature=1.0, seed=3).text
        for plan in (chain.plan, *(planned_load.plan for planned_load in planned.by_load))
        if plan.rule == "coupled"
    ]
    assert len(set(texts)) == 1
    shown = planned.explanation["loads"]
    assert [row["sequences"] for row in shown] == [1, 2, 3]
    for row in shown:
        assert row["seconds_per_token"] <= 1.01 * row["seconds_of_target_alone"]
        assert row["seconds_per_token"] <= 1.01 * row["seconds_of_plan_of_one"]


def test_each_of_the_sequences_bears_its_share(
    tiny_chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine where any step takes as long, a pass of three costs each of them a third."""
    chain = load_chain(tiny_chain, dtype="float32")
    answered = [
        CalibrationPrompt("qa", chain.encode(text), [3, 4], 2) for text in ("w1", "w2 w3 w4")
    ]
    rules = (("coupled",),)
    calibration = Calibration(chain.engine, answered, frozenset(), Sampling(), GRID, rules)
    timer = LoadTimer(calibration)
    monkeypatch.setattr(timer, "_now", count(0, 6.0).__next__)
    tree = Tree(depth=2, top_k=2, rows=4)
    plans = {
        members: Plan(members=members, tree=tree, flush={"target": Flush(length=4)})
        for members in (("target",), ("target", "draft"), ("target", "intermediate", "draft"))
    }
    for sequences in (1, 3):
        costs = RoundCosts()
        for plan in plans.values():
            timer(plan, sequences, costs)
        share = 6.0 / sequences
        drafted = costs.trees["target", 4]
        assert len(drafted) >= 0.75 * NUM_ROUNDS * sequences, "without an eighth at either end"
        assert len(costs.trees["target", 1]) >= 0.75 * NUM_ROUNDS * sequences
        assert set(drafted) == {share}
        assert set(costs.levels["draft", 2, 2]) == {share}
        assert {name for name, _ in costs.blocks} == {"target"}
        assert sum(map(len, costs.blocks.values())) >= 0.75 * NUM_BLOCKS * sequences
        assert {name for name, _ in costs.trees} == {"target", "intermediate"}
    assert chain.engine.num_running == 0


def test_a_step_in_which_the_machine_did_something_else_is_left_out() -> None:
    steps = [1.0] * 7 + [50.0]
    assert set(_usual([share for share in steps for _ in range(4)])) == {1.0}
    assert _usual([2.0, 1.0]) == [1.0, 2.0]
