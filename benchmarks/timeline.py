"""The timeline of an answer's rounds: what the device waited for, read from a profiler's trace.

Between two pieces of work the device is idle. Where the host had not yet launched what comes next
when the piece before ended, it waited for the host; else for its own scheduling. A profiler slows
the host, so what it shows is more than what answers without one wait for.
"""

import gzip
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from command import ScriptReport
from torch.profiler import profile, record_function, supported_activities

from polybasic.chain.formats.files import whole_file
from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain
from polybasic.deploy.runtime.rounds.sampling import Sampling

ROUND = "polybasic round"
"""The mark around a round: what happens until the next tokens are handed over."""
NUM_KERNELS, NUM_GAPS = 16, 8
"""The costliest and the longest, which are shown."""
_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Gap:
    """A time without work, between two pieces of it."""

    microseconds: float
    is_hosts: bool
    before: str
    after: str


@dataclass(frozen=True)
class DeviceTimeline:
    """What the device did in the marked rounds; all times and counts are a round's.

    Attributes:
        busy_milliseconds: of work, counted once where pieces overlap; None where the trace has no
            work of a device, as of a CPU.
        host_gaps, device_gaps: shares of the time in which the device waited for the host, and in
            which it was idle for another reason.
    """

    rounds: int
    milliseconds: float
    launches: float
    busy_milliseconds: float | None = None
    host_gaps: float | None = None
    device_gaps: float | None = None
    longest_gaps: tuple[Gap, ...] = ()

    def host_gaps_of(self, milliseconds: float) -> float | None:
        """The share of the host in rounds that take so long without a profiler: all that is not
        the device's own work and gaps, which are taken to stay."""
        if self.busy_milliseconds is None or self.device_gaps is None:
            return None
        own = self.busy_milliseconds + self.device_gaps * self.milliseconds
        return 1 - own / milliseconds


def trace_rounds(
    chain: Chain, prompt: list[int], plan: Plan, max_new_tokens: int, path: Path
) -> str:
    """Write a Chrome trace of one greedy answer, each round marked, compressed.

    The first round, which has the prefill in it, is not marked.

    Returns:
        The profiler's table of the costliest kernels.
    """
    stream = chain.stream_ids(prompt, max_new_tokens, Sampling(seed=0), plan)
    next(stream)
    with profile(activities=supported_activities()) as profiler:
        while True:
            with record_function(ROUND):
                if next(stream, None) is None:
                    break
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with whole_file(path) as partial:
        # the profiler goes by the suffix
        written = partial.with_name(f"{partial.name}.trace.json")
        profiler.export_chrome_trace(str(written))
        partial.write_bytes(gzip.compress(written.read_bytes()))
        written.unlink()
    order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table: str = profiler.key_averages().table(sort_by=order, row_limit=NUM_KERNELS)
    return table


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a compressed Chrome trace."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def timeline(events: Sequence[Event]) -> DeviceTimeline:
    """What a trace says of its marked rounds.

    Raises:
        ValueError: no round is marked.
    """
    marks = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("name") == ROUND and event.get("cat") == "user_annotation"
    )
    # profiling begins in the first one, and what follows the last tokens is no round
    marks = marks[1:-1] or marks
    if not marks:
        raise ValueError(f"no mark {ROUND!r} in the trace")
    begin, end = marks[0][0], marks[-1][1]
    rounds, microseconds = len(marks), end - begin
    launches = sum(
        event.get("cat") in _LAUNCHES
        and "Launch" in event["name"]
        and begin <= float(event["ts"]) < end
        for event in events
    )
    counted = (rounds, microseconds / 1e3 / rounds, launches / rounds)
    gaps = list(_gaps(events, begin, end))
    if not gaps:
        return DeviceTimeline(*counted)
    idle = sum(gap.microseconds for gap in gaps)
    of_host = sum(gap.microseconds for gap in gaps if gap.is_hosts)
    longest = sorted(gaps, key=lambda gap: gap.microseconds, reverse=True)[:NUM_GAPS]
    shares = of_host / microseconds, (idle - of_host) / microseconds
    return DeviceTimeline(*counted, (microseconds - idle) / 1e3 / rounds, *shares, tuple(longest))


def _gaps(events: Sequence[Event], begin: float, end: float) -> Iterator[Gap]:
    """Between the pieces of the device's work from `begin` to `end`; none where there is none."""
    launched = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    work = [event for event in events if event.get("cat") in _WORK and "dur" in event]
    last, before = begin, "begin"
    for piece in sorted(work, key=lambda event: float(event["ts"])):
        first = float(piece["ts"])
        if first >= end or first + float(piece["dur"]) <= begin:
            continue
        if first > last:
            at = launched.get(piece.get("args", {}).get("correlation"), last)
            yield Gap(first - last, at > last, before, piece["name"])
        if first + float(piece["dur"]) > last:
            last, before = first + float(piece["dur"]), piece["name"]
    if before != "begin" and last < end:
        yield Gap(end - last, True, before, "end")


def measure_timeline(
    report: ScriptReport, chain: Chain, plans: Mapping[str, Plan], prompt: list[int],
    num_tokens: int, path: Path,
) -> dict[str, DeviceTimeline]:  # fmt: skip
    """Trace an answer of each plan into `path`, where the last one stays, and report them all."""
    found, rows = {}, []
    for name, plan in plans.items():
        kernels = trace_rounds(chain, prompt, plan, num_tokens, path)
        summary = found[name] = timeline(read_trace(path))
        plain = milliseconds_a_round(chain, prompt, plan, num_tokens)
        numbers = [
            summary.milliseconds,
            plain,
            summary.launches,
            summary.busy_milliseconds,
            summary.host_gaps,
        ]
        numbers += [summary.host_gaps_of(plain), summary.device_gaps]
        rows.append([name, *("-" if each is None else f"{each:.3f}" for each in numbers)])
        report.say(f"Kernels of {name}:\n\n```\n{kernels}```")
        gaps = [
            [f"{gap.before[:50]} to {gap.after[:50]}", f"{gap.microseconds:.1f}"]
            for gap in summary.longest_gaps
        ]
        report.table(f"Longest gaps of {name}", ["between", "microseconds"], gaps)
    columns = ["ms a round", "without profiler", "launches", "busy ms", "host gaps"]
    columns += ["without profiler", "device gaps"]
    report.table("Rounds in the profiler's trace, gaps as shares", ["system", *columns], rows)
    return found


def milliseconds_a_round(chain: Chain, prompt: list[int], plan: Plan, max_new_tokens: int) -> float:
    """The mean of an answer's rounds without a profiler, but for the first."""
    stream = chain.stream_ids(prompt, max_new_tokens, Sampling(seed=0), plan)
    next(stream)
    begin, num_rounds = time.perf_counter(), sum(1 for _ in stream)
    return 1e3 * (time.perf_counter() - begin) / max(1, num_rounds)
