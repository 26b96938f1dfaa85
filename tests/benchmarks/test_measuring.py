"""Turns, spreads, and timers that take off what they call."""

import pytest
import torch

from tests.benchmarks.scripts import load_script

measuring, timers_script = load_script("measuring"), load_script("timers")
CPU = torch.device("cpu")


def test_runs_take_turns_and_none_is_always_first() -> None:
    order: list[str] = []
    runs = {name: (lambda name=name: order.append(name)) for name in "abc"}
    found = measuring.in_turns(runs, turns=2, repeats=2, device=CPU, warm_up=1)
    passes = ["".join(order[first : first + 3]) for first in range(0, len(order), 3)]
    assert passes == ["cab", "abc", "bca", "cab", "abc"], "one to warm up, then two turns of two"
    assert {len(spread.turns) for spread in found.values()} == {2}
    assert list(found) == ["a", "b", "c"]


def test_spread_keeps_the_median_of_each_turn() -> None:
    spread = measuring.Spread.of([[5.0, 1.0, 3.0], [9.0, 2.0, 4.0]])
    assert (spread.min, spread.median, spread.max) == (1.0, 3.5, 9.0)
    assert spread.turns == (3.0, 4.0)
    assert spread.times(10) == measuring.Spread(10, 35, 90, (30, 40))
    assert spread.cells(1) == ["1.0", "3.5", "9.0"]


def test_bandwidth_is_of_the_fastest_way_to_read() -> None:
    found = measuring.measure_bandwidth(CPU, num_bytes=1 << 20)
    assert 0 < found.read.min <= found.read.median <= found.read.max <= found.bound
    assert found.bound == max(found.read.max, found.copy.max)
    assert "GB/s" in found.shown()


def test_operation_is_without_the_operations_that_it_calls() -> None:
    seconds = 0.0

    def spend(more: float) -> None:
        nonlocal seconds
        seconds += more

    timers = timers_script.Timers(lambda: seconds)
    logits = timers.around(lambda: spend(2), "logits", member="target")
    inner = timers.around(lambda: spend(3), "*: choice")

    def walk() -> None:
        spend(10)
        logits()
        inner()
        inner()

    timers.around(walk, "walk")()
    assert dict(timers.seconds) == {"walk": 10, "logits": 2, "target: choice": 6}


def test_failed_operation_ends_its_timer() -> None:
    seconds = iter([0.0, 3.0])
    timers = timers_script.Timers(lambda: next(seconds))

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        timers.around(fail, "fails")()
    assert timers.seconds["fails"] == 3
