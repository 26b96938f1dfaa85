"""What is called slower, and what is not."""

import pytest

from tests.benchmarks.scripts import load_script

comparison = load_script("comparison")


def figure(median: float, noise: float = 0.02):
    return comparison.ComparedFigure(
        median, tuple(median * (1 + noise * step) for step in (-1, 0, 1))
    )


THEN = {
    "pass target, 1 rows": figure(6.0),
    "round eagle2, draft": figure(3.0),
    "speedup eagle2": figure(2.0),
    "tokens a pass eagle2": figure(5.0, 0),
}


def verdicts(now, speed=1.0, has_same_weights=True):
    """Of the figures that changed."""
    changes = comparison.compare(THEN, {**THEN, **now}, speed, has_same_weights)
    return {change.name: change.verdict for change in changes if change.verdict}


def test_figures_that_both_runs_have_are_compared() -> None:
    changes = comparison.compare(THEN, {**THEN, "pass target, 9 rows": figure(1.0)}, 1.0)
    assert [change.name for change in changes] == list(THEN)
    assert {change.ratio for change in changes} == {1.0}
    assert verdicts({}) == {}


@pytest.mark.parametrize(
    ("factor", "noise", "speed", "expected"),
    [
        (1.3, 0.02, 1, "slower"),
        (0.7, 0.02, 1, "faster"),
        (1.03, 0.001, 1, None),  # apart, and little
        (1.3, 0.4, 1, None),  # much, and the turns overlap
        (1.3, 0.02, 1 / 1.3, None),  # a slow hour of the machine
        (1.0, 0.02, 1.3, None),  # faster memory alone
    ],
)
def test_slower_is_beyond_the_noise_of_both_and_of_memory(factor, noise, speed, expected) -> None:
    now = {"pass target, 1 rows": figure(6.0 * factor, noise)}
    assert verdicts(now, speed) == ({"pass target, 1 rows": expected} if expected else {})


def test_of_factors_fewer_are_slower_whatever_memory_does() -> None:
    now = {"speedup eagle2": figure(1.5), "tokens a pass eagle2": figure(6.0, 0)}
    expected = {"speedup eagle2": "slower", "tokens a pass eagle2": "faster"}
    assert verdicts(now, speed=0.5) == expected
    assert verdicts(now, has_same_weights=False) == {}, "of other models nothing is said"


def test_times_next_to_nothing_are_not_judged() -> None:
    then, now = {"round eagle2, walk": figure(0.01)}, {"round eagle2, walk": figure(0.03)}
    assert [change.verdict for change in comparison.compare(then, now, 1.0)] == [""]


def test_a_figure_is_read_back_in_five_digits() -> None:
    (median, *turns) = figure(1.23456789).to_json()
    assert median == 1.2346
    assert comparison.ComparedFigure.from_json([median, *turns]).turns == tuple(turns)
