"""The search against the exhaustive one, and verdicts on constructed machines."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Plan, Tree
from polybasic.deploy.planner import search as planner
from polybasic.deploy.planner.explanation import decide, explain
from polybasic.deploy.planner.lattice import MemberSet
from polybasic.deploy.planner.measuring.measurements import Measurements
from polybasic.deploy.planner.search import (
    Candidate,
    PlanChoice,
    candidate_plans,
    choose_plan,
    member_sets,
)
from polybasic.deploy.planner.settings import PlanGrid
from polybasic.deploy.planner.simulation import Simulator, simulate
from tests.deploy import traces as small
from tests.deploy.planner.machines import GRID, SMALL_GRID, make_measurements, random_measurements


@pytest.mark.parametrize(
    "grid", [{"depths": (65,)}, {"rows": (12, 1)}, {"rows": (257,)}, {"flush_lengths": (0,)}]
)
def test_grids_of_what_cannot_run_are_refused(grid: dict[str, tuple[int, ...]]) -> None:
    PlanGrid(depths=(64,), top_ks=(4,), rows=(2, 256))
    with pytest.raises(ValidationError):
        PlanGrid(**grid)


# The sets of members and their plans


def test_every_set_that_can_run_is_tried() -> None:
    measured = make_measurements(
        0,
        {"a": 1, "b": 1, "c": 1},
        {"b": 0.9, "c": 0.9},
        ngram=0.1,
        drafters={"head": ("a", "b"), "small": ("a", "b", "c")},
        num_traces=1,
    )
    found = member_sets(measured, GRID)
    assert len(found) == len(set(found))
    without = {"->".join(members.names) for members in found if not members.has_ngram}
    assert without == {
        *("a", "a->head", "a->small"),
        *("a->b", "a->b->head", "a->b->small"),
        *("a->c", "a->c->small"),
        *("a->b->c", "a->b->c->small"),
    }
    assert {"->".join(members.names) for members in found if members.has_ngram} == without
    assert str(MemberSet(("a", "head"), True)) == "a → head + n-grams"


def test_plans_of_the_grid() -> None:
    measured = make_measurements(0, {"a": 1, "b": 1}, {"b": 0.9}, num_traces=1)
    plans = list(candidate_plans(measured, SMALL_GRID))
    # Alone, with the drafter (2 depths, 2 numbers of rows), with b (3 lengths), with both.
    assert len(plans) == 1 + 4 + 3 + 12
    assert len({plan.model_dump_json() for plan in plans}) == len(plans)
    for plan in plans:
        assert simulate(plan, measured).seconds_per_token > 0


def test_only_what_was_measured_is_planned() -> None:
    grid = PlanGrid(
        depths=(2, 60), top_ks=(3, 4), rows=(4,), flush_lengths=(2,), ngram_matches=(2,)
    )
    measured = make_measurements(0, {"a": 1}, {}, num_traces=1)
    trees = {(plan.tree.depth, plan.tree.top_k) for plan in candidate_plans(measured, grid)}
    assert trees == {(1, 1), (2, 4)}
    assert not any(plan.ngram for plan in candidate_plans(measured, grid))
    with pytest.raises(UserError, match="nothing to plan from"):
        choose_plan([make_measurements(0, {"a": 1}, {}, num_traces=0)], grid)


# The search


SEARCH_GRID = PlanGrid(
    depths=(1, 2, 3, 4, 5, 6),
    top_ks=(2, 4),
    rows=(4, 6, 8, 12, 16, 24, 32),
    flush_lengths=(2, 3, 4, 6, 8, 10, 12, 16),
    ngram_matches=(),
)


def exhaustive(measured: Measurements) -> tuple[dict[tuple[str, ...], float], int]:
    """Seconds a token of the best plan of each set of members, and how many plans there are."""
    simulator = Simulator(measured, num_draws=2)
    best: dict[tuple[str, ...], float] = {}
    plans = list(candidate_plans(measured, SEARCH_GRID))
    for plan in plans:
        seconds = simulator.run(plan).seconds_per_token
        best[plan.members] = min(seconds, best.get(plan.members, seconds))
    return best, len(plans)


@pytest.mark.parametrize("seed", range(2))
def test_the_search_finds_the_best_of_all_plans(seed: int) -> None:
    measured = random_measurements(seed)
    best, num_plans = exhaustive(measured)
    choice = choose_plan([measured], SEARCH_GRID, num_draws=2)
    assert {candidate.names for candidate in choice.by_members} == set(best)
    for candidate in choice.by_members:
        assert candidate.seconds_per_token <= 1.01 * best[candidate.names]
    assert choice.best.seconds_per_token <= 1.01 / 0.99 * min(best.values())
    assert choice.num_simulated < 0.5 * num_plans
    seconds = [candidate.seconds_per_token for candidate in choice.by_members]
    assert seconds == sorted(seconds)
    assert choice.runner_up is next(
        candidate for candidate in choice.by_members if candidate is not choice.best
    )


@pytest.mark.parametrize(("gain", "leaves_out"), [(0.009, True), (0.012, False)])
def test_what_saves_next_to_nothing_is_left_out(gain: float, leaves_out: bool) -> None:
    alone = Plan(members=("a",), tree=Tree(depth=1, top_k=1, rows=2))
    measured = make_measurements(0, {"a": 1.0}, {})
    predicted = simulate(alone, measured)

    def candidate(names: tuple[str, ...], seconds: float) -> Candidate:
        plan = Plan(members=names, tree=Tree(depth=1, top_k=1, rows=2))
        members = MemberSet(names, has_ngram=False)
        seconds_of = replace(predicted, seconds_per_token=seconds)
        return Candidate(members, plan, seconds_of, measured)

    more, less = candidate(("a", "draft"), 1 - gain), candidate(("a",), 1.0)
    other = candidate(("a", "b"), 0.999)
    choice = PlanChoice((more, other, less), num_simulated=3)
    assert choice.best is (less if leaves_out else more), "b is no part of the fastest"
    assert choice.runner_up is (more if leaves_out else other)


def test_a_search_that_does_not_climb_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner._Search, "_climb", lambda self, point: point)
    monkeypatch.setattr(planner, "MIN_GAIN", 1.0)  # and no adaptive flush makes up for it
    measured = random_measurements(2)
    best, _ = exhaustive(measured)
    choice = choose_plan([measured], SEARCH_GRID, num_draws=2)
    assert any(
        candidate.seconds_per_token > 1.01 * best[candidate.names]
        for candidate in choice.by_members
    )


@pytest.mark.parametrize(("foresees", "least"), [(True, 0.5), (False, 0.0)])
def test_a_least_probability_is_chosen_where_the_drafter_knows_when_it_is_right(
    foresees: bool, least: float
) -> None:
    right = [6, 0, 0, 0, 3, 1] * 16
    trace = small.make_trace({"a": [1] * len(right)}, {"a": right}, depth=6)
    known = np.array(right if foresees else [6] * len(right))
    likely = np.minimum(np.arange(1, 7), known[:, None])[:, :, None]
    trace = replace(trace, likely={("draft", "a"): {1: likely}})
    measured = small.make_measurements(trace, least_probabilities=(0.5,))
    grid = PlanGrid(
        depths=(1, 2, 4, 6), top_ks=(1,), rows=(2, 4, 8), ngram_matches=(),
        least_probabilities=(0.3, 0.5),
    )  # fmt: skip
    best = choose_plan([measured], grid).best
    assert best.plan.tree.least_probability == least
    trees = [
        Tree(depth=depth, top_k=1, rows=rows, least_probability=probability)
        for depth in grid.depths
        for rows in grid.rows
        for probability in (0.0, 0.5)
    ]
    plans = [best.plan.model_copy(update={"tree": tree}) for tree in trees]
    seconds = [simulate(plan, measured).seconds_per_token for plan in plans]
    assert best.seconds_per_token == min(seconds)
    fixed = choose_plan([measured], grid.model_copy(update={"least_probabilities": ()})).best
    assert fixed.plan.tree.least_probability == 0
    assert (best.seconds_per_token < 0.95 * fixed.seconds_per_token) == foresees


def test_a_choice_is_reproducible() -> None:
    measured = random_measurements(1)
    again = Measurements.from_json(json.loads(json.dumps(measured.to_json())))
    first, second = (choose_plan([measurements], SMALL_GRID) for measurements in (measured, again))
    assert first == second


# Verdicts


def test_an_intermediate_that_costs_as_much_as_the_target_is_left_out() -> None:
    measured = make_measurements(0, {"target": 2.0, "intermediate": 1.9}, {"intermediate": 0.97})
    choice = choose_plan([measured], GRID)
    assert choice.best.names == ("target", "draft")
    with_it = choice.best_with("intermediate")
    assert with_it is not None
    sentence = decide(choice, measured)
    found = re.search(r"leave intermediate out: a pass of it over \d+ rows? costs 0\.95", sentence)
    assert found, sentence
    assert f"with it the best plan needs {1e3 * with_it.seconds_per_token:.3g} ms" in sentence
    assert f"without it {1e3 * choice.best.seconds_per_token:.3g} ms" in sentence
    assert "keep draft: without it" in sentence
    (insertion,) = explain(choice, measured)["insertions"]
    assert insertion["pays"] is False
    assert insertion["into"] == "target → draft"


def test_a_cheap_intermediate_that_agrees_is_kept() -> None:
    measured = make_measurements(
        0, {"target": 20.0, "intermediate": 1.0}, {"intermediate": 0.99}, draft_seconds=0.01
    )
    choice = choose_plan([measured], GRID)
    assert choice.best.names == ("target", "intermediate", "draft")
    sentence = decide(choice, measured)
    assert "keep intermediate: without it the best plan needs" in sentence
    assert "leave" not in sentence
    (insertion,) = explain(choice, measured)["insertions"]
    assert insertion["pays"] is True
    assert insertion["fewer_passes_above"]["holds"] is True


def test_a_target_that_nothing_speeds_up_runs_alone() -> None:
    measured = make_measurements(
        0, {"target": 1.0, "intermediate": 1.0}, {"intermediate": 0.3}, hit=0.1, draft_seconds=50
    )
    choice = choose_plan([measured], SMALL_GRID)
    assert choice.best is choice.alone
    sentence = decide(choice, measured)
    assert sentence.startswith("run target alone at ")
    assert "leave intermediate out" in sentence
    assert "leave draft out" in sentence
    assert "times as fast" not in sentence


def test_of_two_intermediates_the_one_that_pays_is_kept() -> None:
    measured = make_measurements(
        0,
        {"target": 20.0, "large": 15.0, "small": 1.0},
        {"large": 0.9, "small": 0.98},
        draft_seconds=0.01,
    )
    choice = choose_plan([measured], GRID)
    assert choice.best.names == ("target", "small", "draft")
    explanation = explain(choice, measured)
    verdicts = {insertion["inserted"]: insertion for insertion in explanation["insertions"]}
    assert verdicts["small"]["pays"] is True
    assert verdicts["large"]["pays"] is False
    # It would come above the one that runs.
    assert verdicts["large"]["giving"].startswith("target → large → small")


def test_copies_are_made_where_they_come_true() -> None:
    for share, is_kept in ((0.9, True), (0.0, False)):
        measured = make_measurements(0, {"a": 10.0}, {}, hit=0.2, ngram=share)
        choice = choose_plan([measured], GRID)
        assert choice.best.members.has_ngram is is_kept
        word = "keep n-grams" if is_kept else "leave n-grams out"
        assert word in decide(choice, measured)


@pytest.mark.parametrize("predicts", [True, False])
def test_adaptive_flushes_where_probabilities_predict_what_is_rejected(predicts: bool) -> None:
    measured = make_measurements(
        0, {"a": 4.0, "b": 2.0}, {"b": 0.9}, drafters={}, predicts=predicts, num_traces=24
    )
    choice = choose_plan([measured], GRID)
    with_b = choice.best_with("b")
    assert with_b is not None
    assert (with_b.plan.flush["a"].adaptive is not None) is predicts
