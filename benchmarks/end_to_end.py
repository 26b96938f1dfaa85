"""Seconds a token of whole answers, system by system; and of two checkouts in one run.

    python benchmarks/end_to_end.py CHAIN [--against FOLDER] [--systems target eagle2]
        [--prompts FILE] [--num-prompts-per-task 1] [--max-new-tokens 96] [--turns 5]
        [--hf-generate] [--dtype bfloat16] [--threads N] [--json FILE]

In a turn every prompt is answered by every system before the next prompt comes, and another system
begins each time. Speedups are ratios of medians over turns.

With `--against FOLDER`, another checkout of this project, every prompt is answered by the code of
both: each runs in a process of its own that keeps the chain loaded and sleeps while the other one
answers. A change is judged by such a run, not by two runs one after the other.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from answering import Answer, Answering, Here, worker
from passes import load_for
from record import console, header, print_header, write_record
from rich.console import Console
from rich.progress import track
from rich.table import Table
from systems import chosen_plans, read_prompts, shown_plan
from timing import Spread, measure_bandwidth, rotated

from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import sha256_of_object
from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain
from polybasic.deploy.bench.baselines import TransformersBaseline
from polybasic.deploy.rounds.sampling import Sampling

HF_GENERATE = "hf_generate"
HERE, AGAINST = "here", "against"
PAUSE_SECONDS = 0.05
"""Before another process answers: threads of OpenMP spin for a while after their last work."""


@dataclass(frozen=True)
class EndToEndSettings:
    """What is asked; greedy answers."""

    max_new_tokens: int = 96
    turns: int = 5


@dataclass(frozen=True)
class SystemTimes:
    """All answers of one system, turn by turn, in the order of the prompts."""

    turns: list[list[Answer]]

    @property
    def tokens(self) -> int:
        """Of one turn; all turns have the same answers, but for rounding."""
        return sum(len(answer.token_ids) for answer in self.turns[0])

    @property
    def per_token(self) -> Spread:
        """Milliseconds a token, prefill included."""
        return self._per_token(lambda answer: answer.seconds)

    @property
    def behind_prefill(self) -> Spread:
        """Milliseconds a token, without the prefill."""
        return self._per_token(lambda answer: answer.seconds - answer.prefill_seconds)

    @property
    def tokens_per_target_pass(self) -> float:
        passes = sum(answer.target_passes for answer in self.turns[0])
        return self.tokens / passes if passes else 1.0

    def speedup_over(self, other: "SystemTimes") -> Spread:
        """How many times as fast as another one: the ratio of medians, and those of the turns."""
        own, others = self.per_token, other.per_token
        turns = [b / a for a, b in zip(own.turns, others.turns, strict=True)]
        spread = Spread.of_turns(turns)
        return Spread(spread.min, others.median / own.median, spread.max, spread.turns)

    def num_identical(self, other: "SystemTimes") -> int:
        """Prompts whose answers are equal, token for token."""
        pairs = zip(self.turns[0], other.turns[0], strict=True)
        return sum(one.token_ids == another.token_ids for one, another in pairs)

    def to_json(self) -> dict[str, Any]:
        """As a record holds it."""
        return {
            "milliseconds_per_token": self.per_token.to_json(),
            "milliseconds_per_token_behind_prefill": self.behind_prefill.to_json(),
            "tokens": self.tokens,
            "tokens_per_target_pass": self.tokens_per_target_pass,
            "answers_sha256": sha256_of_object([answer.token_ids for answer in self.turns[0]]),
        }

    def _per_token(self, seconds: Any) -> Spread:
        return Spread.of_turns(
            [
                1e3 * sum(map(seconds, turn)) / sum(len(answer.token_ids) for answer in turn)
                for turn in self.turns
            ]
        )


Times = dict[str, dict[str, SystemTimes]]
"""Checkout -> system -> times; `HERE` is always there."""


def measure_end_to_end(
    answering: Mapping[str, Answering],
    plans: Mapping[str, Plan | None],
    prompts: Sequence[list[int]],
    settings: EndToEndSettings,
) -> Times:
    """Answer every prompt with every system of every checkout, in turns.

    Args:
        answering: checkout -> what answers; with more than one, each is a process that the
            others must not disturb.
        plans: system -> what runs, None where that is of no matter.
    """
    pairs = [(checkout, system) for system in plans for checkout in answering]
    turns: dict[tuple[str, str], list[list[Answer]]] = {pair: [] for pair in pairs}

    def answer(pair: tuple[str, str], prompt: list[int]) -> Answer:
        if len(answering) > 1:
            time.sleep(PAUSE_SECONDS)
        checkout, system = pair
        return answering[checkout].answer(prompt, plans[system], settings.max_new_tokens)

    for pair in pairs:
        answer(pair, prompts[0])  # warm-up, not counted
    shown = track(range(settings.turns), "end to end", console=Console(stderr=True))
    for turn in shown:
        for of_pair in turns.values():
            of_pair.append([])
        for number, prompt in enumerate(prompts):
            for pair in rotated(pairs, turn + number):
                turns[pair][-1].append(answer(pair, prompt))
    return {
        checkout: {system: SystemTimes(turns[checkout, system]) for system in plans}
        for checkout in answering
    }


class HfGenerate:
    """transformers' own loop, among the systems of this process.

    Args:
        chain: whose target it runs.
        others: answers where there is a plan.
    """

    def __init__(self, chain: Chain, others: Answering) -> None:
        target = chain.engine.models.target
        self._others = others
        self._baseline = TransformersBaseline(
            chain.target_folder, target.dtype, target.device, chain.stop_tokens
        )

    def answer(self, token_ids: list[int], plan: Plan | None, max_new_tokens: int) -> Answer:
        """See `Answering`."""
        if plan is not None:
            return self._others.answer(token_ids, plan, max_new_tokens)
        sampling = Sampling(temperature=0.0)
        tokens, seconds = self._baseline.generate(token_ids, max_new_tokens, sampling)
        return Answer(tokens, seconds, 0.0, len(tokens))


def to_json(times: Times, plans: Mapping[str, Plan | None]) -> dict[str, Any]:
    """As a record holds it."""
    content: dict[str, Any] = {
        "plans": {name: plan.model_dump(mode="json") for name, plan in plans.items() if plan},
        "checkouts": {
            checkout: {
                name: {**one.to_json(), **_speedup(systems, name)} for name, one in systems.items()
            }
            for checkout, systems in times.items()
        },
    }
    if AGAINST in times:
        content["here_over_against"] = {
            name: {
                "speedup": one.speedup_over(times[AGAINST][name]).to_json(),
                "identical_answers": one.num_identical(times[AGAINST][name]),
            }
            for name, one in times[HERE].items()
        }
    return content


def _speedup(systems: Mapping[str, SystemTimes], name: str) -> dict[str, Any]:
    if "target" not in systems:
        return {}
    return {"speedup_vs_target": systems[name].speedup_over(systems["target"]).to_json()}


def print_end_to_end(times: Times, plans: Mapping[str, Plan | None], chain: Chain) -> None:
    """A table of systems, and what the code of one checkout gains over the other's."""
    for name, plan in plans.items():
        print(f"{name}: {shown_plan(plan, chain) if plan else 'transformers generate()'}")
    table = Table("system", title="milliseconds a token", title_justify="left")
    columns = ["min", "median", "max", "without prefill", "speedup", "by turns", "tokens/pass"]
    if AGAINST in times:
        table.add_column("checkout")
    for column in columns:
        table.add_column(column, justify="right")
    for name in plans:
        for checkout, systems in times.items():
            table.add_row(name, *([checkout] if AGAINST in times else []), *_cells(systems, name))
    console().print(table)
    if AGAINST in times:
        num_prompts = len(times[HERE][next(iter(plans))].turns[0])
        for name, one in times[HERE].items():
            gained = one.speedup_over(times[AGAINST][name])
            print(
                f"{name}: here {gained.median:.3f}x as fast ({gained.min:.3f} to "
                f"{gained.max:.3f} by turns), "
                f"{one.num_identical(times[AGAINST][name])} of {num_prompts} answers identical"
            )


def _cells(systems: Mapping[str, SystemTimes], name: str) -> list[str]:
    one = systems[name]
    numbers = [one.per_token.min, one.per_token.median, one.per_token.max]
    cells = [f"{value:.3f}" for value in (*numbers, one.behind_prefill.median)]
    if "target" in systems:
        speedup = one.speedup_over(systems["target"])
        cells += [f"{speedup.median:.2f}x", f"{speedup.min:.2f} to {speedup.max:.2f}"]
    else:
        cells += ["", ""]
    return [*cells, f"{one.tokens_per_target_pass:.2f}"]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chain", type=Path)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--systems", nargs="+", default=(), help="default: all that there are")
    parser.add_argument("--members", nargs="+", default=(), metavar="A,B,C", help="further plans")
    parser.add_argument("--hf-generate", action="store_true", help="transformers' loop, too")
    parser.add_argument("--prompts", type=Path, help="a question file; default: embedded prompts")
    parser.add_argument("--num-prompts-per-task", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--json", type=Path, help="write the record here")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parsed()
    if arguments.hf_generate and arguments.against:
        raise UserError(
            "both", "--hf-generate --against", "compare with transformers in a run alone"
        )
    chain = load_for(arguments.chain, arguments.dtype, arguments.threads, 0)
    device = chain.engine.models.target.device
    places = {
        arguments.chain: "CHAIN",
        arguments.against: "FOLDER",
        arguments.prompts: "PROMPTS",
        arguments.json: "FILE",
    }
    head = header("end_to_end", device, places)
    print_header(head)
    settings = EndToEndSettings(arguments.max_new_tokens, arguments.turns)
    plans: dict[str, Plan | None] = dict(chosen_plans(chain, arguments.systems, arguments.members))
    num_per_task = arguments.num_prompts_per_task
    prompts = read_prompts(chain, arguments.prompts, num_per_task, settings.max_new_tokens)
    bandwidth = measure_bandwidth(device)
    print(f"{bandwidth.shown()}; {len(prompts)} prompts, {arguments.dtype}")
    commits: dict[str, str | None] = {}
    with ExitStack() as stack:
        answering: dict[str, Answering] = {HERE: Here(chain)}
        if arguments.hf_generate:
            plans[HF_GENERATE] = None
            answering = {HERE: HfGenerate(chain, answering[HERE])}
        if arguments.against is not None:
            workers = {
                name: stack.enter_context(
                    worker(code, chain.folder, arguments.dtype, arguments.threads)
                )
                for name, code in ((HERE, _own_checkout()), (AGAINST, arguments.against))
            }
            commits = {name: one.wait_until_loaded() for name, one in workers.items()}
            answering = dict(workers)
        times = measure_end_to_end(answering, plans, prompts, settings)
    print_end_to_end(times, plans, chain)
    content = {
        "settings": {**vars(settings), "num_prompts": len(prompts), "dtype": arguments.dtype},
        "bandwidth": bandwidth.to_json(),
        "commits": commits,
        **to_json(times, plans),
    }
    write_record(arguments.json, head, content)


def _own_checkout() -> Path:
    return Path(__file__).resolve().parents[1]


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
