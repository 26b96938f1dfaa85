"""From a chain to the plan that is fastest on this machine: measure, simulate, choose, record."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from polybasic.chain.base.progress import waiting
from polybasic.chain.formats.card import record_plan
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.plan import ContextPlan, LoadPlan, MeasuredPlan, PredictedPlan
from polybasic.deploy.planner.alternatives import compared
from polybasic.deploy.planner.contexts import choose_by_context
from polybasic.deploy.planner.explanation import explain, shown_budget
from polybasic.deploy.planner.finalists import time_finalists
from polybasic.deploy.planner.loads import choose_by_load
from polybasic.deploy.planner.measuring.answers import answer_prompts
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.planner.measuring.load_costs import LoadTimer
from polybasic.deploy.planner.measuring.measurements import Measurements
from polybasic.deploy.planner.measuring.message_costs import message_seconds
from polybasic.deploy.planner.measuring.traces import measure
from polybasic.deploy.planner.prompts import Question, choose_fitting, read_questions
from polybasic.deploy.planner.reading import choose_early
from polybasic.deploy.planner.rules import rules_to_compare
from polybasic.deploy.planner.search import PlanChoice, choose_plan
from polybasic.deploy.planner.settings import PlanSettings
from polybasic.deploy.planner.simulation import Simulator
from polybasic.deploy.planner.windows import try_windows
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.load import load_chain
from polybasic.deploy.runtime.remote.link import Link
from polybasic.deploy.runtime.rounds.sampling import Sampling

CONTEXTS_SHARE, LOADS_SHARE = 0.1, 0.2
"""Of the budget, that is left for plans behind long contexts, and for those of several sequences.
"""


@dataclass(frozen=True)
class Planning:
    """A chosen plan and what it was chosen from.

    Attributes:
        measurements: for each rule, or for several that draw alike, without windows.
        is_recorded: whether the chain has it now.
    """

    measured: MeasuredPlan
    choice: PlanChoice
    measurements: tuple[Measurements, ...]
    is_recorded: bool = False


def plan_chain(
    folder: Path,
    settings: PlanSettings,
    say: Callable[[str], None],
    prompts_named: str = "",
    target: str | None = None,
    records: bool = True,
) -> Planning:
    """Choose the fastest plan on this machine and write it into the chain's manifest.

    A rough one, for which time was too short, replaces no better one of the same conditions.

    Args:
        folder: a chain.
        settings: `prompts` names a Spec-Bench question file.
        say: called with each line of progress.
        prompts_named: what people call these prompts.
        target: as `load_chain`.
        records: False leaves the chain as it is.

    Raises:
        UserError: the chain cannot be loaded, or prompts are malformed or all too long.
    """
    options = settings.model_dump(include={"dtype", "graphs", "tensor_parallel"})
    # over a link, nobody reads what the target has cached
    shared = settings.link is None
    if prompts_named:
        say(f"plan: prompts are {prompts_named}")
    plan = read_manifest(folder).plan  # those that were measured before are none of its business
    with load_chain(
        folder, share_caches=shared, plan=plan, target=target, say=say, **options
    ) as chain:
        if settings.tensor_parallel > 1:
            say(f"memory: {chain.memory.shown}")
        planning = plan_loaded(chain, settings, say)
    measured = planning.measured.model_copy(update={"prompts": prompts_named})
    if records and measured.is_rough and _has_better(folder, measured):
        say(
            f"plan: rough, and the chain has a better one for {measured.place}, which stays; "
            "raise max_seconds to replace it"
        )
        records = False
    if records:
        record_plan(folder, measured)
    return replace(planning, measured=measured, is_recorded=records)


def _has_better(folder: Path, measured: MeasuredPlan) -> bool:
    alike = (plan for plan in read_manifest(folder).plans if plan.conditions == measured.conditions)
    return any(not plan.is_rough for plan in alike)


def plan_loaded(
    chain: Chain,
    settings: PlanSettings,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Planning:
    """As `plan_chain`, for a loaded chain; writes nothing.

    Args:
        chain: for a plan over a link, loaded with `share_caches=False`.
        clock: seconds since any moment, by which `settings.max_seconds` are counted.
    """
    budget = Budget(settings.max_seconds, clock)
    link = None if settings.link is None else Link.of(settings.link)
    grid = settings.grid if link is None else settings.grid.over_link
    if chain.engine.captures_rounds:
        grid = grid.model_copy(update={"least_probabilities": ()})
    # sequences that wait for a link are no load, and the text of a seed depends on none
    changes = link is None and _is_repeatable(settings)
    loads = settings.loads if changes else ()
    if settings.loads and not _is_repeatable(settings):
        say(f"plan: for one sequence alone, as loads need the rule coupled and not {settings.rule}")
    contexts = settings.contexts if changes else ()
    for_loads = LOADS_SHARE if loads else 0.0
    budget.max_seconds *= 1 - for_loads - (CONTEXTS_SHARE if contexts else 0.0)
    calibration = answer_prompts(
        chain.engine,
        first_turns(chain, settings),
        chain.stop_tokens,
        settings.max_new_tokens,
        Sampling(settings.temperature, seed=settings.seed),
        grid,
        rules_to_compare(settings),
        budget,
        say,
    )
    measured = measure(calibration, budget, say)
    if link is not None:
        (alike,) = measured.measurements  # by the one rule of links
        prompt, costs = calibration.answered[0].prompt, alike.passes[alike.target]
        of_messages = message_seconds(chain, prompt, costs, link)
        measured = measured.over(link, of_messages, settings.optimistic)
    say("plan: simulates the rounds of every plan")
    with waiting("simulating rounds"):
        simulators = [Simulator(each) for each in measured.measurements]
        choice = choose_plan(measured.measurements, grid, simulators=simulators)
    measured, choice, timed_again = time_finalists(measured, choice, simulators, budget, say)
    choice = try_windows(measured, choice, budget, say)
    timer = LoadTimer(measured.calibration)
    budget.max_seconds = settings.max_seconds * (1 - for_loads)
    by_context = choose_by_context(measured, choice, contexts, timer, budget, say)
    early = choose_early(measured, choice, budget, say) if changes else None
    budget.max_seconds = settings.max_seconds
    by_load = choose_by_load(measured, choice, loads, timer, budget, say)
    measurements, _ = measured.by_rule(choice.rule)
    spent = {**budget.report(), "timed_again": timed_again}
    say(f"plan: {shown_budget(spent)}")
    best = choice.best
    others = [candidate for candidate in choice.by_members if candidate is not best]
    planned = MeasuredPlan(
        plan=best.plan,
        seconds_per_token=best.seconds_per_token,
        hardware=measurements.hardware,
        dtype=measurements.dtype,
        temperature=measurements.temperature,
        link=settings.link,
        others=tuple(
            PredictedPlan(plan=candidate.plan, seconds_per_token=candidate.seconds_per_token)
            for candidate in others
        ),
        by_load=tuple(LoadPlan(sequences=load.number, **load.planned()) for load in by_load),
        by_context=tuple(
            ContextPlan(tokens=context.number, **context.planned()) for context in by_context
        ),
        early=early,
        explanation=explain(
            choice,
            measurements,
            spent,
            compared(by_load, "sequences", "plan_of_one"),
            compared(by_context, "tokens", "plan_of_short"),
            early,
        ),
    )
    return Planning(planned, choice, measured.measurements)


def _is_repeatable(settings: PlanSettings) -> bool:
    """Whether plans are compared under which a seed means a text."""
    return settings.temperature == 0 or settings.packed_rule == "coupled"


def first_turns(chain: Chain, settings: PlanSettings) -> list[tuple[str, list[int]]]:
    """First turns that leave room for an answer: one of each task, the next one of each, ..."""

    def first_turn(question: Question) -> list[int]:
        return chain.encode([{"role": "user", "content": question.turns[0]}])

    chosen, _ = choose_fitting(
        read_questions(Path(settings.prompts)),
        lambda question: len(first_turn(question)),
        chain.engine.context_tokens,
        settings,
        "plan",
    )
    by_task: dict[str, list[list[int]]] = defaultdict(list)
    for question in chosen:
        by_task[question.task].append(first_turn(question))
    turns = zip_longest(*by_task.values())
    return [
        (task, prompt)
        for turn in turns
        for task, prompt in zip(by_task, turn, strict=True)
        if prompt is not None
    ]
