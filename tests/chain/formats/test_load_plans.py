"""Plans by load: which one a number of active sequences gets, and what is no such plan."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from polybasic.chain.errors import UserError
from polybasic.chain.formats.card import record_plan
from polybasic.chain.formats.describe import describe_chain, print_chain
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.plan import LoadPlan, MeasuredPlan, Plan, Tree

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
    assert {active: plans.of_load(active).tree.rows for active in expected} == expected
    assert all(plans.of_load(active) == ALONE for active in range(5, 40)), "it did not pay at 8"
    assert measured().of_load(7) == drafting(8)


def test_plans_by_load_are_recorded_and_read(tiny_chain: Path) -> None:
    plans = by_load(_1=drafting(8), _2=ALONE)
    record_plan(tiny_chain, plans)
    assert read_manifest(tiny_chain).plans_for("a machine", plans.dtype).plans == (plans,)
    shown = "1 or more: target → draft (depth 2, top 2, 8 rows); 2 or more: target"
    assert f"- {plans.place}, by number of sequences: {shown}." in (
        tiny_chain / "README.md"
    ).read_text("utf-8")
    console = Console(width=200, record=True)
    print_chain(describe_chain(tiny_chain), console)
    assert f"by number of sequences: {shown}\n" in console.export_text()
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
        ({"plan": ALONE.model_copy(update={"rule": "block"})}, "needs the rule coupled, not block"),
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
