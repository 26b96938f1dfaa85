"""Times of calls that take turns, and how fast memory moves."""

import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track

from polybasic.chain.kernels.cuda.graphs import Graphs

T = TypeVar("T")
Name = TypeVar("Name", bound=Hashable)
Case = tuple[str, Callable[[], list[T]]]
"""What is measured, in words, and the function that measures it: a script runs all cases one after
the other, and benchmarks/gpu.py those that there is time for."""

BUFFER_BYTES = 256 << 20
"""Of a buffer that bandwidth is measured on, at least; see `buffer_bytes`."""
BANDWIDTH_REPEATS = 7


@dataclass(frozen=True)
class Spread:
    """One thing measured many times.

    Attributes:
        min: of all measurements, as `median` and `max`.
        turns: the median of each turn: how far they lie apart is the noise of a figure.
    """

    min: float
    median: float
    max: float
    turns: tuple[float, ...]

    @classmethod
    def of(cls, turns: Sequence[Sequence[float]]) -> "Spread":
        """Of the measurements of each turn."""
        pooled = [value for turn in turns for value in turn]
        medians = tuple(statistics.median(turn) for turn in turns)
        return cls(min(pooled), statistics.median(pooled), max(pooled), medians)

    @classmethod
    def of_turns(cls, values: Sequence[float]) -> "Spread":
        """Of one measurement a turn."""
        return cls.of([[value] for value in values])

    def times(self, factor: float) -> "Spread":
        """In another unit."""
        turns = tuple(value * factor for value in self.turns)
        return Spread(self.min * factor, self.median * factor, self.max * factor, turns)

    def cells(self, digits: int = 3) -> list[str]:
        """Minimum, median and maximum, for a table."""
        return [f"{value:.{digits}f}" for value in (self.min, self.median, self.max)]


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second between memory and what computes.

    Attributes:
        read: by the fastest of several reductions.
        copy: of a buffer to another; what is read and what is written both count.
        bound: by which bounds are computed: the best that was seen by a processor's threads; on a
            GPU, whose reductions read slower than its copies do, the median of the copies.
    """

    read: Spread
    copy: Spread
    bound: float

    def shown(self) -> str:
        """For people: median and best."""
        parts = (
            f"{name} {spread.median / 1e9:.1f} GB/s (best {spread.max / 1e9:.1f})"
            for name, spread in (("read", self.read), ("copy", self.copy))
        )
        return f"Memory: {', '.join(parts)}; bounds by {self.bound / 1e9:.1f} GB/s."


def all_of(cases: Iterable[Case[T]]) -> list[T]:
    """What all cases find."""
    return [found for _, measure in cases for found in measure()]


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds that wait for the device's work."""
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def in_turns(
    runs: Mapping[Name, Callable[[], object]],
    turns: int,
    repeats: int,
    device: torch.device,
    warm_up: int = 3,
) -> dict[Name, Spread]:
    """Seconds of each run, on a GPU by its own clock.

    All runs are called once before any is called again, so that a drift of the machine hits all
    alike, and another one begins each time: nobody always runs after the same other. On a GPU all
    calls are handed over before any is waited for: the host's time is hidden where it is shorter.

    Args:
        repeats: calls of each run in a turn.
        warm_up: calls of each that are not counted.
    """
    names, marks = list(runs), []
    for number in range(-warm_up, turns * repeats):
        for name in rotated(names, number):
            begin = _mark(device)
            runs[name]()
            end = _mark(device)
            if number >= 0:
                marks.append((name, number // repeats, begin, end))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds: dict[Name, list[list[float]]] = {name: [[] for _ in range(turns)] for name in names}
    for name, turn, begin, end in marks:
        seconds[name][turn].append(_between(begin, end))
    return {name: Spread.of(of_turns) for name, of_turns in seconds.items()}


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


def progress(what: str, num: int) -> Iterable[int]:
    """Numbers below `num`, with a bar on stderr."""
    return track(range(num), what, console=Console(stderr=True))


def rotated(things: Sequence[T], number: int) -> list[T]:
    """The things from another one on for each number."""
    first = number % len(things) if things else 0
    return [*things[first:], *things[:first]]


def captured(graphs: Graphs, key: Hashable, function: Callable[[], None]) -> Callable[[], None]:
    """A function that replays the graph of `function`, which is captured now.

    On a CPU, where nothing is captured, it calls it.
    """

    def run() -> None:
        graphs.run(key, function)

    run()
    return run


def measure_bandwidth(device: torch.device, num_bytes: int | None = None) -> Bandwidth:
    """How fast memory is read and copied.

    Args:
        num_bytes: of a buffer, of which there are two; default: far more than caches hold.
    """
    num_bytes = num_bytes or buffer_bytes(device)
    source = torch.ones(num_bytes // 4, device=device)
    copied = torch.empty_like(source)
    runs: dict[str, Callable[[], object]] = {
        "copy": lambda: copied.copy_(source),
        "dot": lambda: source.dot(source),
        "max": source.max,
        "sum": source.sum,
    }
    taken = in_turns(runs, BANDWIDTH_REPEATS, 1, device, warm_up=1)
    rates = {name: _rate(source.nbytes, spread) for name, spread in taken.items()}
    reads = [rate for name, rate in rates.items() if name != "copy"]
    read, copy = max(reads, key=lambda rate: rate.median), rates["copy"].times(2)
    bound = copy.median if device.type == "cuda" else max(read.max, copy.max)
    return Bandwidth(read, copy, bound)


def _rate(num_bytes: int, seconds: Spread) -> Spread:
    turns = tuple(num_bytes / turn for turn in seconds.turns)
    rates = (num_bytes / duration for duration in (seconds.max, seconds.median, seconds.min))
    return Spread(*rates, turns)


def buffer_bytes(device: torch.device) -> int:
    """Four times the last cache, at least `BUFFER_BYTES`, at most a sixteenth of the memory."""
    if device.type == "cuda":
        return 16 * BUFFER_BYTES
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(max(4 * last_cache_bytes(device), BUFFER_BYTES), memory_bytes // 16)


def last_cache_bytes(device: torch.device) -> int:
    """Bytes of the device's largest cache; 32 MiB where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    known = [int(size.read_text().strip().removesuffix("K")) << 10 for size in sizes]
    return max(known, default=32 << 20)
