"""The server under load, beside the library and llama.cpp's server, in turns.

    python benchmarks/serving.py CHAIN [--prompts FILE] [--clients 1 2 4 8 16] [--turns 3]
        [--peers-python .venv-peers/bin/python] [--only overhead load queue memory] [--record FILE]

Every server is a process of its own with `--threads` threads of computation, and one is asked at a
time. Clients are one process beside it, on the same cores. Prompts are token ids, so that all read
the same.

- overhead: one client of the server against `chain.stream` in this process, same prompts.
- load: tokens a second and time to the first text by number of clients, each with one request in
  flight; greedy, and no stop token ends an answer, so that all are equally long. The engine runs
  the plans of the load, the plan of one stream, and the target alone; llama.cpp's server has the
  same weights and slots: alone, with the 4-bit target as its draft model, with its n-grams.
- queue: far more clients than slots, with seeds and settings of their own, streamed and not; every
  answer is compared with the library's for its seed.
- memory: of the server's process after some requests, and after ten times as many.

`--peers-python` is that of the environment which `make peers` makes; without it llama.cpp's server
is left out.
"""

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from command import PROMPT_OPTIONS, ScriptReport, begin, load, options, positive, run
from measuring import Spread, progress, rotated
from serving_load import Body, Load, ServerProcess, load_of, percentile
from serving_systems import (
    COMPLETIONS,
    LLAMA,
    MODEL,
    ServedSystem,
    llama_systems,
    llama_version,
    our_server,
    our_systems,
)
from systems import prompts_of, shown_plan

from polybasic.deploy import Chain

PARTS = ("overhead", "load", "queue", "memory")
PAUSE_SECONDS = 0.05
"""Before another process computes: threads of OpenMP spin for a while after their last work."""
WARM_UP_SECONDS = 1.0
DIFFERENT_REQUESTS = 600
"""Of the queue: each is asked several times, in other company."""
MEMORY_TOKENS = 16
OVERHEAD_PROMPTS = 32

Prompts = Sequence[list[int]]


def report_overhead(
    report: ScriptReport,
    chain: Chain,
    system: ServedSystem,
    prompts: Prompts,
    num_tokens: int,
    turns: int,
) -> None:
    """Tokens a second of one client, through HTTP and through Python."""
    texts: dict[str, list[str]] = {}

    def library() -> float:
        begun = time.perf_counter()
        texts["library"] = [greedy_text(chain, prompt, num_tokens) for prompt in prompts]
        return time.perf_counter() - begun

    def served() -> float:
        found = system.load(iter(prompts), num_tokens, 1)
        texts["server"] = [answer.text for answer in found.received]
        return sum(answer.ended - answer.sent for answer in found.received)

    ways: dict[str, Callable[[], float]] = {"library": library, "server": served}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in progress("overhead", turns + 1):
        for name in rotated(list(ways), turn):
            time.sleep(PAUSE_SECONDS)
            seconds = ways[name]()
            if turn:
                rates[name].append(len(prompts) * num_tokens / seconds)
    pairs = zip(rates["library"], rates["server"], strict=True)
    lost = Spread.of_turns([1 - server / library for library, server in pairs])
    rows = [
        [name, f"{statistics.median(speeds):.0f}", f"{min(speeds):.0f}-{max(speeds):.0f}"]
        for name, speeds in rates.items()
    ]
    report.table("One client", ["way", "tokens/s", "turns"], rows)
    equal = sum(map(str.__eq__, texts["library"], texts["server"]))
    report.say(
        f"The server loses {lost.median:.1%} ({lost.min:.1%} to {lost.max:.1%} by turns); "
        f"{equal} of {len(prompts)} texts are equal."
    )


def greedy_text(chain: Chain, prompt: list[int], num_tokens: int) -> str:
    """The library's answer."""
    pieces = chain.stream(prompt, temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True)
    return "".join(piece.text for piece in pieces)


# Load


@dataclass(frozen=True)
class Figures:
    """Of one system with so many clients, each the median over turns.

    Attributes:
        median_first, late_first: milliseconds to the first text, of half and of 95 % of requests.
    """

    tokens_per_second: float
    median_first: float
    late_first: float

    @classmethod
    def of(cls, loads: Sequence[Load]) -> "Figures":
        """Of one load a turn."""
        firsts = [turn.first_seconds for turn in loads]
        return cls(
            statistics.median(turn.tokens_per_second for turn in loads),
            1e3 * statistics.median(percentile(seconds, 0.5) for seconds in firsts),
            1e3 * statistics.median(percentile(seconds, 0.95) for seconds in firsts),
        )


Loads = dict[str, dict[int, list[Load]]]
"""System -> number of clients -> a load for each turn."""


def measured_loads(
    systems: Sequence[ServedSystem],
    prompts: Prompts,
    num_tokens: int,
    clients: Sequence[int],
    seconds: float,
    turns: int,
) -> Loads:
    """All systems under one number of clients before the next number."""
    # a system goes on in the list where it stopped: no load begins with prompts that it just read
    asked = {system.name: itertools.cycle(prompts) for system in systems}
    found: Loads = {system.name: {number: [] for number in clients} for system in systems}
    for turn in progress("load", turns):
        for place, number in enumerate(clients):
            for system in rotated(systems, turn + place):
                time.sleep(PAUSE_SECONDS)
                result = system.load(
                    asked[system.name], num_tokens, number, seconds, WARM_UP_SECONDS
                )
                found[system.name][number].append(result)
    return found


def report_load(report: ScriptReport, loads: Loads, expected: dict[tuple[int, ...], str]) -> None:
    """A table for each figure, and what ours is beside the best other.

    Args:
        expected: prompt -> the library's text.
    """
    figures = {
        name: {number: Figures.of(turns) for number, turns in by_number.items()}
        for name, by_number in loads.items()
    }
    ours, *others = figures
    numbers = list(figures[ours])
    columns = ["system", *(f"{number} client{'s'[: number > 1]}" for number in numbers)]
    titles = {
        "tokens_per_second": "Tokens a second",
        "median_first": "Milliseconds to the first text, median",
        "late_first": "Milliseconds to the first text, 95th percentile",
    }
    for field, title in titles.items():
        shown = {
            name: [f"{getattr(figure, field):.0f}" for figure in by_number.values()]
            for name, by_number in figures.items()
        }
        report.table(title, columns, [[name, *cells] for name, cells in shown.items()])
    rows = []
    for group, is_theirs in (("the other plans", False), (LLAMA, True)):
        names = [name for name in others if name.startswith(LLAMA) == is_theirs]
        for field, title in titles.items() if names else ():
            best = max if field == "tokens_per_second" else min
            ratios = [
                getattr(figures[ours][number], field)
                / best(getattr(figures[name][number], field) for name in names)
                for number in numbers
            ]
            rows.append([f"{title}, {group}", *(f"{ratio:.2f}x" for ratio in ratios)])
    report.table(f"{ours} over the best of others", columns, rows)
    rows = []
    for name, by_number in loads.items():
        received = [
            answer for turns in by_number.values() for load in turns for answer in load.received
        ]
        equal = sum(answer.text == expected[tuple(answer.body["prompt"])] for answer in received)
        rows.append([name, f"{len(received)}", f"{equal}"])
    report.table("Answers", ["system", "all", "with the library's text"], rows)


# Queue and memory


def mixed_requests(prompts: Prompts, num_tokens: int) -> list[Body]:
    """Requests of different seeds, temperatures and lengths, every other one streamed."""
    return [
        {
            "model": MODEL,
            "prompt": prompts[number % len(prompts)],
            "max_tokens": 1 + number * 7 % num_tokens,
            "temperature": (0.0, 0.7, 1.0)[number % 3],
            "top_p": (1.0, 0.9)[number // 3 % 2],
            "seed": number,
            "stream": number % 2 == 0,
            "stream_options": {"include_usage": True} if number % 2 == 0 else None,
        }
        for number in range(DIFFERENT_REQUESTS)
    ]


def report_queue(
    report: ScriptReport,
    chain: Chain,
    one: ServerProcess,
    prompts: Prompts,
    arguments: argparse.Namespace,
) -> None:
    """What became of each request of many clients."""
    bodies = mixed_requests(prompts, arguments.max_new_tokens)
    clients, seconds = arguments.queue_clients, arguments.queue_seconds
    found = load_of(one.url + COMPLETIONS, itertools.cycle(bodies), clients, seconds)
    expected = {}
    for body in bodies:
        answer = chain.generate(
            body["prompt"],
            max_new_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_p=body["top_p"],
            seed=body["seed"],
        )
        expected[body["seed"]] = (answer.text, len(answer.token_ids))
    wrong = [
        reply
        for reply in found.received
        if (reply.text, reply.num_tokens) != expected[reply.body["seed"]]
    ]
    firsts = found.first_seconds
    report.say(
        f"{clients} clients for {seconds:g} seconds, {arguments.slots} slots: "
        f"{len(found.received)} answers to {len(bodies)} different requests, "
        f"{len(found.refused)} refused, {len(wrong)} differ from the library's; "
        f"{found.tokens_per_second:.0f} tokens/s, first text after {percentile(firsts, 0.5):.1f} s "
        f"in the median, {percentile(firsts, 0.95):.1f} s at the 95th percentile."
    )
    for body, why in found.refused[:1]:
        report.say(f"Refused, seed {body['seed']}: {why}")
    for one_wrong in wrong[:1]:
        report.say(f"Differs, seed {one_wrong.body['seed']}: {one_wrong.text!r}")


def report_memory(report: ScriptReport, prompts: Prompts, arguments: argparse.Namespace) -> None:
    """Resident bytes of a fresh server after some requests, and after ten times as many."""
    asked = itertools.cycle(prompts)
    with our_server(arguments) as server:
        system = ServedSystem("memory", server, {})
        bytes_after = {0: server.resident_bytes()}
        few = arguments.memory_requests
        for number, total in ((few, few), (9 * few, 10 * few)):
            system.load(itertools.islice(asked, number), MEMORY_TOKENS, arguments.slots)
            bytes_after[total] = server.resident_bytes()
    rows = [
        [f"{number}", f"{size / 1e6:.1f}", f"{size / bytes_after[few] - 1:+.2%}"]
        for number, size in bytes_after.items()
    ]
    report.table("Resident memory of the server", ["requests", "MB", f"against {few}"], rows)


def plans_by_load(chain: Chain) -> list[list[str]]:
    """The plan of one stream, and those that were measured for more sequences."""
    by_load = chain.measured_plan.by_load if chain.measured_plan is not None else ()
    plans = [
        ("of one stream", chain.plan),
        *((f"{entry.sequences}", entry.plan) for entry in by_load),
    ]
    return [[sequences, shown_plan(plan, chain)] for sequences, plan in plans]


def main() -> None:
    parser = options(
        __doc__, "chain", "--dtype", "--turns", *PROMPT_OPTIONS,
        turns=3, num_prompts_per_task=32, max_new_tokens=64,
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--clients", nargs="+", type=positive, default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=3.0, help="of a load")
    parser.add_argument("--slots", type=positive, default=16, help="sequences at a time")
    parser.add_argument("--context-tokens", type=positive, default=1024)
    parser.add_argument("--queue-clients", type=positive, default=200)
    parser.add_argument("--queue-seconds", type=float, default=120.0)
    parser.add_argument("--memory-requests", type=positive, default=200)
    parser.add_argument("--peers-python", type=Path, help="of make peers, for llama.cpp's server")
    arguments = parser.parse_args()
    report = begin(__file__, __doc__, arguments)
    chain = load(arguments, context_tokens=arguments.context_tokens)
    prompts, num_tokens = prompts_of(arguments, chain), arguments.max_new_tokens
    gc.freeze()  # clients share the server's cores, and need not look through a loaded chain
    report.say(
        f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, "
        f"{num_tokens} new tokens, {torch.get_num_threads()} threads, {arguments.slots} slots of "
        f"{arguments.context_tokens} tokens."
    )
    report.table("Plans", ["sequences", "plan"], plans_by_load(chain))
    with ExitStack() as stack:
        if {"overhead", "load", "queue"} & set(arguments.only):
            server = stack.enter_context(our_server(arguments))
            systems = our_systems(chain, server)
        if "overhead" in arguments.only:
            few = prompts[:: max(1, len(prompts) // OVERHEAD_PROMPTS)]
            report_overhead(report, chain, systems[0], few, num_tokens, 2 * arguments.turns)
        if "load" in arguments.only:
            if arguments.peers_python is not None:
                report.say(f"llama.cpp: {llama_version(arguments.peers_python)}.")
                systems += stack.enter_context(llama_systems(chain, arguments))
            expected = {tuple(prompt): greedy_text(chain, prompt, num_tokens) for prompt in prompts}
            loads = measured_loads(
                systems,
                prompts,
                num_tokens,
                arguments.clients,
                arguments.seconds,
                arguments.turns,
            )
            report_load(report, loads, expected)
        if "queue" in arguments.only:
            report_queue(report, chain, server, prompts, arguments)
        if "memory" in arguments.only:
            report_memory(report, prompts, arguments)
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
