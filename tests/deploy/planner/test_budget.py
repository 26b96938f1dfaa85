"""Planning within a number of seconds, on a clock of its own."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from polybasic.chain.formats.card import record_plan
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.plan import Plan
from polybasic.deploy import load_chain
from polybasic.deploy.planner import finalists
from polybasic.deploy.planner.explanation import decide, explain
from polybasic.deploy.planner.finalists import CLOSE, time_finalists
from polybasic.deploy.planner.measuring.answers import Calibration, CalibrationPrompt
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.planner.measuring.costs import RoundCosts, _plans_to_time
from polybasic.deploy.planner.measuring.traces import Measured
from polybasic.deploy.planner.run import plan_loaded
from polybasic.deploy.planner.search import PlanChoice, choose_plan
from polybasic.deploy.planner.settings import PlanGrid, PlanSettings
from polybasic.deploy.planner.simulation import Simulator
from polybasic.deploy.planner.tables import print_explanation
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.deploy.traces import chain_ranks, make_measurements, make_trace


class Clock:
    """Stands still unless it is moved, or goes on whenever it is read."""

    def __init__(self, seconds_a_reading: float = 0.0) -> None:
        self.now, self.seconds_a_reading = 0.0, seconds_a_reading

    def __call__(self) -> float:
        self.now += self.seconds_a_reading
        return self.now


def num_done(max_seconds: float, seconds: list[float], share: float = 1.0) -> tuple[int, Budget]:
    """How many steps that take so long are begun."""
    clock = Clock()
    budget = Budget(max_seconds, clock)
    num = 0
    for step in budget.within(seconds, share, "steps", enough=3):
        num += 1
        clock.now += step
    return num, budget


def test_what_is_likely_to_take_too_long_is_not_begun() -> None:
    num, budget = num_done(10.0, [3.0] * 5)
    assert (num, budget.left_out, budget.is_rough) == (3, ["2 of 5 steps"], False)
    num, budget = num_done(10.0, [4.0] * 5)
    assert (num, budget.left_out, budget.is_rough) == (2, ["3 of 5 steps"], True)
    num, budget = num_done(10.0, [2.0] * 5)
    assert (num, budget.left_out, budget.is_rough) == (5, [], False)
    assert num_done(10.0, [2.0] * 5, share=0.5)[0] == 2
    assert num_done(1.0, [50.0, 1.0])[0] == 1, "the first is never left out"
    assert num_done(1.0, [])[0] == 0
    assert budget.report() == {
        "max_seconds": 10.0, "seconds": 10.0, "left_out": [], "is_rough": False,
    }  # fmt: skip


def test_a_cut_answer_could_not_have_been_longer() -> None:
    prompt = CalibrationPrompt("qa", [1], [2, 3, 4, 5], max_tokens=9)
    assert prompt.cut(4) is prompt
    assert prompt.cut(3) == CalibrationPrompt("qa", [1], [2, 3, 4], max_tokens=3)


GRID = PlanGrid(
    depths=(1, 3), top_ks=(2,), rows=(4, 7), flush_lengths=(2, 4), ngram_matches=(1,),
    ngram_tokens=4,
)  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> PlanSettings:
    """Three prompts of each of two tasks."""
    path = tmp_path / "questions.jsonl"
    texts = {"qa": ("w1 w2 w3", "w4 w5", "w6"), "rag": ("w7 w8", "w9", "w2 w9 w1")}
    rows = [
        {"question_id": f"{task} {number}", "category": task, "turns": [text]}
        for task, of_task in texts.items()
        for number, text in enumerate(of_task)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PlanSettings(
        prompts=str(path), max_new_tokens=16, dtype="float32", grid=GRID, max_seconds=100
    )


@pytest.mark.parametrize("seconds_a_reading", [0.0, 2.0, 60.0])
def test_the_slower_the_clock_the_less_is_measured(
    tiny_chain: Path, settings: PlanSettings, seconds_a_reading: float
) -> None:
    """A plan can be made and run however little time there is, and says what it lacks."""
    chain, lines = load_chain(tiny_chain, dtype="float32"), []
    planning = plan_loaded(chain, settings, lines.append, Clock(seconds_a_reading))
    planned, (measurements,) = planning.measured, planning.measurements
    budget = planned.explanation["budget"]
    console = Console(record=True, width=200)
    print_explanation(json.loads(json.dumps(planned.explanation)), console)
    assert lines[-1].removeprefix("plan: ") in " ".join(console.export_text().split())
    tasks = Counter(trace.task for trace in measurements.traces)
    if seconds_a_reading == 0:
        assert (budget["left_out"], budget["is_rough"]) == ([], False)
        assert tasks == {"qa": 3, "rag": 3}
        assert {trace.max_tokens for trace in measurements.traces} == {16}
        assert len(planned.others) > 3
    else:
        assert budget["is_rough"]
        assert "the plan is rough" in lines[-1]
        assert "of 6 answers" in " ".join(budget["left_out"])
    if seconds_a_reading == 60:
        assert tasks == {"qa": 1}
        assert [len(trace) for trace in measurements.traces] == [8]
        assert measurements.traces[0].max_tokens == 8
        # nothing but the target was timed
        assert set(measurements.passes) == {"target"}
        assert planned.plan.members == ("target",)
        assert "leave intermediate out: nothing of it was measured" in lines_of(planned)
    answers = [
        chain.generate("w1 w2", max_new_tokens=20, **how).token_ids
        for how in ({"plan": planned.plan}, {"members": ["target"]})
    ]
    assert answers[0] == answers[1]


def test_every_rule_has_a_cost_of_the_target_alone(
    tiny_chain: Path, settings: PlanSettings
) -> None:
    chain = load_chain(tiny_chain, dtype="float32")
    sampled = settings.model_copy(update={"temperature": 1.0})
    planning = plan_loaded(chain, sampled, lambda line: None, Clock(60.0))
    assert [set(figures.passes) for figures in planning.measurements] == [{"target"}, {"target"}]
    assert planning.measured.plan.members == ("target",)
    assert {rule["rule"] for rule in planning.measured.explanation["rules"]} == {
        "coupled", "block", "token",
    }  # fmt: skip
    assert planning.measured.explanation["budget"]["is_rough"]


def lines_of(planned: Any) -> str:
    decision: str = planned.explanation["decision"]
    return decision


def test_the_first_timings_are_of_other_members_each(tiny_four_chain: Path) -> None:
    plans = _plans_to_time(load_chain(tiny_four_chain, dtype="float32").engine, GRID)
    sets = [(plan.members, plan.ngram) for plan in plans]
    assert plans[0].members == ("target",)
    num_sets = len(set(sets))
    assert len(set(sets[:num_sets])) == num_sets < len(plans)
    trees = [plan.tree for plan in plans if plan.members == ("target", "draft")]
    assert [tree.rows for tree in trees[:2]] == [4, 7]


# Plans that are close

PLENTY = 50
"""Rounds of a timing: many beside those that were timed before."""


def close_race(seconds: dict[str, float]) -> Measured:
    """A target and drafters that foresee as much as each other, and take so long for a draft."""
    trace = make_trace({"target": [1.0] * 60}, {"target": [2, 1, 0] * 20})
    ranks = {(name, "target"): {1: chain_ranks([2, 1, 0] * 20, 4)} for name in seconds}
    costs = RoundCosts()
    for rows in (1, 4):
        costs.trees["target", rows] += [9.0 + rows] * 5
    for name, duration in seconds.items():
        costs.levels[name, 1, 2] += [duration] * 5
    measurements = make_measurements(
        replace(trace, ranks=ranks), drafters=dict.fromkeys(seconds, ("target",))
    )
    grid = PlanGrid(depths=(2,), top_ks=(1,), rows=(4,), ngram_matches=(), windows=())
    answered = [CalibrationPrompt("qa", [1, 2], [3, 4], 2)]
    calibration = Calibration(None, answered, frozenset(), Sampling(), grid, (("coupled",),))  # type: ignore[arg-type]
    return Measured(calibration, (measurements,), (costs,), 0.0).with_costs()


def timing(seconds: dict[str, float], asked: list[Plan], after: Callable[[], None]) -> Any:
    """Stands for `time_plan` on a machine where drafts really take so long."""

    def time_plan(
        engine: Any, prompt: Any, plan: Plan, stops: Any, sampling: Any, costs: RoundCosts
    ) -> None:
        asked.append(plan)
        name = plan.members[-1]
        if name in seconds:
            costs.levels[name, 1, 2] += [seconds[name]] * PLENTY
        after()

    return time_plan


def again(
    measured: Measured, choice: PlanChoice, budget: Budget, say: Callable[[str], None]
) -> tuple[Measured, PlanChoice, dict[str, int]]:
    """What `time_finalists` finds."""
    simulators = [Simulator(each) for each in measured.measurements]
    return time_finalists(measured, choice, simulators, budget, say)


def test_close_plans_are_timed_again_and_the_better_half_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = {"lucky": 1.0, "good": 1.2, "fair": 1.3, "far": 9.0}
    measured = close_race(first)
    before = choose_plan(measured.measurements, measured.calibration.grid)
    assert before.best.names == ("target", "lucky")
    asked: list[Plan] = []
    really = {"lucky": 4.0, "good": 1.2, "fair": 1.3, "far": 0.1}
    monkeypatch.setattr(finalists, "time_plan", timing(really, asked, lambda: None))
    lines: list[str] = []
    found, choice, timed = again(measured, before, Budget(math.inf), lines.append)
    assert lines == ["plan: times the 3 plans within 5% of the best again"]
    assert choice.best.names == ("target", "good")
    assert found.measurements[0].drafts["lucky"].at(2, 1) > 3.5
    names = [plan.members[-1] for plan in asked]
    assert names == [
        *("lucky", "good", "fair", "target"),
        *2 * ("good", "fair", "target"),
        *4 * ("good", "target"),
    ]
    assert list(timed.values()) == [1, 7, 3, 7]
    assert "target → good, tree of depth 2, top 1, 4 rows, rule coupled" in timed


def test_the_best_plan_of_another_rule_is_timed_again_if_it_is_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = close_race({"good": 1.0, "far": 9.0}), close_race({"good": 1.1, "far": 1.2})
    independent = replace(second.measurements[0], temperature=1.0, rules=("block", "token"))
    coupled = replace(first.measurements[0], temperature=1.0)
    measured = replace(
        first,
        measurements=(coupled, independent),
        costs=first.costs + second.costs,
    )
    choice = choose_plan(measured.measurements, measured.calibration.grid)
    assert choice.rule == "coupled"
    asked: list[Plan] = []
    # what is true of either rule's drafts is learned from that rule's rounds
    monkeypatch.setattr(finalists, "time_plan", timing({"good": 1.1}, asked, lambda: None))
    found, _, timed = again(measured, choice, Budget(math.inf), lambda line: None)
    assert {(plan.rule, plan.members[-1]) for plan in asked} == {
        ("coupled", "good"), ("block", "good"), ("coupled", "target"), ("block", "target"),
    }  # fmt: skip
    assert list(timed)[:2] == [
        f"target → good, tree of depth 2, top 1, 4 rows, rule {rule}"
        for rule in ("coupled", "block")
    ]
    num_timed = [len(costs.levels["good", 1, 2]) for costs in found.costs]
    times = Counter(plan.rule for plan in asked if plan.members[-1] == "good")
    assert num_timed == [5 + PLENTY * times[rule] for rule in ("coupled", "block")]


def test_a_plan_that_seems_far_ahead_by_chance_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured, asked = close_race({"lucky": 1.0, "good": 3.0}), list[Plan]()
    choice = choose_plan(measured.measurements, measured.calibration.grid)
    lucky, good, *_ = choice.by_members
    assert lucky.names == ("target", "lucky")
    assert good.seconds_per_token > (1 + CLOSE) * lucky.seconds_per_token
    really = {"lucky": 9.0, "good": 3.0}
    monkeypatch.setattr(finalists, "time_plan", timing(really, asked, lambda: None))
    _, choice, _ = again(measured, choice, Budget(math.inf), lambda line: None)
    assert choice.best.names == ("target", "good")
    names = [plan.members[-1] for plan in asked]
    assert names == ["lucky", "target", *6 * ("good", "target")]


def test_close_plans_are_timed_again_as_long_as_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really = {"lucky": 1.0, "good": 1.0, "fair": 1.0}
    measured, clock, asked = close_race(really), Clock(), list[Plan]()
    choice = choose_plan(measured.measurements, measured.calibration.grid)

    def later() -> None:
        clock.now += 1000.0

    monkeypatch.setattr(finalists, "time_plan", timing(really, asked, later))
    budget = Budget(4500.0, clock)
    again(measured, choice, budget, lambda line: None)
    assert len(asked) == 5
    assert budget.left_out == ["5 of 6 timings of close plans"]
    assert not budget.is_rough
    clock.now = 1e6
    asked.clear()
    _, same, timed = again(measured, choice, budget, lambda line: None)
    assert (asked, same.best.plan, timed) == ([], choice.best.plan, {})
    assert budget.left_out[-1] == "further timings of 3 close plans"


def test_members_that_were_not_timed_do_not_run() -> None:
    agrees = [1.0] * 20
    measurements = make_measurements(make_trace({"a": agrees, "b": agrees}, {"a": [1] * 20}))
    with_b = choose_plan([measurements], GRID)
    assert any("b" in candidate.names for candidate in with_b.by_members)
    passes = {"a": measurements.passes["a"]}
    untimed = replace(measurements, passes=passes, block_overhead_seconds={"a": 0.0})
    choice = choose_plan([untimed], GRID)
    assert all("b" not in candidate.names for candidate in choice.by_members)
    assert "leave b out: nothing of it was measured" in decide(choice, untimed)
    assert explain(choice, untimed)["budget"] is None


def test_a_plan_of_little_time_is_written(tiny_chain: Path, settings: PlanSettings) -> None:
    from polybasic.deploy.planner.run import plan_chain

    hasty = settings.model_copy(update={"max_seconds": 1e-3})
    planned = plan_chain(tiny_chain, hasty, lambda line: None).measured
    assert planned.explanation["budget"]["is_rough"]
    assert read_manifest(tiny_chain).plans == (planned,)
    better = planned.model_copy(update={"explanation": {"budget": {"is_rough": False}}})
    record_plan(tiny_chain, better)
    said: list[str] = []
    again = plan_chain(tiny_chain, hasty, said.append)
    assert again.measured.is_rough
    assert not again.is_recorded
    assert read_manifest(tiny_chain).plans == (better,)
    assert said[-1].startswith("plan: rough, and the chain has a better one")
    record_plan(tiny_chain, planned)
    assert plan_chain(tiny_chain, hasty, said.append).is_recorded, "of two rough ones the new one"
