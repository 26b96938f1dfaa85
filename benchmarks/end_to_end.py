"""Milliseconds a token of whole answers, system by system; and of two checkouts in one run.

    python benchmarks/end_to_end.py CHAIN [--device cpu] [--against FOLDER] [--hf-generate]
        [--systems target eagle2] [--prompts FILE] [--max-new-tokens 96] [--turns 5] [--record FILE]

In a turn every prompt is answered by every system before the next prompt comes, and another system
begins each time. Speedups are ratios of medians over turns. Where the first round is left out, so
is the prefill.

With `--against FOLDER`, another checkout of this project, every prompt is answered by the code of
both: each runs in a process of its own that keeps the chain loaded and sleeps while the other one
answers. A change is judged by such a run, not by two runs one after the other.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from answering import Answering, Here, HfGenerate, MeasuredAnswer, checkout, commit_of
from command import (
    PROMPT_OPTIONS,
    SYSTEM_OPTIONS,
    ScriptReport,
    begin,
    device_of,
    load,
    options,
    run,
)
from measuring import Spread, measure_bandwidth, progress, rotated
from systems import chosen_plans, prompts_of, shown_plan

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain
from polybasic.deploy.runtime.rounds.sampling import Sampling

HF_GENERATE = "hf_generate"
HERE, AGAINST = "here", "against"
WARM_UP_TOKENS = 64
"""Of a prompt, at most."""
PAUSE_SECONDS = 0.05
"""Before another process answers: threads of OpenMP spin for a while after their last work."""


@dataclass(frozen=True)
class SystemTimes:
    """All answers of one system, turn by turn, in the order of the prompts."""

    turns: list[list[MeasuredAnswer]]

    @property
    def per_token(self) -> Spread:
        """Milliseconds a token, prefill included."""
        return self._spread(lambda answer: (answer.seconds, len(answer.token_ids)))

    @property
    def after_first(self) -> Spread:
        """Milliseconds a token after the first round, and after the prefill with it; infinite
        where one round gave all tokens."""
        return self._spread(
            lambda answer: (
                answer.seconds - answer.first_seconds,
                len(answer.token_ids) - answer.first_tokens,
            )
        )

    @property
    def tokens_per_target_pass(self) -> float:
        tokens, passes = (
            sum(values)
            for values in zip(
                *((len(answer.token_ids), answer.target_passes) for answer in self.turns[0]),
                strict=True,
            )
        )
        return tokens / passes if passes else 1.0

    def num_identical(self, other: "SystemTimes") -> int:
        """Prompts whose answers are equal, token for token, among those that both answered."""
        pairs = zip(self.turns[0], other.turns[0], strict=False)
        return sum(answer.token_ids == another.token_ids for answer, another in pairs)

    def _spread(self, read: Callable[[MeasuredAnswer], tuple[float, int]]) -> Spread:
        values = []
        for turn in self.turns:
            seconds, tokens = map(sum, zip(*map(read, turn), strict=True))
            values.append(1e3 * seconds / tokens if tokens else float("inf"))
        return Spread.of_turns(values)


def speedup(over: Spread, under: Spread) -> Spread:
    """How many times as fast the second is: the ratio of medians, and those of the turns."""
    turns = [a / b for a, b in zip(over.turns, under.turns, strict=False)]
    return Spread(min(turns), over.median / under.median, max(turns), tuple(turns))


Times = dict[str, dict[str, SystemTimes]]
"""Checkout -> system -> times; `HERE` is always there."""


def measure_end_to_end(
    answering: Mapping[str, Mapping[str, Answering]],
    plans: Mapping[str, Plan],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    turns: int,
    temperature: float = 0.0,
    is_over: Callable[[], bool] = lambda: False,
) -> Times:
    """Answer every prompt with every system of every checkout, in turns.

    Args:
        answering: checkout -> system -> what answers; with more than one checkout, each is a
            process that the others must not disturb.
        plans: system -> what runs.
        is_over: asked before each prompt; a turn that it ends counts as far as it came where it is
            the first, and else not at all. Without any answer nothing is returned.
    """
    pairs = [(checkout, system) for system in plans for checkout in answering]
    answers: dict[tuple[str, str], list[list[MeasuredAnswer]]] = {pair: [] for pair in pairs}

    def answer(pair: tuple[str, str], prompt: list[int], seed: int) -> MeasuredAnswer:
        if len(answering) > 1:
            time.sleep(PAUSE_SECONDS)
        checkout, system = pair
        sampling = Sampling(temperature=temperature, seed=seed)
        return answering[checkout][system].answer(prompt, plans[system], max_new_tokens, sampling)

    for pair in pairs:
        # captures and warms up, whatever the context, and is not counted
        answer(pair, prompts[0][-WARM_UP_TOKENS:], 0)
    for turn in progress("end to end", turns):
        begun: dict[tuple[str, str], list[MeasuredAnswer]] = {pair: [] for pair in pairs}
        for number, prompt in enumerate(prompts):
            if is_over():
                break
            for pair in rotated(pairs, turn + number):
                begun[pair].append(answer(pair, prompt, 1 + turn))
        is_whole = all(len(found) == len(prompts) for found in begun.values())
        for pair, found in begun.items():
            if is_whole or (turn == 0 and found):
                answers[pair].append(found)
        if not is_whole:
            break
    found_all = all(answers.values())
    return {
        checkout: {system: SystemTimes(answers[checkout, system]) for system in plans}
        for checkout in (answering if found_all else ())
    }


def report_end_to_end(report: ScriptReport, times: Times, shown: Mapping[str, str]) -> None:
    """A table of systems, and what the code of one checkout gains over the other's.

    Args:
        shown: each system's plan, for people.
    """
    for name, plan in shown.items():
        report.say(f"{name}: {plan}")
    has_two = AGAINST in times
    columns = ["min", "median", "max", "without first round", "speedup", "by turns"]
    columns += ["without first round", "as the target", "tokens/pass"]
    rows = [
        [f"{name}, {checkout}" if has_two else name, *_cells(systems, name)]
        for name in shown
        for checkout, systems in times.items()
    ]
    report.table("Milliseconds a token", ["system", *columns], rows)
    if not has_two:
        return
    for name, system in times[HERE].items():
        other = times[AGAINST][name]
        gained = speedup(other.per_token, system.per_token)
        report.say(
            f"{name}: here {gained.median:.3f}x as fast ({gained.min:.3f} to {gained.max:.3f} by "
            f"turns), {system.num_identical(other)} of {len(system.turns[0])} answers identical"
        )


def _cells(systems: Mapping[str, SystemTimes], name: str) -> list[str]:
    system, alone = systems[name], systems.get("target")
    compared = [""] * 4
    if alone is not None:
        gained = speedup(alone.per_token, system.per_token)
        compared = [
            f"{gained.median:.2f}x",
            f"{gained.min:.2f} to {gained.max:.2f}",
            f"{speedup(alone.after_first, system.after_first).median:.2f}x",
            f"{system.num_identical(alone)}/{len(system.turns[0])}",
        ]
    times = [*system.per_token.cells(), f"{system.after_first.median:.3f}"]
    return [*times, *compared, f"{system.tokens_per_target_pass:.2f}"]


def shown_plans(plans: Mapping[str, Plan], chain: Chain) -> dict[str, str]:
    """Each system's plan for people."""
    loop = "transformers generate()"
    return {
        name: loop if name == HF_GENERATE else shown_plan(plan, chain)
        for name, plan in plans.items()
    }


def main() -> None:
    parser = options(
        __doc__, "chain", "--device", "--dtype", "--turns", "--temperature",
        *SYSTEM_OPTIONS, *PROMPT_OPTIONS,
    )  # fmt: skip
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--hf-generate", action="store_true", help="transformers' loop, too")
    arguments = parser.parse_args()
    if arguments.hf_generate and arguments.against:
        raise UserError(
            "both", "--hf-generate --against", "compare with transformers in a run alone"
        )
    report = begin(__file__, __doc__, arguments)
    chain = load(arguments)
    plans = chosen_plans(chain, arguments.systems, arguments.members)
    prompts = prompts_of(arguments, chain)
    bandwidth = measure_bandwidth(chain.engine.models.target.device)
    report.say(f"{bandwidth.shown()} {len(prompts)} prompts.")
    with ExitStack() as stack:
        answering: dict[str, dict[str, Answering]] = {HERE: dict.fromkeys(plans, Here(chain))}
        if arguments.hf_generate:
            plans[HF_GENERATE] = chain.plan_of([chain.manifest.members[0].name])
            answering[HERE][HF_GENERATE] = HfGenerate.of(chain)
        if arguments.against is not None:
            codes = {HERE: Path(__file__).resolve().parents[1], AGAINST: arguments.against}
            device = str(device_of(arguments))
            workers = {
                name: stack.enter_context(
                    checkout(code, chain.folder, arguments.dtype, device, arguments.threads)
                )
                for name, code in codes.items()
            }
            for name, worker in workers.items():
                worker.wait_until_loaded()
                report.say(f"{name}: commit {commit_of(codes[name])}")
            answering = {name: dict.fromkeys(plans, worker) for name, worker in workers.items()}
        times = measure_end_to_end(
            answering,
            plans,
            prompts,
            arguments.max_new_tokens,
            arguments.turns,
            arguments.temperature,
        )
    report_end_to_end(report, times, shown_plans(plans, chain))
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
