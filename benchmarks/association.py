"""Milliseconds a token of four devices and two servers, by who drafts for whom.

    python benchmarks/association.py CHAIN [--seconds 20] [--turns 3] [--prompts FILE]
        [--max-new-tokens 64] [--record FILE]

Each server is a process of its own (`polybasic serve-target`) on a core of its own, each device a
near side in this process, and a proxy between any two delays what they send. Costs are measured
once, with all members here. The association that `polybasic plan --devices` chooses takes turns
with that of the nearest servers and with the most expensive one: in a turn all devices answer
prompts for some seconds. They wait for their servers, as drafting on would take cores that all of
them share here; a chain with n-grams alone below the target leaves the servers theirs.
"""

import argparse
import os
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import cycle, product
from pathlib import Path

from command import PROMPT_OPTIONS, ScriptReport, begin, load, options, positive, run
from delaying_proxy import delaying_proxy
from link import far_side, measured_here, sampling_of
from measuring import Spread, rotated
from systems import prompts_of, shown_plan

from polybasic.deploy import Chain, load_chain
from polybasic.deploy.planner.association import Fleet, Pair, Pricing, associate, total
from polybasic.deploy.planner.settings import PlanGrid

FLEET = Fleet.model_validate(
    {
        "servers": {"near": {}, "far": {}},
        "devices": {
            "laptop": {"links": {"near": "20ms", "far": "30ms"}},
            "desk": {"links": {"near": "20ms", "far": "25ms"}},
            "phone": {"links": {"near": "60ms", "far": "120ms"}},
            "tablet": {"links": {"near": "40ms", "far": "100ms"}},
        },
    }
)
"""Two devices whose second server is hardly farther than the nearest one, and two far from it."""


@dataclass
class Associated:
    """An association and what it took.

    Attributes:
        turns: of each device, seconds a token by turn.
    """

    pairs: Mapping[str, Pair]
    turns: dict[str, list[float]] = field(default_factory=dict)

    @property
    def measured(self) -> Spread:
        """Seconds a token, summed over the devices, by turn."""
        return Spread.of_turns([sum(of_turn) for of_turn in zip(*self.turns.values(), strict=True)])


def answered(
    near: Chain, pair: Pair, prompts: Sequence[list[int]], arguments: argparse.Namespace
) -> float:
    """Seconds a token of a device that answers prompts until its time is over."""
    end, seconds, tokens, number = time.monotonic() + arguments.seconds, 0.0, 0, 0
    while time.monotonic() < end:
        prompt = prompts[number % len(prompts)]
        stream = near.stream_ids(
            prompt, arguments.max_new_tokens, sampling_of(arguments), pair.best.plan
        )
        tokens += sum(len(batch) for batch in stream)
        seconds += stream.statistics.seconds - stream.statistics.prefill_seconds
        number += 1
    return seconds / tokens


def measure(
    associations: Mapping[str, Associated],
    chains: Mapping[tuple[str, str], Chain],
    prompts: Sequence[list[int]],
    arguments: argparse.Namespace,
) -> None:
    """Let all devices answer at a time, by each association in turns."""
    for turn in range(arguments.turns + 1):
        for name in rotated(list(associations), turn):
            associated = associations[name]
            with ThreadPoolExecutor(len(associated.pairs)) as pool:
                found = {
                    device: pool.submit(
                        answered,
                        chains[device, pair.server],
                        pair,
                        prompts[place:] + prompts[:place],
                        arguments,
                    )
                    for place, (device, pair) in enumerate(associated.pairs.items())
                }
            for device, seconds in found.items():
                if turn:  # the first one is a warm-up
                    associated.turns.setdefault(device, []).append(seconds.result())


def report_associations(
    report: ScriptReport, associations: Mapping[str, Associated], chain: Chain
) -> None:
    """Tables of the sums and of the devices."""
    best = associations["chosen"]
    rows = [
        [
            name,
            f"{1e3 * total(associated.pairs):.1f}",
            f"{1e3 * associated.measured.median:.1f}",
            f"{1e3 * associated.measured.min:.1f} to {1e3 * associated.measured.max:.1f}",
            f"{total(associated.pairs) / total(best.pairs):.2f}x",
            f"{associated.measured.median / best.measured.median:.2f}x",
        ]
        for name, associated in associations.items()
    ]
    columns = ["predicted", "measured", "by turns", "over the chosen, predicted", "measured"]
    report.table("Milliseconds a token, summed over the devices", ["association", *columns], rows)
    rows = [
        [
            f"{name}: {device}",
            pair.server,
            str(pair.link),
            f"{1e3 * pair.seconds:.1f}",
            f"{1e3 * Spread.of_turns(associated.turns[device]).median:.1f}",
        ]
        for name, associated in associations.items()
        for device, pair in associated.pairs.items()
    ]
    report.table(
        "Milliseconds a token", ["device", "server", "round trip", "predicted", "measured"], rows
    )
    plans = {shown_plan(pair.best.plan, chain) for pair in best.pairs.values()}
    report.say("\n".join(f"- plan: {plan}" for plan in sorted(plans)))


def main() -> None:
    parser = options(
        __doc__, "chain", "--dtype", "--turns", "--temperature", *PROMPT_OPTIONS,
        turns=3, max_new_tokens=64,
    )  # fmt: skip
    parser.add_argument("--seconds", type=positive, default=20, help="of each turn")
    parser.add_argument("--max-seconds", type=positive, default=90, help="of measuring costs")
    parser.set_defaults(threads=1)
    arguments = parser.parse_args()
    report = begin(__file__, __doc__, arguments)
    whole = load(arguments, share_caches=False)
    measurements = replace(measured_here(arguments, whole), is_optimistic=False)
    prompts = prompts_of(arguments, whole)
    pricing = Pricing(measurements, FLEET, PlanGrid())
    found = associate(measurements, FLEET, PlanGrid())
    every = (
        pricing.pairs(dict(zip(FLEET.devices, servers, strict=True)))
        for servers in product(FLEET.servers, repeat=len(FLEET.devices))
    )
    associations = {"chosen": Associated(found.pairs)}
    if found.nearest is not None:
        associations["nearest servers"] = Associated(found.nearest)
    associations["most expensive"] = Associated(max(every, key=total))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        key = Path(folder) / "key"
        key.write_text(secrets.token_hex(32))
        chains = {}
        for cpu, server in zip(cycle(sorted(os.sched_getaffinity(0))), FLEET.servers, strict=False):
            port = running.enter_context(far_side(arguments, key, cpu, len(FLEET.devices)))
            for name in FLEET.devices:
                link = pricing.pair(name, server, 1).link
                between = running.enter_context(
                    delaying_proxy(
                        "127.0.0.1", port, link.round_trip_seconds, link.bytes_per_second
                    )
                )
                chains[name, server] = load_chain(
                    arguments.chain, digests=False, device="cpu", dtype=arguments.dtype,
                    remote=f"127.0.0.1:{between}", key_file=str(key),
                )  # fmt: skip
                remote = chains[name, server].engine.models.remote
                assert remote is not None
                remote.optimistic = False
                running.callback(remote.close)
        measure(associations, chains, prompts, arguments)
    report.say(f"{len(prompts)} prompts, {arguments.turns} turns of {arguments.seconds:g} seconds.")
    report_associations(report, associations, whole)
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
