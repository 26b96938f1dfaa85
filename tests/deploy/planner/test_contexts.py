"""Plans by tokens of context, on a machine where the best one of each is known, and on a chain."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor

from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.plan import ContextPlan, MeasuredPlan, Plan, Tree
from polybasic.deploy import load_chain
from polybasic.deploy.planner.alternatives import Alternative, compared
from polybasic.deploy.planner.contexts import choose_by_context
from polybasic.deploy.planner.explanation import explain
from polybasic.deploy.planner.measuring import load_costs
from polybasic.deploy.planner.measuring.answers import Calibration, CalibrationPrompt
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.planner.measuring.costs import MIN_SAMPLES, RoundCosts
from polybasic.deploy.planner.measuring.load_costs import LoadTimer
from polybasic.deploy.planner.measuring.measurements import DraftCosts, PassCosts
from polybasic.deploy.planner.run import plan_chain
from polybasic.deploy.planner.search import choose_plan
from polybasic.deploy.planner.settings import PlanGrid, PlanSettings
from polybasic.deploy.planner.tables import print_explanation
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.deploy.planner.test_loads import GRID, Timer, measured_on, questions, rows_of


def attends(tokens: int) -> Any:
    """A machine on which a row costs more with each token, and so does a level of a draft.

    Drafts are those of `measured_on`. Seconds a token:

        tokens      alone   2 rows   8 rows
        4           17      9.6      8.8
        100         17.1    10.2     9.7
        1000        18      15.6     18.1
        8000        25      57.6     83.5
    """
    return lambda sequences, rows: (16.0 + rows * (1 + tokens / 1000), 1.2 + tokens / 100)


class ContextTimer(Timer):
    def __init__(self, most_context: int) -> None:
        super().__init__(attends(0))
        self.longest = most_context

    @property
    def most_context(self) -> int:
        return self.longest

    def behind(self, tokens: int, plan: Plan, costs: RoundCosts) -> None:
        self.machine = attends(tokens)
        self(plan, 1, costs)
        self.machine = attends(0)


def found_by(
    most_context: int, contexts: Sequence[int], budget: Budget | None = None
) -> list[Alternative]:
    measured = measured_on(attends(0))
    choice = choose_plan(measured.measurements, GRID)
    timer = ContextTimer(most_context)
    budget = budget or Budget(math.inf)
    return choose_by_context(measured, choice, contexts, timer, budget, lambda line: None)


@pytest.mark.parametrize("most_context", [2000, 8000, 30_000])
def test_trees_get_narrower_and_drafts_end_as_the_context_grows(most_context: int) -> None:
    found = found_by(most_context, (8000, 1000, 100, 2))
    assert {context.number: rows_of(context.best.plan) for context in found} == {
        4: 8, 100: 8, 1000: 2, 8000: 1,
    }  # fmt: skip
    seconds = [context.best.seconds_per_token for context in found]
    assert seconds == pytest.approx([8.8, 9.7, 15.6, 25.0], rel=0.02)
    alone = [context.choice.alone.seconds_per_token for context in found]
    assert alone == pytest.approx([17.0, 17.1, 18.0, 25.0], rel=0.01)
    of_short = [context.usual.seconds_per_token for context in found]
    assert of_short == pytest.approx([8.8, 9.7, 18.1, 83.5], rel=0.02)
    assert all(context.planned()["plan"] == context.best.plan for context in found)


def test_nothing_is_chosen_where_there_is_no_room_or_no_time() -> None:
    assert found_by(4, (100, 1000)) == []
    assert found_by(8000, ()) == found_by(8000, (3,)) == []
    now = iter(range(0, 10_000, 100))
    budget = Budget(50.0, lambda: float(next(now)))
    found = found_by(8000, (1000,), budget)
    assert budget.left_out == ["3 of 4 timings behind a long context"]
    # of the target alone nothing is known then but by the narrow tree
    assert [context.number for context in found] == [4, 1000]


def test_nothing_is_chosen_where_a_member_was_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundCosts, "drafts", lambda costs: {})
    budget = Budget(math.inf)
    assert found_by(8000, (1000,), budget) == []
    assert budget.left_out == ["plans behind long contexts"]


def test_plans_by_context_are_shown_in_eighty_columns() -> None:
    measured = measured_on(attends(0))
    choice = choose_plan(measured.measurements, GRID)
    rows = compared(found_by(8000, (1000, 8000)), "tokens", "plan_of_short")
    for row in rows:
        for key in ("seconds_per_token", "seconds_of_target_alone", "seconds_of_plan_of_short"):
            row[key] /= 1000
    explanation = explain(choice, measured.measurements[0], contexts=rows)
    console = Console(width=80, record=True)
    print_explanation(json.loads(json.dumps(explanation)), console)
    _, _, table = console.export_text().partition("Best plan by tokens of context")
    lines = [" ".join(line.split()) for line in table.splitlines()]
    last = lines.index("8,000 25.0 25.0 83.4 target; alone, no")
    assert lines[last + 1] == "drafting"
    assert explain(choice, measured.measurements[0])["contexts"] == []


# On a real chain


def test_a_chain_gets_plans_by_context(
    tiny_chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that a wide pass costs less than a narrow one, so that its plan drafts."""
    monkeypatch.setattr(load_costs, "MAX_NEW_TOKENS", 40)
    monkeypatch.setattr(RoundCosts, "passes", lambda costs: {"target": PassCosts((1, 4), (9, 1))})
    monkeypatch.setattr(RoundCosts, "drafts", lambda costs: {"draft": DraftCosts({2: (0, 0)})})
    settings = PlanSettings(
        prompts=str(questions(tmp_path)),
        max_new_tokens=16,
        dtype="float32",
        grid=PlanGrid(depths=(2,), top_ks=(2,), rows=(4,), flush_lengths=(4,), ngram_matches=()),
        max_seconds=100,
        loads=(),
        contexts=(40, 200),
    )
    lines: list[str] = []
    planned = plan_chain(tiny_chain, settings, lines.append).measured
    assert planned.plan.members == ("target", "draft")
    (said,) = (line for line in lines if line.startswith("plan: rounds behind"))
    assert 40 < int(said.split()[3]) < 200
    assert [context.tokens for context in planned.by_context][1:] == [40, 200]
    assert all(context.plan == planned.plan for context in planned.by_context)
    assert read_manifest(tiny_chain).plans == (planned,)


def test_rounds_are_timed_behind_tokens_that_nothing_has_read(tiny_chain: Path) -> None:
    chain = load_chain(tiny_chain, dtype="float32")
    prompt = chain.encode("w1 w2 w3")
    expected = chain.generate(prompt * 10, max_new_tokens=8).token_ids
    answered = [CalibrationPrompt("qa", prompt, [3, 4], 2)]
    calibration = Calibration(
        chain.engine, answered, frozenset(), Sampling(), GRID, (("coupled",),)
    )
    timer, costs = LoadTimer(calibration), RoundCosts()
    plan = Plan(members=("target", "draft"), tree=Tree(depth=2, top_k=2, rows=4))
    timer(plan, 1, costs)
    read: list[int] = []
    passes = chain.engine.models.target.forward

    def counted(token_ids: Tensor, *rest: Any, **named: Any) -> Tensor:
        read.append(len(token_ids))
        return passes(token_ids, *rest, **named)

    chain.engine.models.target.forward = counted  # type: ignore[method-assign]
    timer.behind(40, plan, far := RoundCosts())
    assert max(read) <= 4, "the context was read"
    assert len(far.trees["target", 4]) >= MIN_SAMPLES
    assert far.levels.keys() == {("draft", 2, 2)}
    assert chain.generate(prompt * 10, max_new_tokens=8).token_ids == expected


def test_an_answer_changes_its_plan_as_it_grows(
    tiny_chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = load_chain(tiny_chain, dtype="float32")
    alone = Plan(members=("target",), tree=Tree(depth=1, top_k=1, rows=2))
    drafting = Plan(members=("target", "draft"), tree=Tree(depth=2, top_k=2, rows=4))
    measured = MeasuredPlan(
        plan=drafting,
        seconds_per_token=1,
        hardware="here",
        dtype="float32",
        temperature=0.0,
        by_context=tuple(
            ContextPlan(tokens=tokens, plan=plan, seconds_per_token=1)
            for tokens, plan in ((10, drafting), (40, alone))
        ),
    )
    monkeypatch.setattr(chain.engine, "measured_plan", measured.in_situation)
    expected = chain.generate([1, 2, 3], members=["target"], max_new_tokens=40, ignore_eos=True)
    short = chain.generate([1, 2, 3], max_new_tokens=10, ignore_eos=True)
    assert short.statistics.forward_passes["draft"] > 0
    answer = chain.generate([1, 2, 3], max_new_tokens=40, ignore_eos=True)
    assert answer.token_ids == expected.token_ids
    # behind 20 tokens the target goes on alone
    assert answer.statistics.forward_passes["target"] >= 40 - 20 + 3
    assert 0 < answer.statistics.forward_passes["draft"] <= 2 * 20
    prompt = list(range(1, 31))
    late = chain.generate(prompt, max_new_tokens=5, ignore_eos=True)
    assert late.statistics.forward_passes == {"target": late.statistics.num_tokens - 1}
