"""Where the time of an answer goes: the operations of a round, timed in real answers.

    python benchmarks/rounds.py CHAIN [--device cpu] [--systems target eagle2 polybasic_full]
        [--prompts FILE] [--max-new-tokens 96] [--turns 5] [--trace FILE] [--record FILE]

On a CPU systems take turns, answer by answer. Each prompt is answered twice: with timers around the
operations of a round, and without, which tells what the timers cost. Times are those after the
prefill. A round is one draft and one pass of the innermost verifying member; blocks that were
handed up and the passes above are shared out over its rounds. An operation's time is its own: what
it calls is taken off where that is timed, too. For every operation the table says what a token
would take if the operation cost nothing, and below it what passes and drafts would give at their
bound (benchmarks/traffic.py).

On a GPU, where a round is a few graphs and a timer would wait for the device, the profiler's trace
of one answer of each system tells what the device did and what it waited for. `--trace FILE` keeps
the last one, on either device.
"""

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from command import PROMPT_OPTIONS, SYSTEM_OPTIONS, ScriptReport, begin, load, options, run
from measuring import Bandwidth, Spread, clock_of, measure_bandwidth, progress, rotated
from systems import chosen_plans, prompts_of, shown_plan
from timeline import measure_timeline
from timers import Timers, timed
from traffic import member_draft, member_pass

from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain
from polybasic.deploy.runtime.engine import Engine, rounds_of
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.sampling import Sampling

REST = "rest of Python"
"""What no timer was around: stages, trees, prefixes."""


@dataclass
class TimedAnswers:
    """All answers of one system in one turn, added up.

    Attributes:
        seconds: after the prefill, with timers.
        plain_seconds: the same without.
        operations: seconds by operation; what is left of `seconds` is `REST`.
        passes, rows: of each verifying member: its passes, and the rows of all of them.
        contexts: tokens before a pass, summed over passes; half an answer is taken to stand.
    """

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    operations: Counter[str] = field(default_factory=Counter)
    passes: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    contexts: Counter[str] = field(default_factory=Counter)

    @torch.inference_mode()
    def answer(self, engine: Engine, request: Request) -> None:
        """Answer with timers."""
        now = clock_of(engine.models.target.device)
        timers = Timers(now)
        stages, drafter = engine.stages(request)
        rounds = rounds_of(stages[0], request)
        next(rounds)
        rows = {stage.verifier.name: stage.verifier.num_rows for stage in stages}
        with timed(stages, drafter, timers):
            begun = now()
            num_tokens = sum(len(tokens) for tokens, _ in rounds)
            seconds = now() - begun
        self.tokens += num_tokens
        self.rounds += len(stages[-1].accepted_lengths)
        self.seconds += seconds
        self.operations.update(timers.seconds)
        self.operations[REST] += seconds - sum(timers.seconds.values())
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
        rounds = rounds_of(root, request)
        next(rounds)
        begun = now()
        for _ in rounds:
            pass
        self.plain_seconds += now() - begun


@dataclass(frozen=True)
class Passes:
    """The passes of a verifying member, or the drafts, of all turns.

    Attributes:
        seconds: of all of them.
        rows: of a mean pass; of a draft, those of a level.
        bound_seconds: what one takes at least: the bytes that it must move over the bandwidth.
    """

    count: int
    seconds: float
    rows: float
    bound_seconds: float

    @property
    def beyond_bound(self) -> float:
        """Seconds of all of them beyond their bound."""
        return self.seconds - self.count * self.bound_seconds


@dataclass(frozen=True)
class Breakdown:
    """Where the time of a system's answers went, turn by turn."""

    plan: Plan
    turns: list[TimedAnswers]

    @cached_property
    def total(self) -> TimedAnswers:
        """Of all turns."""
        total = TimedAnswers()
        for turn in self.turns:
            for name, value in vars(turn).items():
                setattr(total, name, getattr(total, name) + value)
        return total

    @property
    def per_token(self) -> Spread:
        """Milliseconds a token, without timers."""
        return Spread.of_turns([1e3 * turn.plain_seconds / turn.tokens for turn in self.turns])

    def per_round(self, operation: str) -> Spread:
        """Milliseconds of an operation in a round."""
        return Spread.of_turns(
            [1e3 * turn.operations[operation] / turn.rounds for turn in self.turns]
        )

    def operations(self) -> list[str]:
        """The costliest first."""
        return [name for name, _ in self.total.operations.most_common()]

    def passes(self, chain: Chain, bandwidth: Bandwidth) -> dict[str, Passes]:
        """By member."""
        total, plan, found, context = self.total, self.plan, {}, 0
        for name, count in total.passes.items():
            context = total.contexts[name] // count
            rows = total.rows[name] / count
            moved = member_pass(chain, name, _seen(plan, name, context), round(rows))
            seconds = total.operations[f"{name}: states"] + total.operations[f"{name}: logits"]
            found[name] = Passes(count, seconds, rows, moved.total / bandwidth.bound)
        name, tree = plan.members[-1], plan.tree
        if name in chain.engine.models.drafters:
            seen = _seen(plan, name, context)
            moved = member_draft(chain, name, seen, tree.depth, tree.top_k)
            seconds, bound = total.operations["draft"], moved.total / bandwidth.bound
            found[name] = Passes(total.rounds, seconds, tree.top_k, bound)
        return found


def _seen(plan: Plan, member: str, context: int) -> int:
    """Tokens of the context that a member sees."""
    window = plan.windows.get(member)
    return context if window is None else min(context, window.sinks + window.tokens)


def measure_rounds(
    chain: Chain, plans: Mapping[str, Plan], prompts: Sequence[list[int]], max_new_tokens: int,
    turns: int, temperature: float = 0.0,
) -> dict[str, Breakdown]:  # fmt: skip
    """Answer every prompt with every plan, in turns; the first prompt once more, to warm up."""
    found = {name: Breakdown(plan, []) for name, plan in plans.items()}
    sampling = Sampling(temperature=temperature, seed=0)

    def answer(into: TimedAnswers, plan: Plan, prompt: list[int], number: int) -> None:
        request = Request(prompt, max_new_tokens, sampling, chain.stop_tokens, plan)
        ways = [into.answer, into.answer_plainly]
        for way in ways if number % 2 else reversed(ways):
            way(chain.engine, request)

    for plan in plans.values():
        answer(TimedAnswers(), plan, prompts[0], 0)
    for turn in progress("rounds", turns):
        for breakdown in found.values():
            breakdown.turns.append(TimedAnswers())
        for number, prompt in enumerate(prompts):
            for name in rotated(list(plans), turn + number):
                answer(found[name].turns[-1], plans[name], prompt, turn + number)
    return found


def report_rounds(
    report: ScriptReport, systems: Mapping[str, Breakdown], chain: Chain, bandwidth: Bandwidth
) -> None:
    """Two tables for each system: its operations, and its passes and drafts at their bound."""
    for name, breakdown in systems.items():
        total, spread = breakdown.total, breakdown.per_token
        timed_token, to_token = 1e3 * total.seconds / total.tokens, 1e3 / total.tokens
        report.say(
            f"{name}: {shown_plan(breakdown.plan, chain)}. {spread.median:.3f} ms a token "
            f"({spread.min:.3f} to {spread.max:.3f}), {total.tokens / total.rounds:.2f} tokens a "
            f"round; with timers {100 * (total.seconds / total.plain_seconds - 1):+.1f} %."
        )
        rows = [
            [
                operation,
                f"{100 * total.operations[operation] / total.seconds:.1f} %",
                *breakdown.per_round(operation).cells(),
                f"{to_token * total.operations[operation]:.3f}",
                f"{timed_token - to_token * total.operations[operation]:.3f}",
            ]
            for operation in breakdown.operations()
        ]
        columns = ["operation", "share", "ms a round: min", "median", "max", "ms a token"]
        report.table(f"Operations of {name}", [*columns, "if it cost nothing"], rows)
        rows = [
            [
                member,
                f"{passes.count / total.rounds:.2f}",
                f"{passes.rows:.1f}",
                f"{1e3 * passes.seconds / passes.count:.3f}",
                f"{1e3 * passes.bound_seconds:.3f}",
                f"{timed_token - to_token * passes.beyond_bound:.3f}",
            ]
            for member, passes in breakdown.passes(chain, bandwidth).items()
        ]
        columns = ["member", "a round", "rows", "ms each", "bound", "ms a token at the bound"]
        report.table(f"Passes and drafts of {name}", columns, rows)


def main() -> None:
    parser = options(
        __doc__, "chain", "--device", "--dtype", "--turns", "--temperature",
        *SYSTEM_OPTIONS, *PROMPT_OPTIONS,
    )  # fmt: skip
    parser.add_argument("--trace", type=Path, help="write the last trace here, as .json.gz")
    arguments = parser.parse_args()
    report = begin(__file__, __doc__, arguments)
    chain = load(arguments)
    device = chain.engine.models.target.device
    plans = chosen_plans(chain, arguments.systems, arguments.members)
    prompts, tokens = prompts_of(arguments, chain), arguments.max_new_tokens
    if device.type != "cuda":
        bandwidth = measure_bandwidth(device)
        report.say(f"{bandwidth.shown()} {len(prompts)} prompts.")
        found = measure_rounds(
            chain, plans, prompts, tokens, arguments.turns, arguments.temperature
        )
        report_rounds(report, found, chain, bandwidth)
    if device.type == "cuda" or arguments.trace is not None:
        with tempfile.TemporaryDirectory() as folder:
            path = arguments.trace or Path(folder) / "rounds.trace.json.gz"
            measure_timeline(report, chain, plans, prompts[0], tokens, path)
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
