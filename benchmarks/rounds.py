"""Where the time of an answer goes: the operations of a round, timed in real answers.

    python benchmarks/rounds.py CHAIN [--systems target eagle2 polybasic_full] [--members A,B,C ...]
        [--prompts FILE] [--num-prompts-per-task 1] [--max-new-tokens 96] [--turns 5]
        [--dtype bfloat16] [--threads N] [--profile FILE] [--json FILE]

Systems take turns, answer by answer. Each prompt is answered twice: with timers around the
operations of a round, and without, which tells what the timers cost. Times are behind the prefill.
A round is one draft and one pass of the innermost verifying member; blocks that were handed up and
the passes above are shared out over its rounds. An operation's time is its own: what it calls is
taken off where that is timed, too.

For every operation the table says what a token would take if the operation cost nothing, and below
it what passes and drafts would give at their bound (benchmarks/traffic.py), and how fast a single
operation of a slower system would have to be to catch up with the fastest. On a GPU every timer
waits for the device, which real answers do not.

`--profile FILE` writes torch's table of kernels for one more answer of each system.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from passes import load_for
from record import console, header, print_header, write_record
from rich.console import Console
from rich.progress import track
from rich.table import Table
from systems import chosen_plans, read_prompts, shown_plan
from timers import Timers, timed, timer_seconds
from timing import Bandwidth, Spread, clock_of, measure_bandwidth, rotated
from traffic import member_draft, member_pass

from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import whole_file
from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain
from polybasic.deploy.engine import Engine, Request
from polybasic.deploy.rounds.sampling import Sampling
from polybasic.deploy.rounds.stages import Stage

REST = "rest of Python"
"""What no timer was around: stages, trees, prefixes."""
PROFILED_ROWS = 30


@dataclass(frozen=True)
class RoundSettings:
    """What is asked; `max_new_tokens` of an answer at most."""

    max_new_tokens: int = 96
    temperature: float = 0.0
    turns: int = 5


@dataclass
class Answers:
    """All answers of one system in one turn, added up.

    Attributes:
        seconds: behind the prefill, with timers.
        plain_seconds: the same without.
        operations: seconds by operation; what is left of `seconds` is `REST`.
        passes, rows: of each verifying member: its passes, and the rows of all of them.
        contexts: tokens before a pass, summed over passes; half an answer is taken to stand.
    """

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    operations: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    passes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    rows: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    contexts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @torch.inference_mode()
    def answer(self, engine: Engine, request: Request) -> None:
        """Answer with timers."""
        now = clock_of(engine.models.target.device)
        timers = Timers(now)
        stages, drafter = engine.stages(request)
        stages[0].prefill(request.token_ids)
        rows = {stage.verifier.name: stage.verifier.num_rows for stage in stages}
        with timed(stages, drafter, timers):
            begin = now()
            num_tokens = _run(stages[0], request)
            seconds = now() - begin
        self.tokens += num_tokens
        self.rounds += len(stages[-1].accepted_lengths)
        self.seconds += seconds
        for name, spent in timers.seconds.items():
            self.operations[name] += spent
        self.operations[REST] += seconds - sum(timers.seconds.values())
        for name, calls in timers.calls.items():
            self.calls[name] += calls
        for stage in stages:
            name, num_passes = stage.verifier.name, len(stage.accepted_lengths)
            self.passes[name] += num_passes
            self.rows[name] += stage.verifier.num_rows - rows[name]
            self.contexts[name] += num_passes * (len(request.token_ids) + num_tokens // 2)

    @torch.inference_mode()
    def answer_plainly(self, engine: Engine, request: Request) -> None:
        """Answer without timers."""
        now = clock_of(engine.models.target.device)
        (root, *_), _ = engine.stages(request)
        root.prefill(request.token_ids)
        begin = now()
        _run(root, request)
        self.plain_seconds += now() - begin


def _run(root: Stage, request: Request) -> int:
    """Answer behind the prefill; the number of tokens."""
    num_tokens, last = 0, -1
    while num_tokens < request.max_new_tokens and last not in request.stop_tokens:
        tokens = root.propose(1, request.max_new_tokens - num_tokens).tokens
        num_tokens, last = num_tokens + len(tokens), tokens[-1]
    return num_tokens


@dataclass(frozen=True)
class Bound:
    """What a mean pass of a verifying member, or a mean draft, takes at least.

    Attributes:
        operations: that make it up.
        count: passes or drafts over all turns.
        rows: of a pass; of a draft, those of a level.
        milliseconds: the bytes that it must move over the bandwidth of memory.
    """

    operations: tuple[str, ...]
    count: int
    rows: float
    milliseconds: float


@dataclass(frozen=True)
class Breakdown:
    """Where the time of a system's answers went.

    Attributes:
        plan: what ran.
        turns: its answers, turn by turn.
        bounds: of its members' passes and drafts, by the member's name.
    """

    plan: Plan
    turns: list[Answers]
    bounds: dict[str, Bound]

    def total(self, read: Callable[[Answers], float]) -> float:
        """Over all turns."""
        return sum(read(turn) for turn in self.turns)

    @property
    def tokens(self) -> float:
        return self.total(lambda turn: turn.tokens)

    @property
    def rounds(self) -> float:
        return self.total(lambda turn: turn.rounds)

    @property
    def per_token(self) -> Spread:
        """Milliseconds a token, without timers."""
        return Spread.of_turns([1e3 * turn.plain_seconds / turn.tokens for turn in self.turns])

    @property
    def timed_per_token(self) -> float:
        """Milliseconds a token, with timers."""
        return 1e3 * self.total(lambda turn: turn.seconds) / self.tokens

    def operations(self) -> list[str]:
        """The costliest first."""
        names = {name for turn in self.turns for name in turn.operations}
        return sorted(names, key=self.milliseconds, reverse=True)

    def milliseconds(self, operation: str) -> float:
        """A token."""
        return 1e3 * self.total(lambda turn: turn.operations.get(operation, 0.0)) / self.tokens

    def per_round(self, operation: str) -> Spread:
        """Milliseconds of an operation in a round."""
        return Spread.of_turns(
            [1e3 * turn.operations.get(operation, 0.0) / turn.rounds for turn in self.turns]
        )

    def calls(self, operation: str) -> float:
        """Over all turns."""
        return self.total(lambda turn: turn.calls.get(operation, 0))

    def without(self, operation: str) -> float:
        """Milliseconds a token if an operation cost nothing."""
        return self.timed_per_token - self.milliseconds(operation)

    def each(self, member: str) -> float:
        """Milliseconds of a mean pass, or a mean draft, of a member."""
        bound = self.bounds[member]
        spent = sum(self.milliseconds(operation) for operation in bound.operations)
        return spent * self.tokens / bound.count

    def at_bound(self, member: str) -> float:
        """Milliseconds a token if the passes or drafts of a member took what their bytes take."""
        bound = self.bounds[member]
        saved = self.each(member) - bound.milliseconds
        return self.timed_per_token - saved * bound.count / self.tokens

    def to_catch_up(self, milliseconds_per_token: float) -> dict[str, float]:
        """What a round may spend on an operation, in ms, for so many ms a token.

        Operations that would not be enough alone are left out.
        """
        excess = self.timed_per_token - milliseconds_per_token
        return {
            name: (self.milliseconds(name) - excess) * self.tokens / self.rounds
            for name in self.operations()
            if 0 < excess < self.milliseconds(name)
        }

    def to_json(self) -> dict[str, Any]:
        """As a record holds it."""
        first = self.plan.members[0]
        target_passes = self.total(lambda turn: turn.passes[first])
        return {
            "plan": self.plan.model_dump(mode="json"),
            "milliseconds_per_token": self.per_token.to_json(),
            "milliseconds_per_token_with_timers": self.timed_per_token,
            "tokens_per_round": self.tokens / self.rounds,
            "tokens_per_target_pass": self.tokens / target_passes,
            "operations": {
                name: {
                    "milliseconds_per_round": self.per_round(name).to_json(),
                    "milliseconds_per_token": self.milliseconds(name),
                    "share": self.milliseconds(name) / self.timed_per_token,
                    "calls_per_round": self.calls(name) / self.rounds,
                    "milliseconds_per_token_without": self.without(name),
                }
                for name in self.operations()
            },
            "passes": {
                name: {
                    "per_round": bound.count / self.rounds,
                    "rows": bound.rows,
                    "milliseconds": self.each(name),
                    "bound_milliseconds": bound.milliseconds,
                    "milliseconds_per_token_at_bound": self.at_bound(name),
                }
                for name, bound in self.bounds.items()
            },
        }


@dataclass(frozen=True)
class RoundTimes:
    """What was measured.

    Attributes:
        systems: name -> breakdown.
        timer_seconds: of one timed call, for the timer alone.
    """

    systems: dict[str, Breakdown]
    timer_seconds: float

    def overhead(self, name: str) -> tuple[float, float]:
        """What timers add to a system's time a token: by their calls, and by its plain answers."""
        one = self.systems[name]
        calls = one.total(lambda turn: sum(turn.calls.values()))
        counted = self.timer_seconds * calls / one.total(lambda turn: turn.seconds)
        ratios = [turn.seconds / turn.plain_seconds for turn in one.turns]
        return counted, statistics.median(ratios) - 1

    def to_json(self) -> dict[str, Any]:
        """As a record holds it."""
        return {
            "timer_seconds": self.timer_seconds,
            "systems": {
                name: {
                    **one.to_json(),
                    "timers_share_counted": self.overhead(name)[0],
                    "timers_share_measured": self.overhead(name)[1],
                }
                for name, one in self.systems.items()
            },
        }


def measure_rounds(
    chain: Chain,
    plans: Mapping[str, Plan],
    prompts: Sequence[list[int]],
    settings: RoundSettings,
    bandwidth: Bandwidth,
) -> RoundTimes:
    """Answer every prompt with every plan, in turns; the first prompt once more, to warm up."""
    found: dict[str, list[Answers]] = {name: [] for name in plans}
    sampling = Sampling(temperature=settings.temperature, seed=0)

    def answer(into: Answers, plan: Plan, prompt: list[int], number: int) -> None:
        request = Request(prompt, settings.max_new_tokens, sampling, chain.stop_tokens, plan)
        ways = [into.answer, into.answer_plainly]
        for way in ways if number % 2 else reversed(ways):
            way(chain.engine, request)

    for plan in plans.values():
        answer(Answers(), plan, prompts[0], 0)
    for turn in track(range(settings.turns), description="rounds", console=Console(stderr=True)):
        answers = {name: Answers() for name in plans}
        for number, prompt in enumerate(prompts):
            for name in rotated(list(plans), turn + number):
                answer(answers[name], plans[name], prompt, turn + number)
        for name, one in answers.items():
            found[name].append(one)
    systems = {
        name: Breakdown(plan, found[name], _bounds(chain, plan, found[name], bandwidth))
        for name, plan in plans.items()
    }
    return RoundTimes(systems, timer_seconds(clock_of(chain.engine.models.target.device)))


def _bounds(
    chain: Chain, plan: Plan, turns: list[Answers], bandwidth: Bandwidth
) -> dict[str, Bound]:
    bounds = {}
    for name in turns[0].passes:
        count = sum(turn.passes[name] for turn in turns)
        context = sum(turn.contexts[name] for turn in turns) // count
        rows = sum(turn.rows[name] for turn in turns) / count
        moved = member_pass(chain, name, _seen(plan, name, context), round(rows))
        operations = (f"{name}: states", f"{name}: logits")
        milliseconds = 1e3 * moved.total / bandwidth.bound
        bounds[name] = Bound(operations, count, rows, milliseconds)
    drafter, tree = plan.members[-1], plan.tree
    if drafter in chain.engine.models.drafters:
        seen = _seen(plan, drafter, context)
        moved = member_draft(chain, drafter, seen, tree.depth, tree.top_k)
        count = sum(turn.rounds for turn in turns)
        milliseconds = 1e3 * moved.total / bandwidth.bound
        bounds[drafter] = Bound(("draft",), count, tree.top_k, milliseconds)
    return bounds


def _seen(plan: Plan, member: str, context: int) -> int:
    """Tokens of the context that a member sees."""
    window = plan.windows.get(member)
    return context if window is None else min(context, window.sinks + window.tokens)


def profile(
    chain: Chain, plans: Mapping[str, Plan], prompt: list[int], settings: RoundSettings, path: Path
) -> None:
    """Write torch's table of operators for one answer of each system."""
    sampling = Sampling(temperature=settings.temperature, seed=0)
    tables = []
    for name, plan in plans.items():
        with torch.profiler.profile() as profiler:
            for _ in chain.stream_ids(prompt, settings.max_new_tokens, sampling, plan):
                pass
        averages = profiler.key_averages()
        shown = averages.table(sort_by="self_cpu_time_total", row_limit=PROFILED_ROWS)
        tables.append(f"{name}: {shown_plan(plan, chain)}\n{shown}")
    with whole_file(path) as partial:
        partial.write_text("\n".join(tables), "utf-8")


def print_rounds(times: RoundTimes, chain: Chain) -> None:
    """A table for each system, and what it would take."""
    fastest = min(times.systems, key=lambda name: times.systems[name].timed_per_token)
    for name, one in times.systems.items():
        _print_operations(name, one, chain)
        for member, bound in one.bounds.items():
            what = "drafts" if bound.operations == ("draft",) else "passes"
            print(
                f"  {what} of {member}: {bound.rows:.1f} rows, {one.each(member):.3f} ms each, "
                f"bound {bound.milliseconds:.3f} ms; at the bound {one.at_bound(member):.3f} ms a "
                "token"
            )
        counted, measured = times.overhead(name)
        print(
            f"  timers: {100 * counted:.1f} % of the time, by their calls "
            f"({1e6 * times.timer_seconds:.2f} µs each); {100 * measured:+.1f} % beside answers "
            "without them"
        )
        if name != fastest:
            _print_catching_up(one, fastest, times.systems[fastest].timed_per_token)
        print()


def _print_operations(name: str, one: Breakdown, chain: Chain) -> None:
    spread = one.per_token
    title = (
        f"{name}: {shown_plan(one.plan, chain)}\n{spread.median:.3f} ms a token "
        f"({spread.min:.3f} to {spread.max:.3f}), {one.tokens / one.rounds:.2f} tokens a round"
    )
    table = Table("operation", title=title, title_justify="left")
    for column in ("share", "ms a round", "min", "max", "ms a token", "if it cost nothing"):
        table.add_column(column, justify="right")
    for operation in one.operations():
        each = one.per_round(operation)
        table.add_row(
            operation,
            f"{100 * one.milliseconds(operation) / one.timed_per_token:.1f} %",
            *(f"{value:.3f}" for value in (each.median, each.min, each.max)),
            f"{one.milliseconds(operation):.3f}",
            f"{one.without(operation):.3f}",
        )
    console().print(table)


def _print_catching_up(one: Breakdown, fastest: str, milliseconds: float) -> None:
    excess = one.timed_per_token - milliseconds
    print(f"  {excess:.3f} ms a token behind {fastest}; alone it would take one of these:")
    enough = one.to_catch_up(milliseconds)
    for operation, needed in enough.items():
        spent = one.milliseconds(operation) * one.tokens / one.rounds
        print(f"    {operation}: {needed:.3f} ms a round in the place of {spent:.3f}")
    if not enough:
        print("    no single operation")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chain", type=Path)
    parser.add_argument("--systems", nargs="+", default=(), help="default: all that there are")
    parser.add_argument("--members", nargs="+", default=(), metavar="A,B,C", help="further plans")
    parser.add_argument("--prompts", type=Path, help="a question file; default: embedded prompts")
    parser.add_argument("--num-prompts-per-task", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--profile", type=Path, help="write a table of torch's operators here")
    parser.add_argument("--json", type=Path, help="write the record here")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parsed()
    chain = load_for(arguments.chain, arguments.dtype, arguments.threads, 0)
    device = chain.engine.models.target.device
    places = {
        arguments.chain: "CHAIN",
        arguments.prompts: "PROMPTS",
        arguments.profile: "PROFILE",
        arguments.json: "FILE",
    }
    head = header("rounds", device, places)
    print_header(head)
    settings = RoundSettings(arguments.max_new_tokens, arguments.temperature, arguments.turns)
    plans = chosen_plans(chain, arguments.systems, arguments.members)
    num_per_task = arguments.num_prompts_per_task
    prompts = read_prompts(chain, arguments.prompts, num_per_task, settings.max_new_tokens)
    bandwidth = measure_bandwidth(device)
    print(f"{bandwidth.shown()}; {len(prompts)} prompts, {arguments.dtype}\n")
    times = measure_rounds(chain, plans, prompts, settings, bandwidth)
    print_rounds(times, chain)
    if arguments.profile is not None:
        profile(chain, plans, prompts[0], settings, arguments.profile)
    content = {
        "settings": {**vars(settings), "num_prompts": len(prompts), "dtype": arguments.dtype},
        "bandwidth": bandwidth.to_json(),
        **times.to_json(),
    }
    write_record(arguments.json, head, content)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
