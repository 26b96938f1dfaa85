"""Measuring a tiny chain: traces and costs, and plans that are simulated from them."""

import json
import logging
import math
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.package import Part
from polybasic.chain.formats.plan import Flush, Ngram, Plan, Rule, Tree
from polybasic.chain.kernels.cuda.graphs import Graphs
from polybasic.chain.kernels.drafts import ABSENT
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.bench.running import bench_chain
from polybasic.deploy.planner.measuring import costs, traces
from polybasic.deploy.planner.measuring.answers import answer_prompts
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.planner.measuring.costs import (
    MIN_SAMPLES,
    RoundCosts,
    _increasing,
    _line,
    _mean,
    measure_costs,
    time_plan,
)
from polybasic.deploy.planner.measuring.measurements import Measurements, PassCosts
from polybasic.deploy.planner.run import plan_chain
from polybasic.deploy.planner.settings import BenchSettings, PlanGrid, PlanSettings
from polybasic.deploy.planner.simulation import simulate
from polybasic.deploy.planner.tables import print_explanation
from polybasic.deploy.runtime import load as loading
from polybasic.deploy.runtime.batching import ActiveSequence
from polybasic.deploy.runtime.hardware import hardware_name
from polybasic.deploy.runtime.rounds.sampling import Sampling
from polybasic.deploy.runtime.rounds.stages import Block, HostStage, Stage
from tests.deploy.noisy_chain import write_noisy_chain
from tests.deploy.traces import after_first, count_passes, num_later, random_prompts

NUM_TOKENS = 24
GRID = PlanGrid(
    depths=(1, 2, 3),
    top_ks=(2,),
    rows=(4, 7),
    flush_lengths=(2, 4),
    least_probabilities=(0.02, 0.3),
    ngram_matches=(1,),
    ngram_tokens=4,
)
GRID_TREE = Tree(depth=3, top_k=2, rows=7)
FLUSH = {"target": Flush(length=4)}


PROMPTS = random_prompts(9, 1, 4, 12)


def measure(
    chain: Chain, temperature: float = 0.0, rules: tuple[Rule, ...] = ("coupled",)
) -> Measurements:
    sampling = Sampling(temperature, seed=0)
    budget = Budget(math.inf)
    arguments = (PROMPTS, frozenset[int](), NUM_TOKENS, sampling, GRID, (rules,), budget)
    calibration = answer_prompts(chain.engine, *arguments, print)
    with pytest.MonkeyPatch.context() as patch:
        # what passes cost is measured on short answers: simulated rounds do not depend on it
        patch.setattr(costs, "COST_TOKENS", 8)
        (found,) = traces.measure(calibration, budget, print).measurements
    return found


@pytest.fixture
def chain_folder(tiny_chain_parts: Any, tmp_path: Path) -> Path:
    """Target, its 4-bit copy as intermediate, a head, and the copy as independent drafter."""
    parts = tiny_chain_parts
    parts.package(
        tmp_path / "chain",
        parts=[
            Part("intermediate", "intermediate", "awq", parts.intermediate),
            Part("draft", "drafter", "eagle2", parts.draft),
            Part("copy", "drafter", "awq", parts.intermediate),
        ],
    )
    return tmp_path / "chain"


@pytest.fixture
def chain(chain_folder: Path) -> Chain:
    return load_chain(chain_folder, dtype="float32")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_simulated_passes_are_those_of_real_answers(
    chain: Chain, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, and drawn with noise that all members share."""
    measurements, sampling = measure(chain, temperature), Sampling(temperature, seed=0)
    assert measurements.num_tokens == len(PROMPTS) * NUM_TOKENS
    two_models = [
        Plan(members=("target", "copy"), tree=Tree(depth=depth, top_k=2, rows=rows))
        for depth in (1, 2, 3)
        for rows in (4, 7)
    ]
    two_models += [
        Plan(
            members=("target", "copy"),
            tree=Tree(depth=3, top_k=2, rows=rows, least_probability=least),
        )
        for least in GRID.least_probabilities
        for rows in (4, 7)
    ]
    tree = Tree(depth=1, top_k=1, rows=5)
    copied = Plan(members=("target",), tree=tree, ngram=Ngram(min_match=1, num_tokens=4))
    behind = [
        Plan(
            members=("target", "copy"),
            tree=GRID_TREE.model_copy(update={"rows": rows}),
            ngram=Ngram(min_match=1, num_tokens=4, extends=extends),
        )
        for rows in (4, 7)
        for extends in (False, True)
    ]
    counted, levels = set(), set()
    for plan in (*two_models, copied, *behind):
        real = count_passes(chain, plan, PROMPTS, NUM_TOKENS, sampling)
        predicted = simulate(plan, measurements).passes
        # Copies cut short by the end of an answer leave rows for others, which is not simulated.
        tolerance = 1e-9 if plan.ngram is None else 0.03
        for name, num in real.items():
            found = predicted[name] * num_later(measurements)
            assert found == pytest.approx(num, rel=tolerance), plan
        counted.add(real["target"])
        if plan.tree.depth == 3 and plan.ngram is None:
            levels.add(real["copy"] / real["target"])
    assert len(counted) > 3, "the shapes must differ for their counts to mean something"
    assert min(levels) < 0.9 * max(levels), "drafts must end early"
    for alone, extended in zip(behind[::2], behind[1::2], strict=True):
        fewer, more = (simulate(plan, measurements).passes["target"] for plan in (extended, alone))
        assert fewer < more if not temperature else fewer <= more, "copies behind drafts are kept"
    # of blocks, which are approximated, rounds draw the first token, too
    monkeypatch.setattr(HostStage, "start", Stage.start)
    for members in (("target", "intermediate"), ("target", "intermediate", "copy")):
        plan = Plan(members=members, tree=Tree(depth=2, top_k=2, rows=7), flush=FLUSH)
        real = count_passes(chain, plan, PROMPTS, NUM_TOKENS, sampling)
        predicted = simulate(plan, after_first(measurements)).passes
        # In a block the intermediate sees rows of its own, and blocks begin elsewhere.
        for name, num in real.items():
            assert predicted[name] * measurements.num_tokens == pytest.approx(num, rel=0.15), name


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_simulated_blocks_are_those_of_real_answers(
    tiny_four_chain: Path, temperature: float
) -> None:
    """Of a model with a cache of its own, whose rows are the same along any text."""
    chain = load_chain(tiny_four_chain, dtype="float32")
    measurements, sampling = measure(chain, temperature), Sampling(temperature, seed=0)
    for members in (("target", "small"), ("target", "small", "small_draft")):
        plan = Plan(members=members, tree=GRID_TREE, flush=FLUSH)
        real = count_passes(chain, plan, PROMPTS, NUM_TOKENS, sampling)["target"]
        predicted = simulate(plan, measurements).tokens_per_pass["target"]
        assert predicted == pytest.approx(num_later(measurements) / real, rel=1e-9)
        # greedy, models of random weights hardly ever agree; the noise is the same for both
        assert predicted > (1.2 if temperature else 1.0)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_rare_tokens_are_predicted_once_they_were_seen(
    tmp_path: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of models that leave tokens out: two units of five are frequent."""
    folder, sampling = write_noisy_chain(tmp_path, vocab_size=320), Sampling(temperature, seed=0)
    plans = [
        Plan(members=("target", "near"), tree=GRID_TREE, flush=FLUSH),
        Plan(members=("target", "copy"), tree=GRID_TREE),
    ]
    found: list[list[float]] = []
    for least in (1000, 1):
        monkeypatch.setattr("polybasic.chain.kernels.shortlist._LEAST_VOCABULARY", least)
        chain = load_chain(folder, dtype="float32", share_caches=False)
        measurements = measure(chain, temperature)
        predicted = [simulate(plan, measurements).tokens_per_pass["target"] for plan in plans]
        for plan, tokens_per_pass in zip(plans, predicted, strict=True):
            real = count_passes(chain, plan, PROMPTS, NUM_TOKENS, sampling)["target"]
            assert tokens_per_pass == pytest.approx(num_later(measurements) / real, rel=1e-9)
        found.append(predicted)
    # greedy texts of random weights soon repeat themselves
    if temperature:
        assert all(whole > listed > 1 for whole, listed in zip(*found, strict=True))


def test_simulated_lengths_are_those_of_sampled_answers(chain: Chain) -> None:
    rules: tuple[Rule, ...] = ("block", "token")
    measurements = measure(chain, 1.0, rules)
    for rule in rules:
        members = ("target", "intermediate")
        plan = Plan(members=members, tree=GRID_TREE, flush=FLUSH, rule=rule)
        passes = sum(
            count_passes(chain, plan, PROMPTS, NUM_TOKENS, Sampling(1.0, seed=seed))["target"]
            for seed in range(5)
        )
        real = 5 * num_later(measurements) / passes
        assert simulate(plan, measurements).tokens_per_pass["target"] == pytest.approx(
            real, rel=0.15
        )


def test_traces_hold_the_targets_answers(chain: Chain) -> None:
    greedy, coupled = measure(chain), measure(chain, temperature=1.0)
    sampled = measure(chain, 1.0, ("block", "token"))
    assert [len(trace) for trace in sampled.traces] == [len(trace) for trace in coupled.traces]
    for trace in (*greedy.traces, *coupled.traces):
        assert set(trace.probability["target"]) == {1.0}
        assert set(trace.probability["intermediate"]) == {0.0, 1.0}
        agrees = trace.probability["intermediate"] == 1
        assert (
            trace.confidence["intermediate"][agrees] == trace.own_confidence["intermediate"][agrees]
        ).all()
        own, given = (getattr(trace, name)["target"] for name in ("own_confidence", "confidence"))
        assert (own == given).all()
    assert all((trace.probability["target"] > 0).all() for trace in sampled.traces)
    assert any((trace.probability["target"] < 0.9).any() for trace in sampled.traces)
    ranks = greedy.traces[0].ranks["copy", "target"][2]
    assert ranks.shape == (NUM_TOKENS, 3, 3)
    assert (ranks[:, 0, 1:] == ABSENT).all(), "one level has no second one"
    head = greedy.traces[0].ranks["draft", "target"][2]
    found, guessed = ((drafter_ranks[:, 0, 0] < ABSENT).mean() for drafter_ranks in (ranks, head))
    assert found > guessed + 0.2, "a copy of the target drafts well, a random head does not"
    assert Measurements.from_json(json.loads(json.dumps(greedy.to_json()))).to_json() == (
        greedy.to_json()
    )


def test_costs_are_measured_for_every_shape_of_the_grid(chain: Chain) -> None:
    measurements = measure(chain)
    assert set(measurements.passes) == {"target", "intermediate"}
    assert {1, 4, 7} <= set(measurements.passes["target"].rows)
    assert set(measurements.drafts) == {"draft", "copy"}
    for drafter in measurements.drafts.values():
        assert set(drafter.by_top_k) == {2}
        assert drafter.at(3, 2) >= drafter.at(1, 2) > 0
    assert measurements.ngram_seconds > 0
    assert measurements.shares_cache == {"target": "target", "intermediate": "target"}
    assert measurements.drafters["copy"] == ("target", "intermediate")


class SlowCaptures(Graphs):
    """Runs functions in a second of a clock of its own, and in a hundred when they are new."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        super().__init__(device, enabled)
        self.seconds, self.known = 0.0, set[Hashable]()

    def run(self, key: Hashable, function: Callable[[], None], label: str | None = None) -> None:
        is_new = key not in self.known
        self.known.add(key)
        self.counts.captures += is_new
        self.seconds += 100 if is_new else 1
        super().run(key, function, label)


def test_rounds_of_graphs_are_timed_and_captures_are_not(
    chain_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    monkeypatch.setattr("polybasic.deploy.runtime.engine.Graphs", SlowCaptures)
    monkeypatch.setattr("polybasic.deploy.planner.measuring.costs.COST_TOKENS", 8)
    engine = load_chain(chain_folder, dtype="float32").engine
    graphs = engine.graphs
    assert isinstance(graphs, SlowCaptures)
    monkeypatch.setattr("time.perf_counter", lambda: graphs.seconds)
    given = [prompt for _, prompt in PROMPTS if len(prompt) > 1]
    rules: list[Rule] = ["coupled"]
    (measured,) = measure_costs(
        engine, given, frozenset(), Sampling(), GRID, rules, Budget(math.inf), 1.0
    )
    assert graphs.counts.captures > 10
    # a graph each for draft, tree and block; a draft by n-grams is none
    for found in (measured.trees, measured.blocks, measured.levels):
        assert found
        assert {duration for seconds in found.values() for duration in seconds} == {1.0}
    assert set(measured.copies) == {0.0}
    assert {rows for name, rows in measured.trees if name == "target"} >= {1, *GRID.rows}


@pytest.mark.parametrize("members", [("target", "draft"), ("target", "intermediate", "draft")])
def test_what_the_engine_does_between_rounds_of_the_target_is_theirs(
    chain: Chain, members: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    between, take, clock = 1000.0, ActiveSequence._take, iter(range(10**9))
    late = [0.0]

    def take_long(sequence: ActiveSequence, block: Block) -> Any:
        late[0] += between
        return take(sequence, block)

    monkeypatch.setattr("time.perf_counter", lambda: next(clock) + late[0])
    monkeypatch.setattr(ActiveSequence, "_take", take_long)
    plan = Plan(members=members, tree=GRID_TREE, flush=FLUSH if len(members) > 2 else {})
    found = RoundCosts()
    time_plan(chain.engine, PROMPTS[0][1], plan, frozenset(), Sampling(), found)
    of_target, below = (found.blocks, found.trees) if plan.flush else (found.trees, {})
    seconds = [each for by_rows in of_target.values() for each in by_rows]
    # the first round follows the prompt, which is no round's
    assert sorted(each > between for each in seconds) == [False, *[True] * (len(seconds) - 1)]
    assert len(seconds) > 1
    assert all(each < between for by_rows in below.values() for each in by_rows)


@pytest.mark.parametrize(
    ("values", "weights", "found"),
    [
        ((1, 2, 4), (1, 1, 1), (1, 2, 4)),
        ((1, 3, 2, 4), (1, 1, 3, 1), (1, 2.25, 2.25, 4)),
        ((4, 3, 2), (1, 1, 2), (2.75, 2.75, 2.75)),  # noise: more rows cannot be cheaper
    ],
)
def test_costs_do_not_fall_with_rows(
    values: tuple[float, ...], weights: tuple[int, ...], found: tuple[float, ...]
) -> None:
    assert _increasing(values, weights) == found
    costs = RoundCosts()
    for rows, (value, weight) in enumerate(zip(values, weights, strict=True), 1):
        costs.trees["target", rows] += [float(value)] * MIN_SAMPLES * weight
    assert costs.passes() == {"target": PassCosts((1, 2, 3, 4)[: len(values)], found)}


@pytest.mark.parametrize(
    ("by_depth", "line"),
    [
        ({1: 3.0, 3: 7.0}, (3.0, 2.0)),
        ({4: 8.0}, (2.0, 2.0)),
        ({1: 5.0, 3: 3.0}, (3.0, 3.0)),  # noise: deeper cannot be cheaper
        ({1: 3.0, 2: 99.0, 3: 7.0}, (3.0, 2.0)),  # once, beside many others
    ],
)
def test_draft_costs_are_a_line_over_depth(
    by_depth: dict[int, float], line: tuple[float, float]
) -> None:
    counts = {depth: 1 if by_depth[depth] == 99 else 10**6 for depth in by_depth}
    assert _line(by_depth, counts) == pytest.approx(line, rel=1e-3)


def test_means_leave_out_what_disturbed_few_rounds() -> None:
    assert _mean([1.0, 2.0, 6.0]) == 3
    assert _mean([100.0, *[2.0] * 18, 0.0]) == 2


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    rows = [
        {"question_id": number, "category": "qa", "turns": [text]}
        for number, text in enumerate(("w1 w2 w3", "w4 w5", " ".join(["w1"] * 200)))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_plan_is_chosen_written_run_and_reported(
    tiny_chain: Path,
    questions: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = PlanSettings(prompts=str(questions), max_new_tokens=16, dtype="float32", grid=GRID)
    lines: list[str] = []
    planning = plan_chain(tiny_chain, settings, lines.append)
    measured = planning.measured
    (measurements,) = planning.measurements
    assert len(measurements.traces) == 2, "the third question is too long"
    assert lines[-1].endswith("left out: nothing")
    chain = load_chain(tiny_chain, dtype="float32")
    hardware = hardware_name(chain.engine.models.target.device)
    assert read_manifest(tiny_chain).plans_for(hardware, "float32").plans == (measured,)
    assert chain.plan == measured.plan
    members = {planned.plan.members for planned in (measured, *measured.others)}
    full = ("target", "intermediate", "draft")
    assert {("target",), ("target", "draft"), ("target", "intermediate"), full} <= members
    seconds = [planned.seconds_per_token for planned in (*measured.others, measured)]
    assert seconds[:-1] == sorted(seconds[:-1])
    assert 0.98 * seconds[-1] < min(seconds)
    console = Console(record=True, width=140)
    print_explanation(measured.explanation, console)
    assert console.export_text().startswith("Run ")

    systems = ("target", "ngram", "eagle2", "polybasic_full", "polybasic")
    report = bench_chain(
        tiny_chain,
        BenchSettings(
            prompts=str(questions), max_new_tokens=16, dtype="float32", repeats=1, systems=systems
        ),
    )
    assert report.plan["predicted_seconds_per_token"] == measured.seconds_per_token
    assert report.plan["explanation"] == measured.explanation
    assert report.systems["polybasic_full"].predicted_seconds_per_token in seconds
    for system in report.systems.values():
        agreement = system.agreement
        assert (agreement.answers, agreement.identical, agreement.near_ties) == (2, 2, 0)

    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(loading, "hardware_name", lambda *_: "another machine")
    elsewhere = load_chain(tiny_chain, dtype="float32")
    assert elsewhere.plan == read_manifest(tiny_chain).plan
    assert any(hardware in line and "polybasic plan" in line for line in caplog.messages)


def test_refusals(tiny_chain: Path, questions: Path) -> None:
    settings = PlanSettings(prompts=str(questions), max_new_tokens=128)
    with pytest.raises(UserError, match="no prompt fits the context"):
        plan_chain(tiny_chain, settings, lambda line: None)
    systems = ("target", "draft_model")
    with pytest.raises(UserError, match=r"without members: draft_model in bench\.systems"):
        bench_chain(
            tiny_chain, BenchSettings(prompts=str(questions), max_new_tokens=8, systems=systems)
        )
