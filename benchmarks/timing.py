"""Times of calls that take turns, and memory: how fast it moves, and how much is resident."""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
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

    def to_json(self) -> dict[str, Any]:
        """As a record holds it."""
        return {**asdict(self), "turns": list(self.turns)}


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second between memory and what computes, by torch's threads.

    Attributes:
        read: by the fastest of several reductions.
        copy: of a buffer to another; what is read and what is written both count.
    """

    read: Spread
    copy: Spread

    @property
    def bound(self) -> float:
        """The best that was seen, by which bounds are computed."""
        return max(self.read.max, self.copy.max)

    @classmethod
    def joined(cls, parts: Sequence["Bandwidth"]) -> "Bandwidth":
        """Measured at several times: each is a turn."""
        return cls(_joined([part.read for part in parts]), _joined([part.copy for part in parts]))

    def to_json(self) -> dict[str, Any]:
        """As a record holds it, in bytes a second."""
        return {"read": self.read.to_json(), "copy": self.copy.to_json(), "bound": self.bound}

    def shown(self) -> str:
        """For people: median and best."""
        parts = (
            f"{name} {spread.median / 1e9:.1f} GB/s (best {spread.max / 1e9:.1f})"
            for name, spread in (("read", self.read), ("copy", self.copy))
        )
        return f"memory: {', '.join(parts)}; bounds by {self.bound / 1e9:.1f} GB/s"


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds that wait for the device's work."""
    if device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def in_turns(
    runs: Mapping[str, Callable[[], object]],
    turns: int,
    repeats: int,
    device: torch.device,
    warm_up: int = 3,
) -> dict[str, Spread]:
    """Seconds of each run.

    All runs are called once before any is called again, so that a drift of the machine hits all
    alike, and another one begins each time: nobody always runs behind the same other.

    Args:
        repeats: calls of each run in a turn.
        warm_up: calls of each that are not counted.
    """
    names, now = list(runs), clock_of(device)
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in range(turns)] for name in names}
    for number in range(-warm_up, turns * repeats):
        for name in rotated(names, number):
            begin = now()
            runs[name]()
            taken = now() - begin
            if number >= 0:
                seconds[name][number // repeats].append(taken)
    return {name: Spread.of(of_turns) for name, of_turns in seconds.items()}


def rotated(things: Sequence[T], number: int) -> list[T]:
    """The things from another one on for each number."""
    first = number % len(things) if things else 0
    return [*things[first:], *things[:first]]


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
    return Bandwidth(max(reads, key=lambda rate: rate.median), rates["copy"].times(2))


def buffer_bytes(device: torch.device) -> int:
    """Four times the last cache, at least `BUFFER_BYTES`, at most a sixteenth of the memory."""
    if device.type == "cuda":
        return 4 * BUFFER_BYTES
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(max(4 * last_cache_bytes(), BUFFER_BYTES), memory_bytes // 16)


def last_cache_bytes() -> int:
    """Bytes of the processor's largest cache; 32 MiB where the system does not tell."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    known = [int(size.read_text().strip().removesuffix("K")) << 10 for size in sizes]
    return max(known, default=32 << 20)


def resident(key: str) -> int:
    """VmRSS (resident bytes) or VmHWM (their peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"no {key} in /proc/self/status")


def _rate(num_bytes: int, seconds: Spread) -> Spread:
    turns = tuple(num_bytes / one for one in seconds.turns)
    return Spread(
        num_bytes / seconds.max, num_bytes / seconds.median, num_bytes / seconds.min, turns
    )


def _joined(spreads: Sequence[Spread]) -> Spread:
    return Spread.of([spread.turns for spread in spreads])
