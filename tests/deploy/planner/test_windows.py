"""Windows in planning: what is measured under them, when they are taken, and what is said of it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.card import render_card
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.plan import Plan, Rule, Window
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.bench.running import bench_chain
from polybasic.deploy.planner import windows as windowing
from polybasic.deploy.planner.explanation import decide, explain
from polybasic.deploy.planner.measuring import costs as round_costs
from polybasic.deploy.planner.measuring.answers import Calibration, answer_prompts
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.planner.measuring.costs import MIN_SAMPLES, RoundCosts, compare_costs
from polybasic.deploy.planner.measuring.measurements import DraftCosts, Measurements, PassCosts
from polybasic.deploy.planner.measuring.traces import Measured, measure, trace_answer
from polybasic.deploy.planner.run import plan_chain
from polybasic.deploy.planner.search import choose_plan, choose_windows
from polybasic.deploy.planner.settings import BenchSettings, PlanGrid, PlanSettings
from polybasic.deploy.planner.simulation import simulate
from polybasic.deploy.planner.tables import print_explanation
from polybasic.deploy.planner.windows import try_windows
from polybasic.deploy.runtime.rounds.sampling import Sampling
from polybasic.deploy.runtime.rounds.stages import HostStage, Stage
from tests.deploy.planner.conftest import ALL, TREE
from tests.deploy.traces import (
    after_first,
    count_passes,
    make_measurements,
    make_trace,
    num_later,
    random_prompts,
)

NUM_TOKENS = 20
GRID = PlanGrid(
    depths=(1, 3), top_ks=(2,), rows=(4, 7), flush_lengths=(2, 4), ngram_matches=(), windows=(16,)
)
WINDOW = Window(tokens=16)
RULES: tuple[tuple[Rule, ...], ...] = (("coupled",),)


PROMPTS = random_prompts(9, 1, 12)


def calibration_of(chain: Chain, grid: PlanGrid = GRID) -> Calibration:
    sampling = Sampling(seed=0)
    arguments = (PROMPTS, frozenset[int](), NUM_TOKENS, sampling, grid, RULES, Budget(math.inf))
    return answer_prompts(chain.engine, *arguments, lambda line: None)


def measured_on(calibration: Calibration) -> Measured:
    with pytest.MonkeyPatch.context() as patch:
        # what passes cost is measured on short answers, and known where it matters: see `machine`
        patch.setattr(round_costs, "COST_TOKENS", 8)
        return measure(calibration, Budget(math.inf), lambda line: None)


def test_simulated_passes_under_windows_are_those_of_real_answers(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration = calibration_of(chain)
    (whole,) = measured_on(calibration).measurements
    two_models = Plan(members=("target", "copy"), tree=TREE)
    for plan, windowed, tolerance in (
        (two_models, ("copy",), 1e-9),
        # in a block the intermediate sees rows of its own, and blocks begin elsewhere
        (ALL, ("intermediate", "copy"), 0.15),
    ):
        windows = dict.fromkeys(windowed, WINDOW)
        traces = [
            trace_answer(calibration, prompt, windows, (2,))[0] for prompt in calibration.answered
        ]
        measured = replace(whole, traces=traces, windows=windows)
        if plan is ALL:
            # of blocks, which are approximated, rounds draw the first token, too
            monkeypatch.setattr(HostStage, "start", Stage.start)
            measured = after_first(measured)
        narrow = plan.model_copy(update={"windows": windows})
        predicted, real = (
            simulate(narrow, measured).passes,
            count_passes(chain, narrow, PROMPTS, NUM_TOKENS),
        )
        for name, num in real.items():
            found = predicted[name] * num_later(measured)
            assert found == pytest.approx(num, rel=tolerance), name
        assert real != count_passes(chain, plan, PROMPTS, NUM_TOKENS), "the windows must matter"
        with pytest.raises(UserError, match="windows were not measured"):
            simulate(plan, measured)
        with pytest.raises(UserError, match="windows were not measured"):
            simulate(narrow, whole)


def test_costs_are_compared_over_the_same_shapes(chain: Chain) -> None:
    windows = [{"intermediate": WINDOW}, {"copy": WINDOW}]
    two_models = Plan(members=("target", "copy"), tree=TREE)
    found = compare_costs(
        chain.engine, [PROMPTS[0][1]], [two_models, ALL], windows, frozenset(), Sampling()
    )
    # the intermediate runs in one of the plans, the copy in both
    for innermost, pair in zip(({"intermediate"}, {"intermediate", "target"}), found, strict=True):
        for costs in pair:
            assert {name for name, _ in costs.trees} == innermost
            assert {name for name, _ in costs.blocks} == {"target"}
            assert {(name, top_k) for name, top_k, _ in costs.levels} == {("copy", 2)}
            assert max(depth for _, _, depth in costs.levels) == 3


def fake_costs(ratios: dict[str, float]) -> Any:
    """Stands for `compare_costs` on a machine where a window makes members cheaper."""
    calls: list[list[dict[str, Window]]] = []

    def compare(engine: Any, prompts: Any, plans: Any, windows: Any, *others: Any) -> Any:
        calls.append([dict(trial) for trial in windows])
        found = []
        for trial in windows:
            without, with_windows = RoundCosts(), RoundCosts()
            for name in ("intermediate", "copy"):
                ratio = ratios[name] if name in trial else 1.0
                for costs, factor in ((without, 1.0), (with_windows, ratio)):
                    if name == "intermediate":
                        costs.trees[name, 4] += [factor] * MIN_SAMPLES
                        costs.blocks[name, 7] += [3 * factor] * MIN_SAMPLES
                    else:
                        costs.levels[name, 2, 3] += [factor] * MIN_SAMPLES
            found.append((without, with_windows))
        return found

    return compare, calls


def machine(measurements: Measurements) -> Measurements:
    """Known costs in the place of what this machine takes for such small models."""
    rows = (1, 4, 7)
    return replace(
        measurements,
        passes={
            name: PassCosts(rows, tuple(seconds * (1 + num_rows / 10) for num_rows in rows))
            for name, seconds in (("target", 2.0), ("intermediate", 1.0))
        },
        drafts={"copy": DraftCosts({2: (1.0, 1.0)})},
    )


def test_windows_are_tried_one_by_one_and_then_together(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration = calibration_of(chain)
    found = measured_on(calibration)
    measured = machine(found.measurements[0])
    known = replace(found, measurements=(measured,))
    choice = choose_plan([measured], GRID)
    compare, calls = fake_costs({"intermediate": 0.05, "copy": 0.05})
    monkeypatch.setattr(windowing, "compare_costs", compare)
    lines: list[str] = []
    found = try_windows(known, choice, Budget(math.inf), lines.append)
    narrow = Window(tokens=16)
    assert sorted(calls[0], key=str) == [{"copy": narrow}, {"intermediate": narrow}]
    assert calls[1:] == [[{"copy": narrow, "intermediate": narrow}]]
    assert lines == ["plan: windows of 16 tokens, and the same plans without"]
    best = found.best
    assert best.plan.windows == dict.fromkeys(best.names[1:], narrow)
    assert best.seconds_per_token < 0.9 * choice.best.seconds_per_token
    explanation = explain(found, measured)
    assert "sees the first 4 and the latest 16 tokens" in explanation["decision"]
    assert any(trial["is_taken"] for trial in explanation["windows"])
    console = Console(record=True, width=160)
    print_explanation(json.loads(json.dumps(explanation)), console)
    assert "copy: 4 + 16" in console.export_text()
    # and the chosen plan answers as the target
    alone = Plan(members=("target",), tree=TREE)
    for _, prompt in PROMPTS:
        answers = [
            [token for new in stream for token in new]
            for stream in (
                chain.stream_ids(prompt, NUM_TOKENS, Sampling(), plan)
                for plan in (alone, best.plan)
            )
        ]
        assert answers[0] == answers[1]


def test_windows_that_save_nothing_are_left_out(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration = calibration_of(chain)
    found = measured_on(calibration)
    measured = machine(found.measurements[0])
    known = replace(found, measurements=(measured,))
    choice = choose_plan([measured], GRID)
    compare, calls = fake_costs({"intermediate": 1.0, "copy": 1.0})
    monkeypatch.setattr(windowing, "compare_costs", compare)
    found = try_windows(known, choice, Budget(math.inf), lambda line: None)
    assert len(calls) == 1
    assert found.best == choice.best
    assert found.window_trials
    assert "; no windows: with the best, " in decide(found, measured)


def test_windows_are_tried_as_far_as_there_is_time(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration = calibration_of(chain)
    found = measured_on(calibration)
    measured = machine(found.measurements[0])
    known = replace(found, measurements=(measured,), trace_seconds=1000.0)
    choice = choose_plan(known.measurements, GRID)
    compare, calls = fake_costs({"intermediate": 0.05, "copy": 0.05})
    monkeypatch.setattr(windowing, "compare_costs", compare)
    for max_seconds, num_tried in ((1500.0, 1), (500.0, 0)):
        calls.clear()
        budget = Budget(max_seconds)
        trials = try_windows(known, choice, budget, lambda line: None).window_trials
        assert sum(map(len, calls)) == num_tried
        assert bool(trials) == bool(num_tried)
        assert budget.left_out == [f"{2 - num_tried} of 2 windows"]
        assert not budget.is_rough


def test_texts_without_windows_are_measured_once(chain: Chain) -> None:
    calibration = calibration_of(chain)
    (measured,) = measured_on(calibration).measurements
    windows = {"copy": Window(tokens=25)}
    traces = windowing._traces(calibration, measured, windows, (2,))
    assert [trace is other for trace, other in zip(traces, measured.traces, strict=True)] == [
        len(prompt) <= 25 for prompt in calibration.answered
    ]
    assert len({trace is other for trace, other in zip(traces, measured.traces, strict=True)}) == 2


def test_short_texts_are_not_tried(chain: Chain) -> None:
    for windows in ((), (NUM_TOKENS + 12, 64)):
        grid = GRID.model_copy(update={"windows": windows})
        calibration = calibration_of(chain, grid)
        found = measured_on(calibration)
        measured = machine(found.measurements[0])
        choice = choose_plan([measured], grid)
        known = replace(found, measurements=(measured,))
        assert try_windows(known, choice, Budget(math.inf), pytest.fail) is choice
        said = "; no windows: planning prompts with answers have at most 32 tokens"
        assert decide(choice, measured).endswith(said) == bool(windows)


def test_too_few_rounds_are_no_measurement(chain: Chain) -> None:
    measured = machine(measured_on(calibration_of(chain)).measurements[0])
    for name in ("intermediate", "copy"):
        compare, _ = fake_costs({"intermediate": 0.5, "copy": 0.5})
        ((without, with_windows),) = compare(None, [], [], [{name: WINDOW}])
        costs = windowing._costs(measured, {name: WINDOW}, without, with_windows, (2,))
        assert costs is not None
        if name == "intermediate":
            assert costs["passes"][name].seconds == tuple(
                duration / 2 for duration in measured.passes[name].seconds
            )
        else:
            assert costs["drafts"][name].by_top_k == {2: (0.5, 0.5)}
        assert windowing._costs(measured, {name: WINDOW}, without, RoundCosts(), (2,)) is None


def windowed(measured: Measurements, share: float, *names: str) -> Measurements:
    """The same where a window makes these members' passes and drafts take a share."""

    def scaled(costs: PassCosts) -> PassCosts:
        return PassCosts(costs.rows, tuple(share * duration for duration in costs.seconds))

    passes = {
        name: scaled(costs) if name in names else costs for name, costs in measured.passes.items()
    }
    drafts = {
        name: DraftCosts({k: (share * a, share * b) for k, (a, b) in costs.by_top_k.items()})
        if name in names
        else costs
        for name, costs in measured.drafts.items()
    }
    windows = dict.fromkeys(names, WINDOW)
    return replace(measured, passes=passes, drafts=drafts, windows=windows)


@pytest.mark.parametrize(("share", "is_taken"), [(0.5, True), (0.97, False), (1.5, False)])
def test_a_window_must_save_enough(share: float, is_taken: bool) -> None:
    chance = np.random.default_rng(0)
    agrees = (chance.random(60) < 0.9).astype(float).tolist()
    accepted = {"a": [2, 1, 0] * 20, "b": [2, 1, 0] * 20}
    measured = make_measurements(make_trace({"a": [1.0] * 60, "b": agrees}, accepted))
    grid = PlanGrid(depths=(2, 4), top_ks=(1,), rows=(4,), flush_lengths=(2, 4), ngram_matches=())
    choice = choose_plan([measured], grid)
    found = choose_windows(choice, [windowed(measured, share, "draft")], grid)
    assert [candidate.names for candidate in found.by_members] == [
        candidate.names for candidate in choice.by_members
    ]
    for candidate in found.by_members:
        takes = is_taken and "draft" in candidate.names
        assert candidate.plan.windows == ({"draft": WINDOW} if takes else {})
    trials = [trial for trial in found.window_trials if trial.is_taken]
    assert bool(trials) == is_taken
    # a second window that adds nothing is left out
    both = [windowed(measured, share, "draft"), windowed(measured, share, "draft", "b")]
    both[1] = replace(both[1], passes=both[0].passes)
    again = choose_windows(choice, both, grid)
    assert [candidate.plan.windows for candidate in again.by_members] == [
        candidate.plan.windows for candidate in found.by_members
    ]


def test_a_plan_with_windows_is_written_and_run(
    tiny_chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = tmp_path / "questions.jsonl"
    row = {"question_id": 1, "category": "qa", "turns": ["w1 w2 w3 w4 w5"]}
    questions.write_text(json.dumps(row) + "\n")
    settings = PlanSettings(prompts=str(questions), max_new_tokens=16, dtype="float32", grid=GRID)
    # a machine on which windows make everything free, however few rounds an answer has
    monkeypatch.setattr(round_costs, "MIN_SAMPLES", 1)
    monkeypatch.setattr(windowing, "_scaled", lambda costs, rows, ratios: next_to_nothing(costs))
    monkeypatch.setattr(windowing, "_draft_ratio", lambda *others: 1e-3)
    measured = plan_chain(tiny_chain, settings, lambda line: None).measured
    plans = [
        planned.plan for planned in (measured, *measured.others) if len(planned.plan.members) > 1
    ]
    windowed = next(plan for plan in plans if plan.windows)
    manifest = read_manifest(tiny_chain)
    assert manifest.plans == (measured,)
    assert (tiny_chain / "README.md").read_text() == render_card(manifest)
    # whichever plan was the fastest over so few rounds
    chosen = measured.model_copy(update={"plan": windowed})
    assert "(sees 4 + 16)" in render_card(manifest.model_copy(update={"plans": (chosen,)}))
    chain = load_chain(tiny_chain, dtype="float32")
    expected = chain.generate("w1 w2", max_new_tokens=40, members=["target"]).token_ids
    for plan in plans:
        assert chain.generate("w1 w2", max_new_tokens=40, plan=plan).token_ids == expected
    bench = BenchSettings(
        prompts=str(questions),
        max_new_tokens=24,
        dtype="float32",
        repeats=1,
        systems=("target", "eagle2", "polybasic_full"),
    )
    systems = bench_chain(tiny_chain, bench).systems
    assert any("(sees 4 + 16)" in system.shown_plan for system in systems.values())
    for system in systems.values():
        assert system.agreement.identical == 1


def next_to_nothing(costs: PassCosts) -> PassCosts:
    return PassCosts(costs.rows, tuple(duration / 1000 for duration in costs.seconds))
