"""Is the planner right? Predicted against measured time, and its choice against a sweep.

    python benchmarks/planner.py CHAIN [--prompts FILE] [--sweep] [--json FILE]

Plans on calibration prompts, then runs the best plan of every set of members on other prompts, in
turns. With `--sweep` every plan of a small grid is run too, the planner chooses from the same grid,
and the fastest plans of the sweep meet the choice once more in turns of their own: the best of many
noisy figures is too good to be true. Seconds are those behind the prefill. A machine that others
use drifts between prediction and measurement, all plans alike: the speedups over the target alone
are free of that.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import header, write_record
from rich.console import Console
from rich.progress import track
from rich.table import Table
from systems import read_prompts, shown_plan

from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.planner.run import plan_loaded
from polybasic.deploy.planner.search import candidate_plans, choose_plan
from polybasic.deploy.planner.simulation import simulate
from polybasic.deploy.rounds.sampling import Sampling
from polybasic.deploy.settings import PlanGrid, PlanSettings
from polybasic.recipes.pipeline.prompts import plan_prompts

SWEEP_GRID = PlanGrid(
    depths=(4, 7), top_ks=(4,), rows=(8, 12, 20), flush_lengths=(6, 12, 20), ngram_matches=()
)
NUM_FINALISTS = 5


def seconds_per_token(
    chain: Chain,
    plans: Sequence[Plan],
    prompts: Sequence[list[int]],
    settings: PlanSettings,
    turns: int,
) -> list[float]:
    """Medians over turns of total seconds behind the prefill over total tokens.

    In a turn every prompt is answered by every plan before the next prompt comes, in an order of
    its own.
    """
    shuffled = random.Random(0)
    sampling = Sampling(settings.temperature, seed=settings.seed)
    found: list[list[float]] = [[] for _ in plans]
    for _ in track(range(turns), description="turns", console=Console(stderr=True)):
        seconds, tokens = [0.0] * len(plans), [0] * len(plans)
        for prompt in prompts:
            order = list(range(len(plans)))
            shuffled.shuffle(order)
            for place in order:
                for _ in chain.stream_ids(prompt, settings.max_new_tokens, sampling, plans[place]):
                    pass
                statistics_of_run = chain.last_statistics
                assert statistics_of_run is not None
                seconds[place] += statistics_of_run.seconds - statistics_of_run.prefill_seconds
                tokens[place] += statistics_of_run.num_tokens
        for place, one in enumerate(found):
            one.append(seconds[place] / tokens[place])
    return [statistics.median(one) for one in found]


def compare(
    chain: Chain, prompts: Sequence[list[int]], settings: PlanSettings, turns: int
) -> tuple[list[dict[str, Any]], Any]:
    """The best plan of every set of members: predicted and measured."""
    planning = plan_loaded(chain, settings, print_to_stderr)
    candidates = [planning.measured, *planning.measured.others]
    plans = [one.plan for one in candidates]
    measured = seconds_per_token(chain, plans, prompts, settings, turns)
    rows = [
        {
            "plan": one.plan.model_dump(mode="json"),
            "shown": shown_plan(one.plan, chain),
            "predicted_seconds_per_token": one.seconds_per_token,
            "measured_seconds_per_token": seconds,
            "error": one.seconds_per_token / seconds - 1,
        }
        for one, seconds in zip(candidates, measured, strict=True)
    ]
    (alone,) = (row for row, plan in zip(rows, plans, strict=True) if runs_alone(plan))
    for row in rows:
        for way in ("predicted", "measured"):
            key = f"{way}_seconds_per_token"
            row[f"{way}_speedup"] = alone[key] / row[key]
    return rows, planning.measurements


def runs_alone(plan: Plan) -> bool:
    """Whether nothing drafts for the target."""
    return len(plan.members) == 1 and plan.ngram is None


def sweep(
    chain: Chain,
    prompts: Sequence[list[int]],
    settings: PlanSettings,
    measurements: Any,
    turns: int,
) -> dict[str, Any]:
    """Every plan of the small grid, and how far the planner's choice from it is from the best."""
    plans = [plan for plan in candidate_plans(measurements, SWEEP_GRID) if len(plan.members) > 1]
    plans = [plan for plan in plans if plan.members[-1] in measurements.drafters]
    choice = choose_plan(measurements, SWEEP_GRID).best.plan
    first = seconds_per_token(chain, plans, prompts, settings, 1)
    ranked = [plan for _, plan in sorted(zip(first, plans, strict=True), key=lambda one: one[0])]
    finalists = [choice, *(plan for plan in ranked[:NUM_FINALISTS] if plan != choice)]
    final = seconds_per_token(chain, finalists, prompts, settings, turns)
    predicted = [simulate(plan, measurements).seconds_per_token for plan in plans]
    errors = [abs(one / other - 1) for one, other in zip(predicted, first, strict=True)]
    return {
        "num_plans": len(plans),
        "choice": shown_plan(choice, chain),
        "best": shown_plan(finalists[final.index(min(final))], chain),
        "choice_seconds_per_token": final[0],
        "best_seconds_per_token": min(final),
        "choice_behind_best": final[0] / min(final) - 1,
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "plans": [
            {"shown": shown_plan(plan, chain), "predicted": one, "measured": other}
            for plan, one, other in zip(plans, predicted, first, strict=True)
        ],
    }


def print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chain", type=Path)
    parser.add_argument("--prompts", type=Path, help="a question file; default: embedded prompts")
    parser.add_argument("--num-prompts-per-task", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    chain = load_chain(arguments.chain, dtype=arguments.dtype)
    with tempfile.TemporaryDirectory() as folder:
        calibration = Path(folder) / "calibration.jsonl"
        plan_prompts(PlanSettings(), seed=0).write(calibration)
        settings = PlanSettings(
            prompts=str(calibration),
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            dtype=arguments.dtype,
        )
        prompts = read_prompts(
            chain, arguments.prompts, arguments.num_prompts_per_task, arguments.max_new_tokens
        )
        rows, measurements = compare(chain, prompts, settings, arguments.turns)
        swept = (
            sweep(chain, prompts, settings, measurements, arguments.turns)
            if arguments.sweep
            else None
        )
    print_rows(rows)
    if swept is not None:
        print(
            f"sweep of {swept['num_plans']} plans: the choice ({swept['choice']}) is "
            f"{100 * swept['choice_behind_best']:.1f} % behind the best ({swept['best']}); "
            f"predicted times are off by {100 * swept['median_error']:.0f} % in the median, at "
            f"most {100 * swept['largest_error']:.0f} %"
        )
    content = {
        "num_prompts": len(prompts),
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "plans": rows,
        "sweep": swept,
    }
    places = {arguments.chain: "CHAIN", arguments.prompts: "PROMPTS", arguments.json: "FILE"}
    head = header("planner", chain.engine.models.target.device, places)
    write_record(arguments.json, head, content)


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(
        "plan",
        title="milliseconds a token behind the prefill, and speedup over the target",
        title_justify="left",
    )
    for name in ("predicted", "measured", "off by", "predicted", "measured"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["shown"],
            f"{1e3 * row['predicted_seconds_per_token']:.3f}",
            f"{1e3 * row['measured_seconds_per_token']:.3f}",
            f"{100 * row['error']:+.0f} %",
            f"{row['predicted_speedup']:.2f}x",
            f"{row['measured_speedup']:.2f}x",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
