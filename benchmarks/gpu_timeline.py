"""The timeline of an answer's rounds: what the device waited for, read from a profiler's trace.

Between two pieces of work the device is idle. Where the host had not yet launched what comes next
when the piece before ended, it waited for the host; else for its own scheduling. A profiler slows
the host, so what it shows is more than what answers without one wait for.
"""

import gzip
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from polybasic.chain.formats.files import whole_file
from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain
from polybasic.deploy.rounds.sampling import Sampling

ROUND = "polybasic round"
"""The mark around a round: what happens until the next tokens are handed over."""
LONGEST_SHOWN = 8
_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}


@dataclass(frozen=True)
class Piece:
    """Work of the device.

    Attributes:
        begin, end: in microseconds.
        launched: when the host's call that brought it began; None where the trace has none.
    """

    name: str
    begin: float
    end: float
    launched: float | None


@dataclass(frozen=True)
class Gap:
    """A time without work, between two pieces."""

    microseconds: float
    is_hosts: bool
    before: str
    after: str


def trace_rounds(
    chain: Chain, prompt: list[int], plan: Plan, max_new_tokens: int, path: Path
) -> None:
    """Write a Chrome trace of one greedy answer, each round marked; gzip where `path` ends so.

    The first round, which has the prefill in it, is not marked.
    """
    sampling = Sampling(temperature=0.0, seed=0)
    activities = [ProfilerActivity.CPU]
    if chain.engine.models.target.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    stream = chain.stream_ids(prompt, max_new_tokens, sampling, plan)
    next(stream)
    with profile(activities=activities) as profiler:
        _exhaust(stream)
        if chain.engine.models.target.device.type == "cuda":
            torch.cuda.synchronize()
    with whole_file(path) as partial:
        # the profiler goes by the suffix
        written = partial.with_name(f"{partial.name}.trace.json")
        profiler.export_chrome_trace(str(written))
        content = written.read_bytes()
        written.unlink()
        partial.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def host_gaps_without_profiler(
    chain: Chain,
    prompt: list[int],
    plan: Plan,
    max_new_tokens: int,
    traced: Mapping[str, Any],
) -> dict[str, Any]:
    """The same rounds without a profiler: what is not the device's own is the host's.

    Args:
        traced: as `timeline` found it, whose work and gaps of the device are taken to stay.
    """
    sampling = Sampling(temperature=0.0, seed=0)
    stream = chain.stream_ids(prompt, max_new_tokens, sampling, plan)
    next(stream)
    times = [time.perf_counter()]
    for _ in stream:
        times.append(time.perf_counter())
    rounds = [1e3 * (after - before) for before, after in pairwise(times)]
    if not rounds:
        return {}
    mean = sum(rounds) / len(rounds)
    content: dict[str, Any] = {"milliseconds_without_profiler": mean}
    if traced["host_gaps"] is not None:
        own = traced["busy_milliseconds"] + traced["device_gaps"] * traced["milliseconds"]
        content["host_gaps_without_profiler"] = 1 - own / mean
    return content


def _exhaust(stream: Iterator[list[int]]) -> None:
    while True:
        with record_function(ROUND):
            if next(stream, None) is None:
                return


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace."""
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def timeline(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the device did in the marked rounds.

    All times are a round's. Work is counted once where pieces of it overlap. `host_gaps` is the
    share of the time in which the device waited for the host, `device_gaps` that in which it was
    idle for another reason; both are None where the trace has no work of a device.

    Raises:
        ValueError: no round is marked.
    """
    marks = sorted(
        (float(one["ts"]), float(one["ts"]) + float(one["dur"]))
        for one in events
        if one.get("name") == ROUND and one.get("cat") == "user_annotation"
    )
    # profiling begins in the first one, and what follows the last tokens is no round
    marks = marks[1:-1] or marks
    if not marks:
        raise ValueError(f"no mark {ROUND!r} in the trace")
    begin, end = marks[0][0], marks[-1][1]
    pieces = [piece for piece in _pieces(events) if piece.end > begin and piece.begin < end]
    rounds, microseconds = len(marks), end - begin
    content: dict[str, Any] = {
        "rounds": rounds,
        "milliseconds": microseconds / 1e3 / rounds,
        "pieces_of_work": len(pieces) / rounds,
        "launches": _num_launches(events, begin, end) / rounds,
        "host_gaps": None,
        "device_gaps": None,
    }
    if not pieces:
        return content
    busy, gaps = _busy_and_gaps(pieces, begin, end)
    shares = {
        is_hosts: sum(gap.microseconds for gap in gaps if gap.is_hosts == is_hosts) / microseconds
        for is_hosts in (True, False)
    }
    longest = sorted(gaps, key=lambda gap: gap.microseconds, reverse=True)[:LONGEST_SHOWN]
    return {
        **content,
        "busy_milliseconds": busy / 1e3 / rounds,
        "host_gaps": shares[True],
        "device_gaps": shares[False],
        "longest_gaps": [vars(gap) for gap in longest],
        "costliest": _costliest(pieces, rounds),
    }


def _pieces(events: Sequence[Mapping[str, Any]]) -> list[Piece]:
    """The device's work by its beginning, with when each piece was launched."""
    launched = {
        one["args"]["correlation"]: float(one["ts"])
        for one in events
        if one.get("cat") in _LAUNCHES and "correlation" in one.get("args", {})
    }
    pieces = [
        Piece(
            one["name"],
            float(one["ts"]),
            float(one["ts"]) + float(one["dur"]),
            launched.get(one.get("args", {}).get("correlation")),
        )
        for one in events
        if one.get("cat") in _WORK and "dur" in one
    ]
    return sorted(pieces, key=lambda piece: piece.begin)


def _busy_and_gaps(pieces: Sequence[Piece], begin: float, end: float) -> tuple[float, list[Gap]]:
    """Microseconds of work from `begin` to `end`, and what lies between."""
    busy, gaps, last, before = 0.0, [], begin, "begin"
    for piece in pieces:
        if piece.begin > last:
            launched = last if piece.launched is None else piece.launched
            gaps.append(Gap(piece.begin - last, launched > last, before, piece.name))
        busy += max(0.0, min(piece.end, end) - max(piece.begin, last))
        if piece.end > last:
            last, before = piece.end, piece.name
    if last < end:
        gaps.append(Gap(end - last, True, before, "end"))
    return busy, gaps


def _num_launches(events: Sequence[Mapping[str, Any]], begin: float, end: float) -> int:
    return sum(
        one.get("cat") in _LAUNCHES and "Launch" in one["name"] and begin <= float(one["ts"]) < end
        for one in events
    )


def _costliest(pieces: Sequence[Piece], rounds: int) -> list[dict[str, Any]]:
    """The kernels that most time went to."""
    spent: dict[str, list[float]] = {}
    for piece in pieces:
        spent.setdefault(piece.name, []).append(piece.end - piece.begin)
    order = sorted(spent, key=lambda name: sum(spent[name]), reverse=True)[: 2 * LONGEST_SHOWN]
    return [
        {
            "name": name[:120],
            "milliseconds": sum(spent[name]) / 1e3 / rounds,
            "calls": len(spent[name]) / rounds,
        }
        for name in order
    ]
