"""Times of work on a device, by its own clock: what the host does meanwhile does not count."""

import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from timing import Spread, rotated

from polybasic.deploy.graphs.capture import Graphs

WARM_UP = 2

Name = TypeVar("Name", bound=Hashable)
Run = Callable[[], None]


def captured(graphs: Graphs, key: Hashable, function: Run) -> Run:
    """A function that replays the graph of `function`, which is captured now.

    On a CPU, where nothing is captured, it calls it.
    """

    def run() -> None:
        graphs.run(key, function)

    run()
    return run


def device_seconds(
    runs: Mapping[Name, Run], turns: int, repeats: int, device: torch.device
) -> dict[Name, Spread]:
    """Seconds of each run, which take turns call by call.

    On a GPU between events on its stream. All calls are handed over before any is waited for, so
    that the device always has work and the host's time is hidden, where it is shorter.
    """
    names, marks = list(runs), []
    for number in range(-WARM_UP, turns * repeats):
        for name in rotated(names, number):
            begin = _mark(device)
            runs[name]()
            end = _mark(device)
            if number >= 0:
                marks.append((name, number // repeats, begin, end))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds: dict[Name, list[list[float]]] = {name: [[] for _ in range(turns)] for name in runs}
    for name, turn, begin, end in marks:
        seconds[name][turn].append(_between(begin, end))
    return {name: Spread.of(of_turns) for name, of_turns in seconds.items()}


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Where the device is current; for functions that launch kernels of their own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end) - begin
    return float(begin.elapsed_time(end)) / 1e3
