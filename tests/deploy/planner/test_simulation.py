"""The simulation against hand-worked rounds, and tokens kept against theory and sampler."""

import json
from dataclasses import replace

import numpy as np
import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Flush, Ngram, Plan, Rule, Tree
from polybasic.chain.kernels.drafts import ABSENT
from polybasic.deploy.planner import simulation
from polybasic.deploy.planner.measuring.measurements import (
    AcceptanceTrace,
    DraftCosts,
    Measurements,
    PassCosts,
)
from polybasic.deploy.planner.prediction import Predicted
from polybasic.deploy.planner.simulation import Simulator
from polybasic.deploy.planner.theory import kept_probabilities
from tests.deploy.traces import LEAST, after_first, make_measurements, make_trace


def simulate(plan: Plan, measured: Measurements, seed: int = 0) -> Predicted:
    """Of rounds that begin where the traces do."""
    return simulation.simulate(plan, after_first(measured), seed)


# Costs and their JSON


def test_pass_costs_between_and_beyond_the_measured_points() -> None:
    costs = PassCosts((2, 4, 8), (1.0, 2.0, 4.0))
    assert [costs.at(rows) for rows in (1, 2, 3, 4, 6, 8, 10)] == [1, 1, 1.5, 2, 3, 4, 5]
    assert PassCosts((1, 2, 4), (1.0, 3.0, 2.0)).at(3) == 2.5
    assert PassCosts((1, 2, 4), (1.0, 3.0, 2.0)).at(8) == 2.0  # never cheaper by more rows
    assert PassCosts((4,), (1.5,)).at(64) == 1.5


def test_draft_costs() -> None:
    costs = DraftCosts({2: (1.0, 0.25)})
    assert [costs.at(depth, 2) for depth in (0, 1, 3)] == [0.0, 1.0, 1.5]


def test_measurements_survive_json() -> None:
    measurements = make_measurements(
        make_trace({"a": [1, 1], "b": [1, 0]}, {"b": [1, 0]}, ngram={2: [-1, 0]})
    )
    content = json.loads(json.dumps(measurements.to_json()))
    again = Measurements.from_json(content)
    assert again.to_json() == measurements.to_json()
    assert again.traces[0].ranks["draft", "b"][1].dtype == np.int64
    plan = Plan(members=("a", "b", "draft"), tree=LEAST, flush={"a": Flush(length=1)})
    assert simulate(plan, again) == simulate(plan, measurements)


# Hand-worked rounds


def test_target_alone() -> None:
    predicted = simulate(
        Plan(members=("a",), tree=LEAST), make_measurements(make_trace({"a": [1] * 5}))
    )
    assert predicted.seconds_per_token == 10
    assert predicted.passes == {"a": 1}
    assert predicted.tokens_per_pass == {"a": 1}


def test_tree_is_cut_where_the_answer_ends() -> None:
    # At 0 both levels are right: 3 tokens. At 3 two tokens are left, so one level is drafted,
    # which is right: 2 tokens.
    trace = make_trace({"a": [1] * 5}, {"a": [2, 0, 0, 3, 0]})
    plan = Plan(members=("a", "draft"), tree=Tree(depth=2, top_k=1, rows=3))
    predicted = simulate(plan, make_measurements(trace, block_overhead_seconds={"a": 1e6}))
    assert predicted.seconds_by_member["a"] * 5 == pytest.approx(12 + 11)
    assert predicted.seconds_by_member["draft"] * 5 == pytest.approx(0.75 + 0.5)
    assert predicted.overhead_seconds == 0, "no block was verified"
    assert predicted.seconds_per_token * 5 == pytest.approx(12 + 11 + 1.25)
    assert predicted.passes == {"a": 2 / 5, "draft": 3 / 5}
    assert predicted.tokens_per_pass == {"a": 2.5}


def test_rows_cut_a_tree_by_rank() -> None:
    ranks = np.full((8, 2, 2), ABSENT)
    ranks[:, :, 0], ranks[:, :, 1] = 2, 5
    trace = make_trace({"a": [1] * 8})
    trace.ranks["draft", "a"] = {2: ranks}
    drafts = {"draft": DraftCosts({2: (0.0, 0.0)})}
    measured = make_measurements(trace, drafts=drafts)

    def passes(rows: int) -> float:
        plan = Plan(members=("a", "draft"), tree=Tree(depth=2, top_k=2, rows=rows))
        return simulate(plan, measured).passes["a"] * 8

    # Rank 2 is in trees of 3 rows, rank 5 in trees of 6: gains of 1, 2 and 3.
    assert [passes(rows) for rows in (2, 3, 5, 6)] == [8, 4, 4, 3]
    # Two candidates of the first level and four of the second are all that there are.
    plan = Plan(members=("a", "draft"), tree=Tree(depth=2, top_k=2, rows=50))
    assert simulate(plan, measured).rows_per_pass["a"] * 3 == 7 + 7 + 3


def counted(likely: list[list[int]]) -> dict[tuple[str, str], dict[int, np.ndarray]]:
    """Of one least probability: for each position, candidates of the first levels."""
    return {("draft", "a"): {1: np.array(likely)[:, :, None]}}


def test_improbable_candidates_are_neither_verified_nor_drafted_after() -> None:
    # At 0 both candidates are probable, and right: 3 tokens. At 3 none is: one level is drafted,
    # and 1 token gained. At 4 the first is, so a second level is drafted, and 2 tokens are gained.
    # At 6 two tokens are left, so one level is drafted.
    trace = make_trace({"a": [1] * 8}, {"a": [2, 0, 0, 2, 2, 0, 2, 0]}, depth=2)
    likely = [[1, 2], [1, 2], [1, 2], [0, 0], [1, 1], [1, 2], [1, 2], [1, 2]]
    trace = replace(trace, likely=counted(likely))
    measured = make_measurements(trace, least_probabilities=(0.5,))
    again = Measurements.from_json(json.loads(json.dumps(measured.to_json())))
    tree = Tree(depth=2, top_k=1, rows=3, least_probability=0.5)
    plan = Plan(members=("a", "draft"), tree=tree)
    predicted = simulate(plan, again)
    assert predicted.passes == {"a": 4 / 8, "draft": (2 + 1 + 2 + 1) / 8}
    assert predicted.seconds_by_member["a"] * 8 == pytest.approx(12 + 10 + 11 + 11)
    assert predicted.seconds_by_member["draft"] * 8 == pytest.approx(0.75 + 0.5 + 0.75 + 0.5)
    narrow = plan.model_copy(update={"tree": tree.model_copy(update={"rows": 2})})
    assert simulate(narrow, again).rows_per_pass["a"] <= 2
    other = plan.model_copy(update={"tree": tree.model_copy(update={"least_probability": 0.4})})
    with pytest.raises(UserError, match=r"least probability .*: 0\.4; measured: 0\.5"):
        simulate(other, again)


@pytest.mark.parametrize(
    ("shares", "captures", "catch_up"), [(True, False, 0.0), (False, False, 0.1), (False, True, 1)]
)
def test_blocks_over_single_tokens(shares: bool, captures: bool, catch_up: float) -> None:
    # 0: block of 2 kept whole, 3 tokens. 3: block of 2, refused at once, 1 token. 4: two tokens
    # are left, so the block has 1, which is kept.
    trace = make_trace({"a": [1] * 6, "b": [1, 1, 1, 0, 1, 1]})
    shares_cache = {"a": "a", "b": "a" if shares else "b"}
    plan = Plan(members=("a", "b"), tree=LEAST, flush={"a": Flush(length=2)})
    overhead = {"a": 100.0, "b": 1e6}
    measured = make_measurements(
        trace,
        shares_cache=shares_cache,
        block_overhead_seconds=overhead,
        captures_rounds=captures,
    )
    predicted = simulate(plan, measured)
    assert predicted.overhead_seconds * 6 == pytest.approx(3 * 100)
    assert predicted.seconds_by_member["a"] * 6 == pytest.approx(12 + 12 + 11)
    # After the block that was kept whole the lower model reads its last token into its own cache,
    # in the pass that goes on from there, where that stays on the host.
    assert predicted.seconds_by_member["b"] * 6 == pytest.approx(5 + catch_up)
    assert predicted.block_tokens["a"] == pytest.approx(5 / 3)
    assert predicted.tokens_per_pass["a"] == 2


def test_four_levels() -> None:
    # c gains 2 a round. Positions 0..11; b parts from a at 5, c from b at 2.
    b, c = [1] * 12, [1] * 12
    b[5], c[5], c[2] = 0, 0, 0
    trace = make_trace({"a": [1] * 12, "b": b, "c": c}, {"c": [1] * 12})
    plan = Plan(
        members=("a", "b", "c", "draft"),
        tree=Tree(depth=1, top_k=1, rows=2),
        flush={"a": Flush(length=6), "b": Flush(length=3)},
    )
    predicted = simulate(plan, make_measurements(trace))
    # a's round at 0 wants 6 tokens of b.
    #   b's round at 0: c makes 0-1, 2-3; b keeps 2 of 4 and adds one: 3 tokens, 5 rows.
    #   b's round at 3: c makes 3-4, 5-6; b keeps 4 (where it leaves a, c agrees): 5, 5 rows.
    # a keeps 5 of 8 and adds one: 6 tokens, 9 rows.
    # a's round at 6: five tokens may follow.
    #   b's round at 6: c makes 6-7, 8-9, kept: 5 tokens, 5 rows.
    # a keeps 5 of 5 and adds one: 12 tokens in all, 6 rows.
    assert predicted.passes["a"] * 12 == pytest.approx(2)
    assert predicted.passes["b"] * 12 == pytest.approx(3)
    assert predicted.passes["c"] * 12 == pytest.approx(6)
    assert predicted.seconds_by_member["a"] * 12 == pytest.approx(18 + 15)
    assert predicted.seconds_by_member["b"] * 12 == pytest.approx(3 * 1.4)
    assert predicted.seconds_by_member["c"] * 12 == pytest.approx(6 * 0.11)
    assert predicted.tokens_per_pass["b"] == pytest.approx(13 / 3)
    assert predicted.block_tokens == {"a": 6.5, "b": 4}


def test_copies_stand_in_for_drafts() -> None:
    trace = make_trace({"a": [1] * 8}, {"a": [1] * 8}, ngram={2: [-1, 0, 3, 0, 0, 0, 9, 0]})
    tree = Tree(depth=2, top_k=1, rows=4)
    plan = Plan(members=("a", "draft"), tree=tree, ngram=Ngram(min_match=2, num_tokens=8))
    predicted = simulate(plan, make_measurements(trace, ngram_seconds=0.125))
    # 0: drafted, 2 tokens of 3 rows; 2: copied, 3 of 3 right: 4 tokens of 4 rows; 6: copied, only
    # one token and the last one are left: 2 rows.
    assert predicted.seconds_by_member["a"] * 8 == pytest.approx(12 + 13 + 11)
    assert predicted.seconds_by_member["draft"] * 8 == pytest.approx(0.75)
    assert predicted.seconds_by_member["ngram"] * 8 == pytest.approx(3 * 0.125)


def test_what_was_not_measured_is_refused() -> None:
    measured = make_measurements(make_trace({"a": [1] * 4}, {"a": [1] * 4}, depth=3))
    for tree in (Tree(depth=4, top_k=1, rows=4), Tree(depth=2, top_k=2, rows=4)):
        with pytest.raises(UserError, match=r"draft tree was not measured.*top_k 1 to depth 3"):
            simulate(Plan(members=("a", "draft"), tree=tree), measured)
    with pytest.raises(UserError, match="n-gram drafts were not measured"):
        simulate(Plan(members=("a",), tree=LEAST, ngram=Ngram()), measured)
    plan = Plan(members=("a",), tree=LEAST, rule="block")
    assert simulate(plan, measured).passes == {"a": 1}, "at temperature 0 all rules are one"
    with pytest.raises(UserError, match=r"rule was not measured: block; measured: coupled"):
        simulate(plan, coupled(measured.traces[0]))
    with pytest.raises(UserError, match="nothing to plan from"):
        Simulator(make_measurements(measured.traces[0], traces=[]))


# Kept tokens at a temperature


def independent(trace: AcceptanceTrace) -> Measurements:
    """What holds for rules by which models draw independently."""
    return make_measurements(trace, temperature=1.0, rules=("block", "token"))


def coupled(trace: AcceptanceTrace) -> Measurements:
    return make_measurements(trace, temperature=1.0, rules=("coupled",))


def kept_shares(rule: Rule, num_draws: int = 4000) -> tuple[list[float], list[float]]:
    """Share of draws in which a block from 0 on keeps 1, 2, .. tokens, and what theory says."""
    p, q = [0.5, 0.4, 0.6, 0.3, 0.9, 0.5], [0.9, 0.3, 0.8, 0.25, 0.6, 0.4]
    trace = make_trace({"a": p, "b": q})
    simulator = Simulator(independent(trace), num_draws=num_draws)
    extents = np.array([simulator._extents("a", "b", rule, d)[0] for d in range(num_draws)])
    expected = kept_probabilities(p, q, rule)  # type: ignore[arg-type]
    return [float((extents >= num).mean()) for num in range(1, 7)], expected


@pytest.mark.parametrize("rule", ["block", "token"])
def test_kept_tokens_follow_the_theory(rule: Rule) -> None:
    shares, expected = kept_shares(rule)
    assert shares == pytest.approx(expected, abs=0.03)


def test_the_rules_differ() -> None:
    shares, _ = kept_shares("block")
    _, others = kept_shares("token")
    assert shares != pytest.approx(others, abs=0.03)


def test_plans_meet_the_same_luck() -> None:
    generator = np.random.default_rng(0)
    p = generator.uniform(0.2, 1.0, (2, 40)).tolist()
    measured = independent(make_trace({"a": p[0], "b": p[1]}))
    plan = Plan(members=("a", "b"), tree=LEAST, flush={"a": Flush(length=4)}, rule="block")
    assert simulate(plan, measured) == simulate(plan, measured)
    assert simulate(plan, measured, seed=1) != simulate(plan, measured)


def test_with_common_noise_nothing_is_left_to_chance() -> None:
    trace = make_trace({"a": [1] * 6, "b": [1, 1, 1, 0, 1, 1]})
    plan = Plan(members=("a", "b"), tree=LEAST, flush={"a": Flush(length=2)})
    greedy, found = simulate(plan, make_measurements(trace)), simulate(plan, coupled(trace))
    assert found == greedy == simulate(plan, coupled(trace), seed=1)
    block = plan.model_copy(update={"rule": "block"})
    uncertain = make_trace({"a": [0.9] * 6, "b": [0.9, 0.4, 0.9, 0.1, 0.4, 0.9]})
    assert simulate(block, independent(uncertain)) != found
