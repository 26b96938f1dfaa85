"""Which rule a plan has: the fastest one's, or the one under which a seed means a text."""

from dataclasses import replace

import pytest
from pydantic import ValidationError
from rich.console import Console

from polybasic.deploy.planner.explanation import decide, explain
from polybasic.deploy.planner.measuring.measurements import Measurements
from polybasic.deploy.planner.rules import rules_to_compare
from polybasic.deploy.planner.search import choose_plan
from polybasic.deploy.planner.settings import PlanGrid, PlanSettings
from polybasic.deploy.planner.tables import print_explanation
from tests.deploy.planner.machines import SMALL_GRID, make_measurements


def by_rules(cost: float = 1.0) -> list[Measurements]:
    """Measurements at temperature 1, for all rules.

    Args:
        cost: of a pass with the rule `coupled`, over one with the others.
    """
    names = {"a": 4.0, "b": 2.0}
    greedy = make_measurements(
        0, {name: cost * milliseconds for name, milliseconds in names.items()}, {"b": 0.9}, hit=0.9
    )
    independent = make_measurements(0, names, {"b": 0.9}, hit=0.5, temperature=1.0)
    return [replace(greedy, temperature=1.0), independent]


@pytest.mark.parametrize(("cost", "rule"), [(1.0, "coupled"), (2.0, "block")])
def test_the_rule_is_that_of_the_fastest_plan(cost: float, rule: str) -> None:
    measurements = by_rules(cost)
    choice = choose_plan(measurements, SMALL_GRID)
    assert choice.rule == rule
    assert {candidate.plan.rule for candidate in choice.by_members} == {rule}
    assert {candidate.plan.rule for candidate in choice.other_rules} == {
        "coupled",
        "block",
        "token",
    } - {rule}
    alone = [choose_plan([measured], SMALL_GRID) for measured in measurements]
    assert choice.best == next(single for single in alone if single.rule == rule).best
    assert choice.num_simulated == sum(single.num_simulated for single in alone)
    seconds = [candidate.seconds_per_token for candidate in choice.other_rules]
    assert seconds == sorted(seconds)
    best = {candidate.plan.rule: candidate for candidate in (choice.best, *choice.other_rules)}
    assert best["token"].seconds_per_token >= best["block"].seconds_per_token
    explanation = explain(choice, choice.best.measurements)
    assert explanation["rules"][0]["rule"] == rule
    means = ", so that a seed means a text" if rule == "coupled" else ""
    first = choice.other_rules[0]
    told = f"rule {rule}{means}: with {first.plan.rule} the best plan needs {first.milliseconds}"
    assert told in explanation["decision"]
    console = Console(record=True, width=200)
    print_explanation(explanation, console)
    text = console.export_text()
    assert "Best plan of each rule" in text
    for candidate in best.values():
        assert f"{1e3 * candidate.seconds_per_token:.3f}" in text


@pytest.mark.parametrize(("cost", "rule"), [(1.009, "coupled"), (1.012, "block")])
def test_a_rule_that_saves_next_to_nothing_gives_way(cost: float, rule: str) -> None:
    """Of two that are as good, the one under which a seed means a text is taken."""
    grid = PlanGrid(depths=(2,), top_ks=(2,), rows=(4,), flush_lengths=(2,), ngram_matches=())
    measurements = [replace(measured, drafters={}) for measured in by_rules(cost)]
    for measured in measurements:
        measured.passes.pop("b")
    choice = choose_plan(measurements, grid)
    assert choice.rule == rule
    says = "which saves less than 1% of the time" in decide(choice, choice.best.measurements)
    assert says is (rule == "coupled")


def test_rules_without_others_to_compare() -> None:
    coupled, _ = by_rules()
    choice = choose_plan([coupled], SMALL_GRID)
    assert choice.other_rules == ()
    assert explain(choice, coupled)["rules"] == []
    assert "so that a seed means a text: no other was to be compared" in decide(choice, coupled)
    greedy = replace(coupled, temperature=0.0)
    assert "rule" not in decide(choose_plan([greedy], SMALL_GRID), greedy)
    compared = {
        PlanSettings(): (("coupled",),),
        PlanSettings(rule="block"): (("block",),),
        PlanSettings(temperature=1): (("coupled",), ("block", "token")),
        PlanSettings(temperature=1, rule="token"): (("token",),),
    }
    for settings, rules in compared.items():
        assert rules_to_compare(settings) == rules
    with pytest.raises(ValidationError, match="a link carries the rule coupled alone, not token"):
        PlanSettings(rule="token", link="20ms")
