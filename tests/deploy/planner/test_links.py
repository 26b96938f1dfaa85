"""Plans for a target over a link: its seconds count, blocks get longer, and what cannot run stays
out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.formats.card import record_plan
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.plan import Flush, MeasuredPlan, Plan
from polybasic.deploy.planner import prediction
from polybasic.deploy.planner.explanation import explain
from polybasic.deploy.planner.measuring.measurements import Measurements
from polybasic.deploy.planner.prediction import PlayedBlock, seconds_ahead
from polybasic.deploy.planner.rules import rules_to_compare
from polybasic.deploy.planner.search import Candidate, choose_plan, member_sets
from polybasic.deploy.planner.settings import PlanGrid, PlanSettings
from polybasic.deploy.planner.simulation import simulate
from polybasic.deploy.runtime.remote.link import Link, answer_bytes, verify_bytes
from tests.deploy.planner import machines
from tests.deploy.traces import LEAST, after_first, make_measurements, make_trace
from tests.recipes.command_line import refusal

GRID = PlanGrid(depths=(2, 4), top_ks=(2,), rows=(4, 8), ngram_matches=()).over_link


@pytest.mark.parametrize(
    ("text", "link", "shown"),
    [
        ("20ms", Link(0.02, float("inf")), "20ms"),
        ("0.08s,100Mbit", Link(0.08, 12.5e6), "80ms,100Mbit"),
        ("250us,1.5Gbit", Link(250e-6, 187.5e6), "0.25ms,1500Mbit"),
        ("0ms,64kbit", Link(0.0, 8e3), "0ms,0.064Mbit"),
    ],
)
def test_links_as_text(text: str, link: Link, shown: str) -> None:
    assert Link.of(text) == link
    assert str(link) == shown
    assert Link.of(shown) == link


@pytest.mark.parametrize("text", ["20", "-5ms", "20ms,", "20ms,100", "20ms,0Mbit", "ms", "1e3ms"])
def test_a_link_that_is_none_is_refused_in_one_line(text: str) -> None:
    line = refusal("plan", "chain", f"--link={text}")
    assert line.startswith(f"error: value not allowed: link = '{text}' (on the command line); ")
    assert "two links" in refusal("plan", "chain", "--link=5ms", "--remote=here:1")
    assert line.endswith("no answers" if "0Mbit" in text else "bits a second: 20ms or 0.1s,100Mbit")


# Predictions by hand


def agreeing(*agrees: int) -> Measurements:
    """Passes of 9 + rows seconds, a tenth of it for b, which has a cache of its own; it agrees with
    a where it says so, from y1 on."""
    trace = make_trace({"a": [1] * len(agrees), "b": list(agrees)})
    return after_first(make_measurements(trace, shares_cache={"a": "a", "b": "b"}))


PLAN = Plan(members=("a", "b"), tree=LEAST, flush={"a": Flush(length=2)})


def test_each_pass_of_the_target_goes_over_the_link() -> None:
    # Blocks of y1 y2 and, after y3 of a's own, y4 (y5 is a's), then y6 alone remains.
    here = agreeing(1, 1, 1, 0, 1, 1)
    link = Link(100.0, 4.0)
    without, over = (
        simulate(PLAN, measurements) for measurements in (here, replace(here, link=link))
    )
    rows = [3, 3, 2]
    ways = [100 + (verify_bytes(num_rows) + answer_bytes()) / 4 for num_rows in rows]
    assert without.passes["a"] == over.passes["a"] == len(rows) / 6
    assert over.link_seconds == pytest.approx(sum(ways) / 6)
    assert over.seconds_per_token == pytest.approx(without.seconds_per_token + sum(ways) / 6)
    worked = simulate(PLAN, replace(here, link=link, message_seconds=7.0))
    assert worked.seconds_per_token == pytest.approx(over.seconds_per_token + 7 * len(rows) / 6)
    assert (without.link_seconds, without.saved_seconds, over.saved_seconds) == (0, 0, 0)
    alone = simulate(Plan(members=("a",), tree=LEAST), replace(here, link=link))
    assert alone.seconds_per_token == pytest.approx(10 + 100 + (512 + 4) / 4)


def test_blocks_that_are_drafted_while_an_answer_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prediction, "MAX_AHEAD", 1)
    blocks = [
        PlayedBlock(rows=4, is_foreseen=True, is_first=True),
        PlayedBlock(rows=4, is_foreseen=True, is_first=False),
        PlayedBlock(rows=4, is_foreseen=False, is_first=False),
        PlayedBlock(rows=2, is_foreseen=False, is_first=False),
        PlayedBlock(rows=4, is_foreseen=True, is_first=True),
    ]
    # Sent at 4, answered at 4 + 10 + 3 = 17; the second is sent at 8 and answered at 21; the third
    # is ready at 12, may leave at 17, and is answered at 30. It was followed by another token: a
    # block of two rows is sent at 32, answered at 45. The other answer takes 17.
    assert seconds_ahead(blocks, 1.0, 2.0, [3.0] * 5, [10.0] * 5) == 45 + 17
    # With room for it on the link, it leaves at 12 and is answered at 25.
    monkeypatch.setattr(prediction, "MAX_AHEAD", 2)
    assert seconds_ahead(blocks, 1.0, 2.0, [3.0] * 5, [10.0] * 5) == 45 + 17 - 5
    # Of a short link the answer, at 4 + 0.5 + 1, comes while the next block is drafted: in vain,
    # and the round that runs is waited for.
    missed = [replace(blocks[0], is_foreseen=False), blocks[3]]
    assert seconds_ahead(missed, 1.0, 2.0, [1.0] * 2, [0.5] * 2) == 5.5 + 2 / 2 + 2 + 1.5


def test_what_is_drafted_ahead_saves_time_only_where_it_is_kept() -> None:
    link = Link(30.0, float("inf"))
    saved = {}
    for name, agrees in {"always": [1] * 12, "never": [0] * 12}.items():
        measured = replace(agreeing(*agrees), link=link, is_optimistic=True)
        saved[name] = simulate(PLAN, measured).saved_seconds
        assert simulate(PLAN, replace(measured, link=None)).saved_seconds == 0
    assert saved["always"] > 5
    assert saved["never"] <= 0, "each answer comes to a stage that drafts in vain"


# Choices


def best_over(text: str, **changes: Any) -> Candidate:
    """The best plan with the intermediate, over a link."""
    cost, agreement = {"target": 4.0, "intermediate": 1.0}, {"intermediate": 0.97}
    measured = machines.make_measurements(0, cost, agreement, predicts=False)
    measured = replace(measured, link=Link.of(text), **changes)
    found = choose_plan([measured], GRID).best_with("intermediate")
    assert found is not None
    return found


def test_a_slow_link_wants_long_blocks() -> None:
    tokens = [best_over(text).predicted.block_tokens["target"] for text in ("0ms", "20ms", "80ms")]
    assert tokens == sorted(tokens)
    assert tokens[-1] > 1.5 * tokens[0]
    ahead = best_over("20ms", is_optimistic=True).predicted
    assert ahead.block_tokens["target"] < tokens[1], "the next one is drafted meanwhile"
    assert ahead.seconds_per_token < best_over("20ms").seconds_per_token


def test_plans_that_cannot_run_over_a_link_are_left_out() -> None:
    here = machines.make_measurements(0, {"a": 2.0, "b": 1.0}, {"b": 0.9}, ngram=0.2)
    grid = PlanGrid(ngram_matches=(2,))
    names = {str(members) for members in member_sets(replace(here, link=Link.of("5ms")), grid)}
    left_out = {"a → draft", "a → draft + n-grams"}
    assert {str(members) for members in member_sets(here, grid)} - names == left_out
    assert names >= {"a", "a + n-grams", "a → b", "a → b → draft + n-grams"}
    assert rules_to_compare(PlanSettings(link="5ms", temperature=1)) == (("coupled",),)
    assert len(rules_to_compare(PlanSettings(temperature=1))) == 2


def test_the_explanation_tells_the_share_of_the_link() -> None:
    cost, agreement = {"target": 4.0, "intermediate": 1.0}, {"intermediate": 0.97}
    here = machines.make_measurements(0, cost, agreement)
    measured = replace(here, link=Link.of("20ms"), is_optimistic=True)
    assert Measurements.from_json(json.loads(json.dumps(measured.to_json()))).link == measured.link
    choice = choose_plan([measured], GRID)
    told = explain(choice, measured)
    assert json.loads(json.dumps(told)) == told
    assert told["link"]["seconds_per_pass"] == pytest.approx(0.02)
    assert f"the link of 20ms takes {told['link']['share_of_round']:.0%} of a" in told["decision"]
    lemma = told["lemma_3_1"]
    total = lemma["seconds_per_token"] + lemma["beside_passes_seconds"]
    assert total == pytest.approx(lemma["simulated_seconds_per_token"])
    without = explain(choose_plan([here], GRID), here)
    assert without["link"] is None
    assert "link" not in without["decision"]


def test_a_chain_keeps_the_plans_of_links_beside_that_of_the_machine(tiny_chain: Path) -> None:
    plan = read_manifest(tiny_chain).plan
    given = {"plan": plan, "temperature": 0, "hardware": "here", "dtype": "float32"}
    links = (None, "20ms", "80ms", "20ms")
    for place, link in enumerate(links):
        record_plan(tiny_chain, MeasuredPlan(**given, seconds_per_token=place + 1, link=link))
    manifest = read_manifest(tiny_chain)
    assert [(measured.link, measured.seconds_per_token) for measured in manifest.plans] == [
        *((None, 1), ("80ms", 3), ("20ms", 4)),
    ]
    (chosen,) = manifest.plans_for("here", "float32").plans
    assert chosen.link is None
