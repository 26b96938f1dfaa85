"""Tokens a round and speedup under each rule: noise shared by all models, or independent draws.

    python benchmarks/rules.py CHAIN [--temperatures 0 1] [--prompts FILE] [--max-new-tokens 96]
        [--turns 5] [--systems target eagle2 polybasic_full] [--record FILE]

Every system runs the shapes of its plan, chosen for whatever temperature, under every rule; under
`coupled` also with drafts that do not see the noise, which are the drafting model's most probable
tokens, as under the other rules. All take turns in one run. The target alone is `coupled`, so that
all other answers under that rule are to equal its own.
"""

from collections.abc import Mapping
from typing import get_args
from unittest.mock import patch

from answering import Answering, Here, MeasuredAnswer
from command import PROMPT_OPTIONS, SYSTEM_OPTIONS, ScriptReport, begin, load, options, run
from end_to_end import HERE, SystemTimes, measure_end_to_end, speedup
from measuring import measure_bandwidth
from systems import chosen_plans, prompts_of, shown_plan

from polybasic.chain.formats.plan import Plan, Rule
from polybasic.deploy.runtime.rounds.noise import Noise
from polybasic.deploy.runtime.rounds.sampling import Sampling

UNPERTURBED = "coupled, drafts without noise"


class Unperturbed:
    """Answers with drafts that do not see the noise."""

    def __init__(self, here: Here) -> None:
        self._here = here

    def answer(
        self, token_ids: list[int], plan: Plan, max_new_tokens: int, sampling: Sampling
    ) -> MeasuredAnswer:
        """See `Answering`."""
        with patch.object(Noise, "draft", lambda *_: None):
            return self._here.answer(token_ids, plan, max_new_tokens, sampling)


def main() -> None:
    parser = options(
        __doc__, "chain", "--device", "--dtype", "--turns", *SYSTEM_OPTIONS, *PROMPT_OPTIONS
    )
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    arguments = parser.parse_args()
    report = begin(__file__, __doc__, arguments)
    chain = load(arguments)
    plans = chosen_plans(chain, arguments.systems, arguments.members)
    prompts = prompts_of(arguments, chain)
    bandwidth = measure_bandwidth(chain.engine.models.target.device)
    report.say(f"{bandwidth.shown()} {len(prompts)} prompts.")
    for name, plan in plans.items():
        report.say(f"{name}: {shown_plan(plan, chain)}")
    here = Here(chain)
    for temperature in arguments.temperatures:
        asked: dict[str, Plan] = {"target": plans["target"]}
        answering: dict[str, Answering] = {"target": here}
        for name in plans.keys() - {"target"}:
            for rule in get_args(Rule) if temperature else ("coupled",):
                asked[f"{name}, {rule}"] = plans[name].model_copy(update={"rule": rule})
                answering[f"{name}, {rule}"] = here
            if temperature:
                asked[f"{name}, {UNPERTURBED}"] = asked[f"{name}, coupled"]
                answering[f"{name}, {UNPERTURBED}"] = Unperturbed(here)
        times = measure_end_to_end(
            {HERE: answering},
            dict(sorted(asked.items())),
            prompts,
            arguments.max_new_tokens,
            arguments.turns,
            temperature,
        )
        _report(report, times[HERE], temperature)
    report.write(arguments.record)


def _report(report: ScriptReport, times: Mapping[str, SystemTimes], temperature: float) -> None:
    alone = times["target"]
    columns = ["tokens a target pass", "ms a token", "speedup", "by turns", "as the target"]
    rows = []
    for name, system in times.items():
        gained = speedup(alone.per_token, system.per_token)
        rows.append(
            [
                name,
                f"{system.tokens_per_target_pass:.2f}",
                f"{system.per_token.median:.3f}",
                f"{gained.median:.2f}x",
                f"{gained.min:.2f} to {gained.max:.2f}",
                f"{system.num_identical(alone)}/{len(alone.turns[0])}",
            ]
        )
    report.table(f"Temperature {temperature:g}", ["system", *columns], rows)


if __name__ == "__main__":
    run(main)
