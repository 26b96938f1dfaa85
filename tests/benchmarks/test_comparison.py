"""What is called slower, and what is not."""

from copy import deepcopy
from typing import Any

import pytest

from tests.benchmarks.scripts import load_script

comparison = load_script("comparison")


def spread(median: float, noise: float = 0.02) -> dict[str, Any]:
    turns = [median * (1 + noise * step) for step in (-1, 0, 1)]
    return {"min": turns[0], "median": median, "max": turns[-1], "turns": turns}


def record() -> dict[str, Any]:
    """Of one system, with turns that lie 2 % apart."""
    system = {
        "milliseconds_per_token": spread(7.0),
        "speedup_vs_target": spread(2.0),
        "tokens_per_target_pass": 5.0,
    }
    operation = {"milliseconds_per_round": spread(3.0)}
    return {
        "bandwidth": {"read": spread(20e9)},
        "passes": {"target": {"1": {"milliseconds": spread(6.0)}}},
        "drafts": {"draft": {"7x4": {"milliseconds": spread(4.0)}}},
        "rounds": {"systems": {"eagle2": {"operations": {"draft": operation}}}},
        "end_to_end": {"checkouts": {"here": {"eagle2": system}}},
    }


def verdicts(now: dict[str, Any], has_same_weights: bool = True) -> dict[str, str]:
    """Of the figures that changed."""
    changes = comparison.compare(record(), now, has_same_weights)
    return {change.name: change.verdict for change in changes if change.verdict}


def test_same_figures_are_the_same() -> None:
    changes = comparison.compare(record(), record())
    assert [change.name for change in changes] == [
        "pass target, 1 rows",
        "draft draft, 7x4",
        "round eagle2, draft",
        "token eagle2",
        "speedup eagle2",
        "tokens a pass eagle2",
    ]
    assert {change.ratio for change in changes} == {1.0}
    assert verdicts(record()) == {}


@pytest.mark.parametrize(
    ("factor", "noise", "expected"),
    [
        (1.3, 0.02, {"pass target, 1 rows": "slower"}),
        (0.7, 0.02, {"pass target, 1 rows": "faster"}),
        (1.03, 0.001, {}),  # apart, and little
        (1.3, 0.4, {}),  # much, and the turns overlap
    ],
)
def test_slower_is_beyond_the_noise_of_both(
    factor: float, noise: float, expected: dict[str, str]
) -> None:
    now = record()
    now["passes"]["target"]["1"]["milliseconds"] = spread(6.0 * factor, noise)
    assert verdicts(now) == expected


def test_slow_hour_of_the_machine_makes_nothing_slower() -> None:
    now = record()
    now["passes"]["target"]["1"]["milliseconds"] = spread(6.0 * 1.3)
    now["bandwidth"]["read"] = spread(20e9 / 1.3)
    assert verdicts(now) == {}
    (change, *_) = comparison.compare(record(), now)
    assert change.ratio == pytest.approx(1.3)
    assert change.related == pytest.approx(1.0)


def test_faster_memory_alone_makes_nothing_slower() -> None:
    now = record()
    now["bandwidth"]["read"] = spread(20e9 * 1.3)
    assert verdicts(now) == {}


def test_of_factors_fewer_are_slower() -> None:
    now = record()
    now["end_to_end"]["checkouts"]["here"]["eagle2"]["speedup_vs_target"] = spread(1.5)
    now["end_to_end"]["checkouts"]["here"]["eagle2"]["tokens_per_target_pass"] = 6.0
    now["bandwidth"]["read"] = spread(10e9)
    expected = {"speedup eagle2": "slower", "tokens a pass eagle2": "faster"}
    assert verdicts(now) == expected
    assert verdicts(now, has_same_weights=False) == {}, "of other models nothing is said"


def test_times_next_to_nothing_are_not_judged() -> None:
    then, now = record(), record()
    operation = ("rounds", "systems", "eagle2", "operations", "draft")
    for content, median in ((then, 0.01), (now, 0.03)):
        part: Any = content
        for key in operation:
            part = part[key]
        part["milliseconds_per_round"] = spread(median)
    changes = comparison.compare(then, now)
    assert [change.verdict for change in changes] == [""] * len(changes)
    assert comparison.table_of(changes).row_count == len(changes) - 1


def test_figures_that_only_one_run_has_are_left_out() -> None:
    now = deepcopy(record())
    now["passes"]["target"]["9"] = {"milliseconds": spread(1.0)}
    assert "pass target, 9 rows" not in {c.name for c in comparison.compare(record(), now)}
