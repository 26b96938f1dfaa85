"""How steady the machine was while systems answered, and what else its cores did."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polybasic.deploy.bench.schema import Answers, NoiseReport

LARGEST_SPREAD = 0.1
"""Of a steady machine: its fastest repeat over its slowest, less 1."""
OUTLIER = 1.5
"""An answer is one if a token takes so many times as long as in the fastest of the repeats."""
LEAST_TOKENS = 4
"""After the first ones, of answers whose times can be compared."""
LARGEST_OUTLIERS = 0.02
"""Of a steady machine: the share of its answers that are outliers."""
LARGEST_OTHERS = 0.05
"""Of quiet cores: the share of their time that other processes take."""
LARGEST_STOLEN = 0.01
"""Of a quiet host: the share of the cores' time that it withholds."""


@dataclass(frozen=True)
class CoreUse:
    """What the cores that a process may run on did meanwhile, in seconds of one core each.

    Attributes:
        elapsed: of all cores.
        others: spent by processes that are neither this one nor begun by it.
        stolen: withheld by the host of a virtual machine.
    """

    elapsed: float
    others: float
    stolen: float


class Quiet:
    """Watches the cores from where it is made until `stop`.

    Args:
        root: under which /proc lies.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._began = self._times()

    def stop(self) -> CoreUse | None:
        """What the cores did since then; None on systems without Linux' /proc."""
        now = self._times()
        if now is None or self._began is None:
            return None
        elapsed, busy, stolen, own = (
            (after - before) / os.sysconf("SC_CLK_TCK")
            for after, before in zip(now, self._began, strict=True)
        )
        return CoreUse(elapsed, others=max(0.0, busy - own), stolen=stolen)

    def _times(self) -> tuple[int, int, int, int] | None:
        """Of the cores: all time, busy time, stolen time; and that of this process, in ticks."""
        if not (self._proc / "stat").exists():
            return None
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        elapsed = busy = stolen = 0
        for line in (self._proc / "stat").read_text().splitlines():
            name, *fields = line.split()
            if name in mine:
                # guests' time is part of user and nice
                user, nice, system, idle, waiting, hard, soft, steal = map(int, fields[:8])
                busy += user + nice + system + hard + soft
                stolen += steal
                elapsed += user + nice + system + idle + waiting + hard + soft + steal
        return elapsed, busy, stolen, self._own()

    def _own(self) -> int:
        """Ticks of this process and of all that it began, those that have ended too."""
        ticks, children = {}, dict[int, list[int]]()
        for file in self._proc.glob("[0-9]*/stat"):
            try:
                text = file.read_text()
            except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                continue
            # the name of the program comes second, in parentheses, and may hold anything
            fields = text[text.rindex(")") + 2 :].split()
            process = int(file.parent.name)
            children.setdefault(int(fields[1]), []).append(process)
            ticks[process] = sum(map(int, fields[11:15]))
        total, waiting = 0, [os.getpid()]
        while waiting:
            process = waiting.pop()
            total += ticks.get(process, 0)
            waiting += children.get(process, [])
        return total


def noise_of(target: Answers, use: CoreUse | None = None) -> NoiseReport:
    """Judge the machine by the target's answers to the same prompts in each repeat.

    Args:
        target: its answers, at least one.
        use: what the cores did meanwhile, where it is known.
    """
    most = max(map(len, target.seconds))
    whole = [repeat for repeat, row in enumerate(target.seconds) if len(row) == most]
    tokens = np.array([target.num_tokens[repeat] for repeat in whole])
    seconds = np.array([target.seconds[repeat] for repeat in whole])
    rates = (tokens.sum(1) / seconds.sum(1)).tolist()
    return NoiseReport(
        repeat_tokens_per_second=rates,
        spread=max(rates) / min(rates) - 1,
        warnings=[*_of_repeats(rates), *_of_answers(target, whole), *_of_cores(use)],
    )


def _of_repeats(rates: Sequence[float]) -> list[str]:
    if len(rates) == 1:
        return ["A single repeat does not show whether the machine was steady: run two or more."]
    if max(rates) / min(rates) - 1 <= LARGEST_SPREAD:
        return []
    first, last = (f"{rate:.4g}" for rate in (rates[0], rates[-1]))
    if len(rates) > 2 and list(rates) == sorted(rates, reverse=True):
        what = f"The machine slowed down, the target went from {first} to {last} tokens/s"
        do = "let it cool or fix its clock, and measure again."
    elif len(rates) > 2 and list(rates) == sorted(rates):
        what = f"The machine became faster, the target went from {first} to {last} tokens/s"
        do = "measure again now that it is warm or free."
    else:
        what = (
            f"The target's repeats differ by {100 * (max(rates) / min(rates) - 1):.0f} %, from "
            f"{min(rates):.4g} to {max(rates):.4g} tokens/s"
        )
        do = "end other processes, and measure again."
    return [f"{what}: ratios are affected less, as systems take turns; {do}"]


def _of_answers(target: Answers, whole: Sequence[int]) -> list[str]:
    """Of whole repeats; by the time of the tokens after the first, as sampled answers differ."""
    tokens, seconds = (
        np.array([rows[repeat] for repeat in whole]) for rows in target.after_first()
    )
    has_more = (tokens >= LEAST_TOKENS).all(0)
    seconds_per_token = (seconds / tokens.clip(1))[:, has_more]
    if not seconds_per_token.size:
        return []
    slow = int((seconds_per_token > OUTLIER * seconds_per_token.min(0)).sum())
    if slow <= LARGEST_OUTLIERS * seconds_per_token.size:
        return []
    return [
        f"{slow} of {seconds_per_token.size} of the target's answers took over {OUTLIER:g} times "
        "as long a token as in another repeat: something interrupts the machine; end it, "
        "or run more repeats, over which it is spread."
    ]


def _of_cores(use: CoreUse | None) -> list[str]:
    if use is None or use.elapsed <= 0:
        return []
    others, stolen = use.others / use.elapsed, use.stolen / use.elapsed
    warnings = []
    if others > LARGEST_OTHERS:
        warnings.append(
            f"Other processes took {100 * others:.0f} % of the cores' time, and speedups are other "
            "ones than on quiet cores: end them, or keep this run and them on different cores "
            "(taskset)."
        )
    if stolen > LARGEST_STOLEN:
        warnings.append(
            f"The host of this virtual machine withheld {100 * stolen:.0f} % of the cores' time "
            "(steal): take a machine of your own, or another hour."
        )
    return warnings
