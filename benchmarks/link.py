"""Tokens a second with the target behind a link: predicted and measured, by round trip.

    python benchmarks/link.py CHAIN [--round-trips 0 5 20 80] [--megabits 100] [--prompts FILE]
        [--max-new-tokens 64] [--turns 3] [--temperature 0] [--record FILE]

The target runs in a process of its own (`polybasic serve-target`), the other members here, with a
proxy between them that delays what they send. Either side has a core of its own. Costs are measured
once, with all members here; for each link a plan is chosen and predicted from them, at the round
trip that is measured through the proxy. All systems take turns, prompt by prompt, and every answer
is compared with that of the chain on one machine. Seconds are those after the prefill.
"""

import argparse
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from command import PROMPT_OPTIONS, ScriptReport, begin, load, options, positive, run
from delaying_proxy import delaying_proxy
from measuring import Spread, rotated
from systems import plan_settings, prompts_of, shown_plan

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.planner.measuring.measurements import Measurements
from polybasic.deploy.planner.measuring.message_costs import message_seconds
from polybasic.deploy.planner.run import plan_loaded
from polybasic.deploy.planner.search import choose_plan
from polybasic.deploy.planner.settings import PlanGrid
from polybasic.deploy.planner.simulation import simulate
from polybasic.deploy.runtime.remote.link import Link
from polybasic.deploy.runtime.rounds.sampling import Sampling

LISTENS = re.compile(r"listening at (\S+):(\d+)")


@dataclass
class LinkedSystem:
    """A plan over a link, and what it took.

    Attributes:
        predicted: seconds a token, and tokens a pass of the target.
        turns: measured seconds a token of each turn.
        passes: of the target.
        num_identical: answers that equal those of the chain on one machine, of `num_answers`.
    """

    plan: Plan
    is_optimistic: bool
    predicted: tuple[float, float]
    turns: list[float] = field(default_factory=list)
    num_tokens: int = 0
    passes: int = 0
    num_answers: int = 0
    num_identical: int = 0

    @property
    def per_second(self) -> Spread:
        """Measured tokens a second."""
        return Spread.of_turns([1 / seconds for seconds in self.turns])


@contextmanager
def far_side(
    arguments: argparse.Namespace, key: Path, cpu: int | None, sequences: int = 2
) -> Iterator[int]:
    """The target of a chain in a process of its own: the port that it listens at.

    Args:
        cpu: that it runs on; None leaves that to the system.
        sequences: that it verifies at a time.

    Raises:
        UserError: it cannot be served; the process says why.
    """
    words = ["-m", "polybasic.recipes.cli.main", "serve-target", str(arguments.chain)]
    words += ["--key-file", str(key), "--listen", "127.0.0.1:0", "--dtype", arguments.dtype]
    threads = str(arguments.threads or 1)
    with subprocess.Popen(
        [sys.executable, *words, "--max-num-seqs", str(sequences)],
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": threads},
        text=True,
    ) as process:
        assert process.stderr is not None
        if cpu is not None:
            os.sched_setaffinity(process.pid, {cpu})
        try:
            for line in process.stderr:
                if found := LISTENS.search(line):
                    yield int(found[2])
                    return
                print(line, end="", file=sys.stderr)
            raise UserError("no far side", f"{arguments.chain}", "see its message above")
        finally:
            process.terminate()
            process.communicate()


def measured_here(arguments: argparse.Namespace, chain: Chain) -> Measurements:
    """What plans over links are chosen from: costs and agreement of the members on this machine."""
    with plan_settings(arguments, max_seconds=arguments.max_seconds, link="0ms") as settings:
        planning = plan_loaded(chain, settings, lambda line: print(line, file=sys.stderr))
    (found,) = planning.measurements
    return found


def systems_over(measurements: Measurements, packed: Plan) -> dict[str, LinkedSystem]:
    """Token by token, the packed plan, and the best for this link; without and with drafting on."""
    found: dict[str, LinkedSystem] = {}
    for is_optimistic in (False, True):
        over = replace(measurements, is_optimistic=is_optimistic)
        best = choose_plan([over], PlanGrid().over_link).best
        how = "drafts on" if is_optimistic else "waits"
        plans = {f"packed, {how}": packed, f"chosen, {how}": best.plan}
        if not is_optimistic:
            plans = {"token by token": Plan(members=packed.members[:1], tree=packed.tree)} | plans
        for name, plan in plans.items():
            predicted = simulate(plan, over)
            gained = predicted.tokens_per_pass[over.target]
            found[name] = LinkedSystem(plan, is_optimistic, (predicted.seconds_per_token, gained))
    return found


def measure(
    near: Chain,
    systems: Mapping[str, LinkedSystem],
    prompts: Sequence[list[int]],
    expected: Sequence[list[int]],
    arguments: argparse.Namespace,
) -> None:
    """Let all systems answer all prompts in turns.

    Args:
        near: its target is behind the link.
        expected: the answer to each prompt.
    """
    remote = near.engine.models.remote
    assert remote is not None, "a target elsewhere"
    sampling = sampling_of(arguments)
    for turn in range(arguments.turns):
        seconds, tokens = dict.fromkeys(systems, 0.0), dict.fromkeys(systems, 0)
        for number, (prompt, answer) in enumerate(zip(prompts, expected, strict=True)):
            for name in rotated(list(systems), turn + number):
                system = systems[name]
                remote.optimistic = system.is_optimistic
                stream = near.stream_ids(prompt, arguments.max_new_tokens, sampling, system.plan)
                found = [token for batch in stream for token in batch]
                took = stream.statistics
                seconds[name] += took.seconds - took.prefill_seconds
                tokens[name] += len(found)
                system.passes += next(iter(took.forward_passes.values()))
                system.num_tokens += len(found)
                system.num_answers += 1
                system.num_identical += found == answer
        for name, system in systems.items():
            system.turns.append(seconds[name] / tokens[name])


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    """As the shared options say it."""
    return Sampling(arguments.temperature, seed=0)


def report_link(
    report: ScriptReport,
    milliseconds: float,
    link: Link,
    systems: Mapping[str, LinkedSystem],
    chain: Chain,
) -> None:
    """A table of a link's systems, and their plans."""
    alone = systems["token by token"].per_second.median
    columns = ["predicted", "measured", "by turns", "off by", "speedup"]
    columns += ["tokens/pass, predicted", "measured", "as on one machine"]
    rows = []
    for name, system in systems.items():
        measured, (predicted, gained) = system.per_second, system.predicted
        cells = [
            f"{1 / predicted:.1f}",
            f"{measured.median:.1f}",
            f"{measured.min:.1f} to {measured.max:.1f}",
            f"{100 * (1 / predicted / measured.median - 1):+.0f} %",
            f"{measured.median / alone:.2f}x",
            f"{gained:.2f}",
            f"{system.num_tokens / system.passes:.2f}",
            f"{system.num_identical}/{system.num_answers}",
        ]
        rows.append([name, *cells])
    title = f"Round trip of {milliseconds:g} ms ({link} measured through the proxy), tokens/s"
    report.table(title, ["system", *columns], rows)
    shown = {name: shown_plan(system.plan, chain) for name, system in systems.items()}
    report.say("\n".join(f"- {name}: {plan}" for name, plan in shown.items()))


def main() -> None:
    parser = options(
        __doc__, "chain", "--dtype", "--turns", "--temperature", *PROMPT_OPTIONS,
        turns=3, max_new_tokens=64,
    )  # fmt: skip
    parser.add_argument(
        "--round-trips", nargs="+", type=float, default=[0.0, 5.0, 20.0, 80.0], metavar="MS"
    )
    parser.add_argument("--megabits", type=float, default=float("inf"), help="a second, at most")
    parser.add_argument("--max-seconds", type=positive, default=90, help="of measuring costs")
    parser.set_defaults(threads=1)
    arguments = parser.parse_args()
    report = begin(__file__, __doc__, arguments)
    near_cpu, *others = sorted(os.sched_getaffinity(0))
    far_cpu = others[0] if others and arguments.threads == 1 else None
    if far_cpu is not None:
        os.sched_setaffinity(0, {near_cpu})
    whole = load(arguments, share_caches=False)
    measurements = measured_here(arguments, whole)
    prompts = prompts_of(arguments, whole)
    packed = whole.manifest.plan.model_copy(update={"rule": "coupled"})
    sampling = sampling_of(arguments)
    expected = [
        [token for batch in whole.stream_ids(prompt, arguments.max_new_tokens, sampling, packed)
         for token in batch]
        for prompt in prompts
    ]  # fmt: skip
    cores = "cores shared" if far_cpu is None else "one core a side"
    report.say(f"{len(prompts)} prompts, {arguments.turns} turns, {cores}.")
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.write_text(secrets.token_hex(32))
        with far_side(arguments, key, far_cpu) as port:
            for milliseconds in arguments.round_trips:
                rate = arguments.megabits / 8e-6
                with delaying_proxy("127.0.0.1", port, 1e-3 * milliseconds, rate) as between:
                    near = load_chain(
                        arguments.chain, digests=False, device="cpu", dtype=arguments.dtype,
                        remote=f"127.0.0.1:{between}", key_file=str(key),
                    )  # fmt: skip
                    assert near.engine.models.remote is not None
                    link = near.engine.models.remote.link
                    costs = measurements.passes[measurements.target]
                    messages = message_seconds(whole, prompts[0], costs, link)
                    over = replace(measurements, link=link, message_seconds=messages)
                    systems = systems_over(over, packed)
                    measure(near, systems, prompts, expected, arguments)
                    near.engine.models.remote.close()
                report_link(report, milliseconds, link, systems, whole)
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
