"""Is the planner right? Predicted against measured time, and its choice against a sweep.

    python benchmarks/planner.py CHAIN [--prompts FILE] [--sweep] [--record FILE]

Plans on calibration prompts, then runs the best plan of every set of members on other prompts, in
turns; at a temperature above 0, the best plan of every rule, too; and where the best plan has a
least probability of candidates, the best one with trees of one size. With `--sweep` every plan of a
small grid is run too, the planner chooses from the same grid, and the fastest plans of the sweep
meet the choice once more in turns of their own: the best of many noisy figures is too good to be
true. Seconds are those after the prefill. A machine that others use drifts between prediction and
measurement, all plans alike: the speedups over the target alone are free of that.
"""

import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from command import PROMPT_OPTIONS, ScriptReport, begin, load, options, run
from measuring import progress
from systems import plan_settings, prompts_of, shown_plan

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain
from polybasic.deploy.planner.measuring.measurements import Measurements
from polybasic.deploy.planner.run import plan_loaded
from polybasic.deploy.planner.search import candidate_plans, choose_plan
from polybasic.deploy.planner.settings import PlanGrid, PlanSettings
from polybasic.deploy.planner.simulation import simulate
from polybasic.deploy.runtime.rounds.sampling import Sampling

SWEEP_GRID = PlanGrid(
    depths=(4, 7), top_ks=(4,), rows=(8, 12, 20), flush_lengths=(6, 12, 20), ngram_matches=(),
    least_probabilities=(),
)  # fmt: skip
NUM_FINALISTS = 5


def seconds_per_token(
    chain: Chain,
    plans: Sequence[Plan],
    prompts: Sequence[list[int]],
    settings: PlanSettings,
    turns: int,
) -> list[float]:
    """Medians over turns of total seconds after the prefill over total tokens.

    In a turn every prompt is answered by every plan before the next prompt comes, in an order of
    its own.
    """
    shuffled = random.Random(0)
    sampling = Sampling(settings.temperature, seed=settings.seed)
    found: list[list[float]] = [[] for _ in plans]
    for _ in progress("turns", turns):
        seconds, tokens = [0.0] * len(plans), [0] * len(plans)
        for prompt in prompts:
            order = list(range(len(plans)))
            shuffled.shuffle(order)
            for place in order:
                plan = plans[place]
                answer = chain.stream_ids(prompt, settings.max_new_tokens, sampling, plan)
                for _ in answer:
                    pass
                of_answer = answer.statistics
                seconds[place] += of_answer.seconds - of_answer.prefill_seconds
                tokens[place] += of_answer.num_later
        for place, times in enumerate(found):
            times.append(seconds[place] / tokens[place])
    return [statistics.median(times) for times in found]


@dataclass(frozen=True)
class Compared:
    """A plan's seconds a token after the prefill, as predicted and as measured."""

    plan: Plan
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """By which share the prediction is more than the measurement."""
        return self.predicted / self.measured - 1


def compare(
    chain: Chain, prompts: Sequence[list[int]], settings: PlanSettings, turns: int
) -> tuple[list[Compared], Measurements]:
    """The best plan of every set of members and of every rule, also with trees of one size, and
    what the planner had measured for plans of the chosen rule."""
    planning = plan_loaded(chain, settings, print_to_stderr)
    choice = planning.choice
    candidates = [
        choice.best,
        *(candidate for candidate in choice.by_members if candidate is not choice.best),
    ]
    candidates += choice.other_rules
    of_one_size = choose_plan(
        planning.measurements, settings.grid.model_copy(update={"least_probabilities": ()})
    )
    candidates += [candidate for candidate in of_one_size.by_members if candidate not in candidates]
    plans = [candidate.plan for candidate in candidates]
    measured = seconds_per_token(chain, plans, prompts, settings, turns)
    found = [
        Compared(candidate.plan, candidate.seconds_per_token, seconds)
        for candidate, seconds in zip(candidates, measured, strict=True)
    ]
    return found, next(group for group in planning.measurements if choice.rule in group.rules)


def runs_alone(plan: Plan) -> bool:
    """Whether nothing drafts for the target."""
    return len(plan.members) == 1 and plan.ngram is None


def shown(plan: Plan, chain: Chain) -> str:
    """A plan with its rule, for people."""
    return f"{shown_plan(plan, chain)}; rule {plan.rule}"


def sweep(
    chain: Chain, prompts: Sequence[list[int]], settings: PlanSettings, measurements: Measurements,
    turns: int,
) -> tuple[list[Compared], Compared, Compared]:  # fmt: skip
    """Every plan of the small grid; the planner's choice and the best, in turns of their own.

    Raises:
        UserError: a chain without a drafter.
    """
    plans = [plan for plan in candidate_plans(measurements, SWEEP_GRID) if len(plan.members) > 1]
    plans = [plan for plan in plans if plan.members[-1] in measurements.drafters]
    if not plans:
        raise UserError("nothing to sweep", f"{chain.folder}", "name a chain with a draft head")
    choice = choose_plan([measurements], SWEEP_GRID).best.plan

    def compared(plans: Sequence[Plan], turns: int) -> list[Compared]:
        measured = seconds_per_token(chain, plans, prompts, settings, turns)
        return [
            Compared(plan, simulate(plan, measurements).seconds_per_token, seconds)
            for plan, seconds in zip(plans, measured, strict=True)
        ]

    once = compared(plans, 1)
    fastest = sorted(once, key=lambda result: result.measured)[:NUM_FINALISTS]
    final = compared([choice, *(result.plan for result in fastest if result.plan != choice)], turns)
    return once, final[0], min(final, key=lambda result: result.measured)


def print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def report_compared(report: ScriptReport, compared: Sequence[Compared], chain: Chain) -> None:
    """A row for each plan."""
    alone = next(result for result in compared if runs_alone(result.plan))
    columns = ["plan", "predicted", "measured", "off by", "predicted speedup", "measured speedup"]
    rows = [
        [
            *_cells(result, chain),
            f"{100 * result.error:+.1f} %",
            f"{alone.predicted / result.predicted:.2f}x",
            f"{alone.measured / result.measured:.2f}x",
        ]
        for result in compared
    ]
    report.table("Milliseconds a token after the prefill", columns, rows)


def report_sweep(
    report: ScriptReport, plans: Sequence[Compared], choice: Compared, best: Compared, chain: Chain
) -> None:
    """What the choice lacks, how far predictions are off, and all plans."""
    errors = [abs(result.error) for result in plans]
    report.say(
        f"Sweep of {len(plans)} plans: the choice ({shown(choice.plan, chain)}) is "
        f"{100 * (choice.measured / best.measured - 1):.1f} % behind the best "
        f"({shown(best.plan, chain)}); predictions are off by "
        f"{100 * statistics.median(errors):.1f} % in the median, at most {100 * max(errors):.1f} %."
    )
    rows = [_cells(result, chain) for result in plans]
    report.table("All plans, milliseconds a token", ["plan", "predicted", "measured"], rows)


def _cells(result: Compared, chain: Chain) -> list[str]:
    return [
        shown(result.plan, chain),
        f"{1e3 * result.predicted:.3f}",
        f"{1e3 * result.measured:.3f}",
    ]


def main() -> None:
    parser = options(
        __doc__, "chain", "--device", "--dtype", "--turns", "--temperature", *PROMPT_OPTIONS,
        turns=3, num_prompts_per_task=4,
    )  # fmt: skip
    parser.add_argument("--sweep", action="store_true", help="run every plan of a small grid, too")
    arguments = parser.parse_args()
    report = begin(__file__, __doc__, arguments)
    chain, turns = load(arguments), arguments.turns
    with plan_settings(arguments, dtype=arguments.dtype) as settings:
        prompts = prompts_of(arguments, chain)
        compared, measurements = compare(chain, prompts, settings, turns)
        report_compared(report, compared, chain)
        if arguments.sweep:
            report_sweep(report, *sweep(chain, prompts, settings, measurements, turns), chain)
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
