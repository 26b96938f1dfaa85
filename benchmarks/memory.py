"""What a chain takes of memory against what was stated, and what rounds allocate.

    python benchmarks/memory.py CHAIN [--contexts 512 2048] [--dtype bfloat16] [--threads N]
        [--max-new-tokens 1000] [--json FILE]

Sets of members are loaded in a fresh process each: the target, the target with a drafter, all. It
prints the bytes that stay (weights and caches), the peak while loading, and the peak while
answering a prompt that fills the context, each stated and measured.

Then every system gives a long answer. Behind its first quarter the resident memory of the process
and the number of live tensors should not grow. A part of the answer runs under torch's profiler,
which tells each allocation: bytes a round (a round is one pass of the innermost verifying member),
and the largest ones with the operations that asked for them.
"""

import argparse
import gc
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from record import console, header, print_header, write_record
from rich import box
from rich.table import Table
from systems import chosen_plans
from torch.profiler import profile, supported_activities

from polybasic.chain.formats.manifest import Member, Plan
from polybasic.chain.formats.verify import CheckedChain, check_chain
from polybasic.chain.readable import readable_bytes
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.chain import device_named, load_checked
from polybasic.deploy.memory import CONTEXT_KINDS
from polybasic.deploy.resident import forget_peak, usage
from polybasic.deploy.rounds.sampling import Sampling

FIRST_TOKEN = 5
NUM_ANSWERED = 16
"""Tokens behind a prompt that fills the context."""
NUM_PROMPT_TOKENS = 32
NUM_PROFILED = 60
NUM_LARGEST = 5


@dataclass(frozen=True)
class Loop:
    """What an answer allocates.

    Attributes:
        num_rounds: of the long answer.
        grown_bytes: of the process, behind the first quarter of the answer.
        grown_tensors: that are live, likewise.
        allocations_per_round: how many there are in a round.
        bytes_per_round: all allocations together; most are given back at once.
        largest: operation and bytes of the largest allocations, once for each operation.
        by_operation: bytes a round of the operations that allocate most.
    """

    num_rounds: int
    grown_bytes: int
    grown_tensors: int
    allocations_per_round: float
    bytes_per_round: float
    largest: dict[str, int]
    by_operation: dict[str, float]


def member_sets(members: Sequence[Member]) -> list[list[str]]:
    """Names of the members that are loaded together."""
    target = members[0].name
    drafter = [one.name for one in members if target in one.drafts_for][:1]
    every = [one.name for one in members]
    sets = [[target], [target, *drafter], every]
    return [one for place, one in enumerate(sets) if one not in sets[:place]]


def part_of(checked: CheckedChain, names: Sequence[str]) -> tuple[CheckedChain, Plan]:
    """A chain of some of the members, and a plan for it."""
    kept = [
        one.model_copy(update={"drafts_for": tuple(set(one.drafts_for) & {*names})})
        for one in checked.manifest.members
        if one.name in names
    ]
    verifying = [one.name for one in kept if one.role != "drafter"]
    drafters = [one.name for one in kept if verifying[-1] in one.drafts_for][:1]
    plan = checked.manifest.plan
    flush = {name: plan.flush[name] for name in verifying[:-1]}
    plan = plan.model_copy(
        update={"members": (*verifying, *drafters), "flush": flush, "windows": {}, "ngram": None}
    )
    manifest = checked.manifest.model_copy(update={"members": tuple(kept), "plans": ()})
    return replace(checked, manifest=manifest), plan


def measure_set(
    folder: Path, names: Sequence[str], dtype: str, context_tokens: int
) -> dict[str, Any]:
    """Load some members and answer; to be called once, in a fresh process."""
    checked, plan = part_of(check_chain(folder, digests=False), names)
    device = device_named()
    forget_peak(device)
    chain = load_checked(checked, dtype=dtype, context_tokens=context_tokens, plan=plan)
    forget_peak(device)
    num_prompt = context_tokens - NUM_ANSWERED
    list(_answer(chain, plan, num_prompt, NUM_ANSWERED))
    return chain.memory.report(usage(device))


def measure_loop(chain: Chain, plan: Plan, max_new_tokens: int) -> Loop:
    """Watch a long answer, and profile a part of another one."""
    device, seen = chain.engine.models.target.device, []
    innermost = [name for name in plan.members if name in chain.engine.verifiers][-1]
    clock = chain.engine.verifiers[innermost].clock
    list(_answer(chain, plan, NUM_PROMPT_TOKENS, NUM_PROFILED))
    for _ in _answer(chain, plan, NUM_PROMPT_TOKENS, max_new_tokens):
        found = usage(device)
        seen.append((found.now if found else 0, _num_live_tensors()))
    num_rounds = clock.num_passes
    (early_bytes, early_tensors), (late_bytes, late_tensors) = seen[len(seen) // 4], seen[-2]

    pieces = _answer(chain, plan, NUM_PROMPT_TOKENS, max_new_tokens)
    for _ in range(3):
        next(pieces)
    num_before, num_tokens = clock.num_passes, 0
    with profile(activities=supported_activities(), profile_memory=True) as profiled:
        while num_tokens < NUM_PROFILED:
            num_tokens += len(next(pieces))
    num_profiled = clock.num_passes - num_before
    pieces.close()
    allocated = list(_allocations(profiled))
    largest: Counter[str] = Counter()
    by_operation: Counter[str] = Counter()
    for operation, num_bytes in allocated:
        largest[operation] = max(largest[operation], num_bytes)
        by_operation[operation] += num_bytes
    return Loop(
        num_rounds,
        late_bytes - early_bytes,
        late_tensors - early_tensors,
        len(allocated) / num_profiled,
        sum(by_operation.values()) / num_profiled,
        dict(largest.most_common(NUM_LARGEST)),
        {name: num / num_profiled for name, num in by_operation.most_common(NUM_LARGEST)},
    )


def _answer(chain: Chain, plan: Plan, num_prompt: int, num_tokens: int) -> Iterator[list[int]]:
    chain.stop_tokens = frozenset()
    some = range(FIRST_TOKEN, min(1000, chain.engine.models.target.config.vocab_size))
    prompt = [some[place % len(some)] for place in range(num_prompt)]
    return chain.stream_ids(prompt, num_tokens, Sampling(), plan)


def _num_live_tensors() -> int:
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def _allocations(profiled: profile) -> Iterator[tuple[str, int]]:
    """Operation and bytes of each allocation; the operation is the innermost that is running."""
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    running: list[tuple[int, str]] = []
    for event in sorted(events, key=lambda one: one.start_ns()):
        while running and running[-1][0] <= event.start_ns():
            running.pop()
        if event.name() != "[memory]":
            running.append((event.start_ns() + event.duration_ns(), event.name()))
        elif event.nbytes() > 0:
            names = [name for _, name in running] or ["outside of operations"]
            asking = [name for name in names if not name.startswith("aten::empty")]
            yield (asking or names)[-1], event.nbytes()


def print_sets(found: Sequence[dict[str, Any]]) -> None:
    """A row for each set of members and context: stated / measured."""
    table = Table(title="stated / measured", title_justify="left", box=box.SIMPLE)
    for column in ("members", "context", "caches", "staying", "", "loading", "answering"):
        table.add_column(column, justify="left" if column == "members" else "right")
    for one in found:
        stated, measured = one["memory"]["stated"], one["memory"]["measured"]
        caches = [
            kinds.get(kind, 0) for kinds in stated["members"].values() for kind in CONTEXT_KINDS
        ]
        answering = stated["staying_bytes"] + stated["workspace_bytes"]
        table.add_row(
            ", ".join(one["members"]),
            str(stated["context_tokens"]),
            readable_bytes(sum(caches)),
            _pair(stated["staying_bytes"], measured and measured["staying_bytes"]),
            "-" if measured is None else f"{one['memory']['ratio']:.3f}x",
            _pair(stated["loading_bytes"], measured and measured["loading_bytes"]),
            _pair(answering, measured and measured["answering_bytes"]),
        )
    console().print(table)


def print_loops(loops: dict[str, Loop]) -> None:
    """What rounds allocate, a row for each system; then the operations that allocate most."""
    table = Table(box=box.SIMPLE)
    for column in ("system", "rounds", "grown", "tensors", "allocations a round", "bytes a round"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for name, loop in loops.items():
        table.add_row(
            name,
            str(loop.num_rounds),
            readable_bytes(max(0, loop.grown_bytes)),
            f"{loop.grown_tensors:+d}",
            f"{loop.allocations_per_round:.0f}",
            readable_bytes(round(loop.bytes_per_round)),
        )
    console().print(table)
    for name, loop in loops.items():
        parts = [f"{one} {readable_bytes(size)}" for one, size in loop.largest.items()]
        print(f"{name}, largest allocations: {', '.join(parts)}")
        parts = [f"{one} {readable_bytes(round(size))}" for one, size in loop.by_operation.items()]
        print(f"{name}, most bytes a round: {', '.join(parts)}")


def _pair(stated: int, measured: int | None) -> str:
    return f"{readable_bytes(stated)} / {'-' if measured is None else readable_bytes(measured)}"


def _in_a_fresh_process(
    arguments: argparse.Namespace, names: Sequence[str], context_tokens: int
) -> dict[str, Any]:
    command = [sys.executable, __file__, str(arguments.chain), "--dtype", arguments.dtype]
    command += ["--measure", ",".join(names), "--contexts", str(context_tokens)]
    command += ["--threads", str(torch.get_num_threads())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chain", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--max-new-tokens", type=int, default=1000, help="of the long answer")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if arguments.measure:
        names, (context,) = arguments.measure.split(","), arguments.contexts
        print(json.dumps(measure_set(arguments.chain, names, arguments.dtype, context)))
        return
    head = header("memory", device_named(), {arguments.chain: "CHAIN", arguments.json: "FILE"})
    print_header(head)
    found = [
        {"members": names, "memory": _in_a_fresh_process(arguments, names, context)}
        for names in member_sets(check_chain(arguments.chain).manifest.members)
        for context in arguments.contexts
    ]
    print_sets(found)
    context = NUM_PROMPT_TOKENS + arguments.max_new_tokens
    chain = load_chain(arguments.chain, dtype=arguments.dtype, context_tokens=context)
    loops = {
        name: measure_loop(chain, plan, arguments.max_new_tokens)
        for name, plan in chosen_plans(chain).items()
    }
    print_loops(loops)
    content = {"sets": found, "loops": {name: asdict(loop) for name, loop in loops.items()}}
    write_record(arguments.json, head, {"dtype": arguments.dtype, **content})


if __name__ == "__main__":
    main()
