"""What a plan is explained by adds up, and all of it is shown."""

import json
from typing import Any

import pytest
from rich.console import Console

from polybasic.deploy.planner.explanation import explain
from polybasic.deploy.planner.measuring.measurements import Measurements
from polybasic.deploy.planner.search import choose_plan
from polybasic.deploy.planner.tables import print_explanation, tables_of
from tests.deploy.planner.machines import SMALL_GRID, make_measurements, random_measurements


def explanation_of(measured: Measurements) -> dict[str, Any]:
    found: dict[str, Any] = explain(choose_plan([measured], SMALL_GRID), measured)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_an_explanation_adds_up(seed: int) -> None:
    measured = random_measurements(seed)
    choice = choose_plan([measured], SMALL_GRID)
    explanation = explain(choice, measured)
    assert json.loads(json.dumps(explanation)) == explanation
    lemma = explanation["lemma_3_1"]
    total = lemma["seconds_per_token"] + lemma["beside_passes_seconds"]
    assert total == pytest.approx(choice.best.seconds_per_token)
    assert lemma["simulated_seconds_per_token"] == choice.best.seconds_per_token
    parts = [term["seconds_per_token"] for term in lemma["terms"]]
    assert sum(parts) == pytest.approx(lemma["seconds_per_token"])
    for entry in explanation["accepted_length"]:
        assert 1 <= entry["mean"] <= entry["max_tokens"]
    assert len(explanation["insertions"]) == 2
    for insertion in explanation["insertions"]:
        assert insertion["pays"] is (
            insertion["seconds_per_token_with"] < insertion["seconds_per_token_without"]
        )
    # What is in the plan was found to pay, and what is not was found not to.
    kept = {insertion["inserted"] for insertion in explanation["insertions"] if insertion["pays"]}
    if len(choice.best.names) == 4:
        assert kept == {"b", "c"}


def test_theorem_3_2_by_hand() -> None:
    measured = make_measurements(
        0, {"target": 20.0, "intermediate": 1.0}, {"intermediate": 0.99}, draft_seconds=0.01
    )
    choice = choose_plan([measured], SMALL_GRID)
    without, inserted = choice.best_without("intermediate").predicted, choice.best.predicted
    (insertion,) = explain(choice, measured)["insertions"]
    seconds = inserted.seconds_by_member["intermediate"] / inserted.passes["intermediate"]
    left = seconds * without.passes["target"] / without.seconds_by_member["target"]
    spared = without.passes["target"] - inserted.passes["target"]
    assert insertion["fewer_passes_above"]["left"] == pytest.approx(left)
    assert insertion["fewer_passes_above"]["right"] == pytest.approx(
        spared / inserted.passes["intermediate"]
    )
    assert insertion["drafts_per_round"] == pytest.approx(
        without.passes["draft"] / without.passes["target"]
    )


@pytest.mark.parametrize(("seed", "width"), [(0, 80), (1, 80), (1, 120)])
def test_everything_is_shown(seed: int, width: int) -> None:
    explanation = explanation_of(random_measurements(seed))
    console = Console(width=width)
    with console.capture() as captured:
        print_explanation(explanation, console)
    text = captured.get()
    assert "a machine, float32" in text
    lines = [line.strip() for line in text.splitlines()]
    reasons = explanation["decision"].split("; ")
    shown = " ".join(lines).split()
    decided = " ".join(reasons).split()
    assert shown[1 : len(decided)] == decided[1:], "the decision is first"
    for reason in reasons[1:]:
        assert any(line and reason.startswith(line) for line in lines), "a line for each"
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for entry in explanation["by_members"]:
        assert f"{1e3 * entry['seconds_per_token']:.3f}" in text
    for title in ("Lemma 3.1", "Theorem 3.2", "Milliseconds a pass", "Best plan of each set"):
        assert title in text


def test_a_chain_without_intermediates_is_explained() -> None:
    measured = make_measurements(0, {"target": 2.0}, {})
    explanation = explanation_of(measured)
    assert explanation["insertions"] == []
    assert explanation["acceptance"]["verifying"] == []
    assert "keep draft" in explanation["decision"]
    assert tables_of(explanation)
