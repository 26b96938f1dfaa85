"""Plans by load: which one a number of active sequences gets, and what is no such plan."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.card import record_plan, shown_contexts, shown_loads
from polybasic.chain.formats.describe import describe_chain, print_chain
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.plan import (
    READ_AT_ONCE,
    ContextPlan,
    EarlyPlan,
    LoadPlan,
    MeasuredPlan,
    Ngram,
    Plan,
    Situation,
    Tree,
)

ALONE = Plan(members=("target",), tree=Tree(depth=1, top_k=1, rows=2))


def drafting(rows: int) -> Plan:
    return Plan(members=("target", "draft"), tree=Tree(depth=2, top_k=2, rows=rows))


def measured(*by_load: LoadPlan) -> MeasuredPlan:
    return MeasuredPlan(
        plan=drafting(8),
        seconds_per_token=0.002,
        hardware="a machine",
        dtype="bfloat16",
        temperature=0.0,
        by_load=by_load,
    )


def by_load(**plans: Plan) -> MeasuredPlan:
    return measured(
        *(
            LoadPlan(sequences=int(load[1:]), plan=plan, seconds_per_token=0.001)
            for load, plan in plans.items()
        )
    )


def test_a_number_of_sequences_gets_the_plan_of_the_next_load() -> None:
    plans = by_load(_1=drafting(8), _4=drafting(4), _8=ALONE)
    expected = {0: 8, 1: 8, 2: 4, 3: 4, 4: 4, 5: 2, 8: 2, 9: 2, 500: 2}
    assert {active: plans.now(active, 1).tree.rows for active in expected} == expected
    assert all(plans.now(active, 9) == ALONE for active in range(5, 40)), "it did not pay at 8"
    assert measured().now(7, 1) == drafting(8)


def test_members_read_a_prompt_as_soon_as_they_would_have_saved_as_much(tiny_chain: Path) -> None:
    early = EarlyPlan(plan=ALONE, seconds_per_token=0.004, reading_seconds=0.0005)
    plans = measured().model_copy(update={"early": early})

    def members(unread: int, answered: int, left: int = 1000) -> list[str]:
        read: list[list[str]] = []

        def num_unread(members: Any) -> int:
            read.append(members)
            return unread

        situation = Situation(1, 1 + answered, answered, left, 0.0, num_unread)
        chosen = plans.in_situation(situation)
        assert read == [["draft"]]
        return list(chosen.members)

    # a token of the answer saves 2 ms, in which four are read
    assert plans.tokens_read_per_answered == 4
    both, alone = ["target", "draft"], ["target"]
    assert members(4 * READ_AT_ONCE, 0) == both
    assert members(4 * READ_AT_ONCE + 1, 0) == alone
    assert members(4 * 100, 99) == alone
    assert members(4 * 100, 100) == both
    assert members(40, 0, left=9) == alone
    assert members(40, 0, left=10) == both
    with pytest.raises(ValidationError, match="early must be slower than the plan"):
        MeasuredPlan.model_validate(plans.model_dump() | {"seconds_per_token": 0.004})

    record_plan(tiny_chain, plans)
    assert read_manifest(tiny_chain).plans == (plans,)
    shown = f"begun behind {4 * READ_AT_ONCE + 1} tokens or more"
    assert f"by length of the prompt: {shown}: target." in (tiny_chain / "README.md").read_text()
    assert f"{shown} target" in shown_in(80, tiny_chain)


def behind(**plans: Plan) -> tuple[ContextPlan, ...]:
    return tuple(
        ContextPlan(tokens=int(tokens[1:]), plan=plan, seconds_per_token=0.001)
        for tokens, plan in plans.items()
    )


def test_a_context_gets_the_plan_of_the_nearest_one_by_ratio() -> None:
    contexts = behind(_100=drafting(8), _1000=drafting(4), _4000=ALONE)
    plans = by_load(_1=drafting(8), _2=drafting(3)).model_copy(update={"by_context": contexts})
    expected = {1: 8, 316: 8, 317: 4, 1999: 4, 2001: 2, 4000: 2, 100_000: 2}
    assert {tokens: plans.now(1, tokens).tree.rows for tokens in expected} == expected
    assert plans.now(0, 500) == drafting(4)
    # what a row costs grows with the load, too
    assert {tokens: plans.now(2, tokens).tree.rows for tokens in (1, 500, 5000)} == {
        1: 3, 500: 3, 5000: 2,
    }  # fmt: skip
    with pytest.raises(ValidationError, match="by_context must have increasing numbers of tokens"):
        MeasuredPlan.model_validate(
            plans.model_dump() | {"by_context": [plan.model_dump() for plan in contexts[::-1]]}
        )


def shown_in(width: int, chain: Path) -> list[str]:
    """Lines of `polybasic inspect`, without what aligns them."""
    console = Console(width=width, record=True)
    print_chain(describe_chain(chain), console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    return [" ".join(line.split()) for line in lines]


def test_plans_by_context_are_recorded_and_shown(tiny_chain: Path) -> None:
    contexts = behind(_100=drafting(8), _1000=drafting(8), _4000=drafting(4), _16000=ALONE)
    plans = measured().model_copy(update={"by_context": contexts})
    record_plan(tiny_chain, plans)
    assert read_manifest(tiny_chain).plans == (plans,)
    shown = (
        "at once: target → draft (depth 2, top 2, 8 rows); from 2,000 tokens on: target → draft "
        "(depth 2, top 2, 4 rows); from 8,000 tokens on: target"
    )
    assert f"by context: {shown}." in (tiny_chain / "README.md").read_text("utf-8")
    for line in shown.split("; "):
        assert line.replace(": ", " ") in shown_in(80, tiny_chain)
    assert shown_contexts(measured(), ["target"]) == {}
    alike = ALONE.model_copy(update={"ngram": Ngram()})
    other = ALONE.model_copy(update={"ngram": Ngram(min_match=4)})
    assert shown_loads(by_load(_1=alike, _2=other), ["target"]) == {}, "that look alike"


def test_plans_by_load_are_recorded_and_read(tiny_chain: Path) -> None:
    plans = by_load(_1=drafting(8), _2=ALONE)
    record_plan(tiny_chain, plans)
    assert read_manifest(tiny_chain).plans_for("a machine", plans.dtype).plans == (plans,)
    shown = "1 or more: target → draft (depth 2, top 2, 8 rows); 2 or more: target"
    assert f"- {plans.place}, by number of sequences: {shown}." in (
        tiny_chain / "README.md"
    ).read_text("utf-8")
    for line in shown.split("; "):
        assert line.replace(": ", " at a time ") in shown_in(80, tiny_chain)
    path = tiny_chain / "chain.json"
    content = json.loads(path.read_text())
    del content["sha256"], content["plans"][0]["by_load"]
    path.write_text(json.dumps(content))
    assert read_manifest(tiny_chain).plans == (measured(),), "a chain planned before"


def test_a_plan_by_load_that_cannot_run_is_refused(tiny_chain: Path) -> None:
    plan = drafting(8).model_copy(update={"members": ("target", "small")})
    with pytest.raises(UserError, match=r"plan does not fit the chain: .* \(plan.members target, "):
        record_plan(tiny_chain, by_load(_1=ALONE, _2=plan))
    record_plan(tiny_chain, by_load(_1=ALONE, _2=ALONE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": ALONE.model_copy(update={"rule": "block"})}, "must be coupled, not block"),
        ({"sequences": 0}, "greater than or equal to 1"),
        ({"sequences": 1}, r"increasing numbers of sequences, not \[1, 1\]"),
        ({"seconds_per_token": 0.0}, "greater than 0"),
    ],
)
def test_what_is_no_plan_by_load(change: dict[str, Any], message: str) -> None:
    content = {"sequences": 2, "plan": ALONE, "seconds_per_token": 0.001}
    first = LoadPlan.model_validate(content | {"sequences": 1})
    measured(first, LoadPlan.model_validate(content))
    with pytest.raises(ValidationError, match=message):
        measured(first, LoadPlan.model_validate(content | change))
