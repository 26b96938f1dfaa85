"""Whether an answer behind a long prompt begins without models that would have to read it, too.

A model with a cache of its own reads the whole prompt before it proposes anything. Behind a prompt
of a thousand tokens that costs as much as it saves in a hundred tokens of the answer, and many
answers are shorter. What a token of a prompt costs is timed here; see
`polybasic.chain.formats.plan.EarlyPlan` for what follows from it.
"""

import time
from collections.abc import Callable
from itertools import cycle, islice

from polybasic.chain.formats.plan import EarlyPlan, Plan
from polybasic.deploy.planner.alternatives import planned_at_times, repeatable_choice
from polybasic.deploy.planner.measuring.answers import Calibration
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.planner.measuring.traces import Measured
from polybasic.deploy.planner.search import PlanChoice
from polybasic.deploy.runtime.request import Request

NUM_READ = 256
"""Tokens of the prompt that is timed, as far as the context has room."""
NUM_ANSWERED = 4


def choose_early(
    measured: Measured, choice: PlanChoice, budget: Budget, say: Callable[[str], None]
) -> EarlyPlan | None:
    """The fastest plan of members that read nothing for themselves, beside the chosen one, among
    plans under which a seed means a text.

    Returns:
        None where the chosen plan has no other members or they save nothing, and where what was
        read once is read again.
    """
    engine = measured.calibration.engine
    choice = repeatable_choice(measured, choice)
    best = choice.best
    slot = engine.slots.first
    if engine.models.leader is not None or engine.captures_rounds or not engine.slots.reuses:
        return None

    def reads(names: tuple[str, ...]) -> bool:
        return any(slot.reads_for_itself(name) for name in names[1:])

    others = [each for each in choice.by_members if not reads(each.names)]
    if not reads(best.names) or not others:
        return None
    early = min(others, key=lambda each: each.seconds_per_token)
    # the chosen plan may be slower than one of other members by as much as counts for nothing
    if early.seconds_per_token <= best.seconds_per_token:
        return None
    if not budget.left():
        budget.leave_out("how long a prompt is read")
        return None
    say("plan: how long a prompt is read")
    seconds = seconds_of_reading(measured.calibration, early.plan, best.plan)
    if not seconds:
        return None
    return EarlyPlan(**planned_at_times(early), reading_seconds=seconds)


def seconds_of_reading(calibration: Calibration, early: Plan, plan: Plan) -> float:
    """That members of `plan` take, for a token of a prompt, which those of `early` have read.

    The plan answers twice behind the same prompt. The first time the others have to read it.
    """
    engine = calibration.engine
    num_tokens = min(NUM_READ, engine.context_tokens - NUM_ANSWERED)
    prompt = list(islice(cycle(calibration.answered[0].prompt), num_tokens))

    def answer(by: Plan) -> float:
        begin = time.perf_counter()
        for _ in engine.run(
            Request(prompt, NUM_ANSWERED, calibration.sampling, frozenset(), by, reuses=True)
        ):
            pass
        return time.perf_counter() - begin

    _forget(calibration)
    answer(early)
    reading, again = answer(plan), answer(plan)
    _forget(calibration)
    return max(reading - again, 0.0) / num_tokens


def _forget(calibration: Calibration) -> None:
    for slot in calibration.engine.slots.made:
        slot.clear()
