"""What reading a prompt costs, and how long answers go on without models that would have to."""

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from polybasic.chain.formats import plan as plans
from polybasic.chain.formats.plan import EarlyPlan, MeasuredPlan, Plan
from polybasic.deploy import Chain
from polybasic.deploy.planner import reading
from polybasic.deploy.planner.explanation import explain
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.planner.reading import NUM_READ, choose_early
from polybasic.deploy.planner.search import choose_plan
from polybasic.deploy.runtime.request import Request
from tests.deploy.planner.conftest import ALL, TREE
from tests.deploy.planner.test_windows import GRID, calibration_of, machine, measured_on

ALONE = Plan(members=("target",), tree=TREE)
DRAFTED = Plan(members=("target", "copy"), tree=TREE)


def test_models_with_caches_of_their_own_read_for_themselves(chain: Chain) -> None:
    slot = chain.engine.slots.first
    assert [name for name in ALL.members if slot.reads_for_itself(name)] == ["copy"]


def test_the_fastest_plan_without_them_is_the_early_one(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured_on(calibration_of(chain))
    known = replace(found, measurements=(machine(found.measurements[0]),))
    choice = choose_plan(known.measurements, GRID)
    assert "copy" in choice.best.names
    unread: list[tuple[tuple[str, ...], int]] = []
    engine = chain.engine
    run = engine.run

    def watched(request: Request) -> Any:
        num_unread = engine.slots.first.num_unread(len(request.token_ids) - 1, ["copy"])
        unread.append((request.plan.members, max(num_unread, 0)))
        return run(request)

    monkeypatch.setattr(engine, "run", watched)
    moments: Iterator[float] = iter((0, 9, 10, 16, 20, 21))
    monkeypatch.setattr(reading, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    early = choose_early(known, choice, Budget(math.inf), lambda line: None)
    monkeypatch.undo()
    assert early is not None
    num_tokens = min(NUM_READ, engine.context_tokens - reading.NUM_ANSWERED)
    assert early.reading_seconds == pytest.approx((6 - 1) / num_tokens)
    without = [each for each in choice.by_members if "copy" not in each.names]
    assert early.seconds_per_token == without[0].seconds_per_token
    assert unread == [
        (early.plan.members, num_tokens - 1),
        (choice.best.names, num_tokens - 1),
        (choice.best.names, 0),
    ]
    assert engine.slots.first.tokens == []
    told = explain(choice, known.measurements[0], early=early)["decision"]
    assert "; begin without copy behind prompts of more than " in told

    # no other member reads, or saves anything, or there is no time
    as_fast = replace(without[0], predicted=choice.best.predicted)
    alike: Any = SimpleNamespace(best=choice.best, by_members=(choice.best, as_fast))
    assert choose_early(known, alike, Budget(math.inf), lambda line: None) is None
    readers = replace(choice, by_members=tuple(without))
    assert choose_early(known, readers, Budget(math.inf), lambda line: None) is None
    assert choose_early(known, choice, budget := Budget(0.0), lambda line: None) is None
    assert budget.left_out == ["how long a prompt is read"]


def test_a_model_reads_a_long_prompt_when_the_answer_is_long_enough(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading three tokens costs what a token of the answer saves: behind a prompt of thirty, of
    which all is unread with the answer so far, the copy begins after fifteen."""
    monkeypatch.setattr(plans, "READ_AT_ONCE", 2)
    measured = MeasuredPlan(
        plan=DRAFTED,
        seconds_per_token=1.0,
        hardware="here",
        dtype="float32",
        temperature=0.0,
        early=EarlyPlan(plan=ALONE, seconds_per_token=2.0, reading_seconds=1 / 3),
    )
    chain.engine.measured_plan = measured.in_situation
    options: dict[str, Any] = {"ignore_eos": True}
    prompt = list(range(1, 31))
    expected = chain.generate(prompt, members=["target"], max_new_tokens=40, **options)
    chain.engine.slots.first.clear()

    short = chain.generate(prompt, max_new_tokens=10, **options)
    assert short.statistics.forward_passes == {"target": 9}
    long = chain.generate(prompt, max_new_tokens=40, **options)
    assert long.token_ids == expected.token_ids
    passes = long.statistics.forward_passes
    assert passes["copy"] > 0
    assert 14 <= passes["target"] < 39
    # what it has read for one answer it need not read for the next
    again = chain.generate(prompt, max_new_tokens=40, **options)
    assert again.token_ids == expected.token_ids
    assert again.statistics.forward_passes["target"] <= passes["target"] - 7
    at_once = chain.generate([40, 41, 42], max_new_tokens=10, **options)
    assert at_once.statistics.forward_passes["copy"] > 0
