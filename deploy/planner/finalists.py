"""The best plan and those whose predicted times are close to its are timed again, the better half
twice as often: the time that is left goes where it can change the choice, and what is said of it.

Of a thousand plans that were predicted from few rounds, the one that seems fastest seems so in part
by chance. Its own rounds find that out, and those of the target alone in turns with them, to which
it is compared. Where another rule is close, its best plan is among them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import cycle

from polybasic.chain.base.readable import counted
from polybasic.chain.formats.card import shown_tree
from polybasic.chain.formats.plan import Plan
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.planner.measuring.costs import COST_TOKENS, time_plan
from polybasic.deploy.planner.measuring.traces import Measured
from polybasic.deploy.planner.search import Candidate, PlanChoice, choose_plan
from polybasic.deploy.planner.simulation import Simulator

CLOSE = 0.05
"""Share of the best time within which plans are close: by some such share a prediction from few
rounds is off, see benchmarks/records/cpu-2-cores-planner.md."""
ENOUGH = 6
"""Timings of a plan that is chosen."""
MAX_FINALISTS = 8
MAX_ROUNDS = 5
SHARE = 1.0
SHARE_BEFORE_WINDOWS = 0.6
"""Of the budget, by whose end it is over where windows are to be tried."""


def time_finalists(
    measured: Measured,
    choice: PlanChoice,
    simulators: Sequence[Simulator],
    budget: Budget,
    say: Callable[[str], None],
) -> tuple[Measured, PlanChoice, dict[str, int]]:
    """Measurements with further timings of close plans, the choice from them, and what was timed.

    In each round, all that are left are timed in turns with the target alone, and plans are chosen
    anew; then half as many of those that are close are left, and the number of turns doubles. It
    ends when one is left that was timed `ENOUGH` times, or when time does.

    Args:
        simulators: of each of the measurements.

    Returns:
        Measurements, choice, and how often each shape was timed again, in words.
    """
    calibration = measured.calibration
    share = SHARE_BEFORE_WINDOWS if calibration.usable_windows else SHARE
    finalists, num_turns = close_to_best(choice)[:MAX_FINALISTS], 1
    close = f"the {len(finalists)} plans within {CLOSE:.0%} of the best"
    say(f"plan: times {close if len(finalists) > 1 else 'the best plan'} again")
    timed: Counter[str] = Counter()
    prompts = cycle([example.prompt for example in calibration.answered])
    for _ in range(MAX_ROUNDS):
        if len(finalists) == 1 and timed[shape_of(finalists[0].plan)] >= ENOUGH:
            break
        expected = COST_TOKENS * sum(rival.seconds_per_token for rival in finalists)
        if expected > budget.left(share):
            budget.leave_out(f"further timings of {counted(len(finalists), 'close plan')}")
            break
        num_before = timed.total()
        plans = num_turns * _and_alone([rival.plan for rival in finalists], choice)
        for plan in budget.within(plans, share, "timings of close plans"):
            time_plan(
                calibration.engine,
                next(prompts),
                plan,
                calibration.stop_tokens,
                calibration.sampling,
                measured.by_rule(plan.rule)[1],
            )
            timed[shape_of(plan)] += 1
        measured = measured.with_costs()
        choice = choose_plan(measured.measurements, calibration.grid, simulators=simulators)
        finalists = close_to_best(choice)[: -(-len(finalists) // 2)]
        if timed.total() - num_before < len(plans):
            break
        num_turns *= 2
    return measured, choice, dict(timed)


def _and_alone(plans: list[Plan], choice: PlanChoice) -> list[Plan]:
    """These plans, and the target alone by each of their rules."""
    rules = dict.fromkeys(plan.rule for plan in plans)
    alone = [choice.alone.plan.model_copy(update={"rule": rule}) for rule in rules]
    return [*plans, *(plan for plan in alone if plan not in plans)]


def close_to_best(choice: PlanChoice) -> list[Candidate]:
    """The best plans of sets of members that are nearly as fast as the fastest, the best first.

    Of rules that draw alike, whose rounds cost the same, there is one.
    """
    plans = [*choice.by_members, *choice.other_rules]
    plans = [
        candidate for candidate in plans if candidate.plan.rule == candidate.measurements.rules[0]
    ]
    fastest = min(candidate.seconds_per_token for candidate in plans)
    close = [
        candidate for candidate in plans if candidate.seconds_per_token <= (1 + CLOSE) * fastest
    ]
    return sorted(close, key=lambda candidate: candidate.seconds_per_token)


def shape_of(plan: Plan) -> str:
    """What the costs of its rounds depend on, in words."""
    members = " → ".join(plan.members)
    if plan.ngram is not None:
        members += " + n-grams behind drafts" if plan.ngram.extends else " + n-grams"
    return f"{members}, tree of {shown_tree(plan.tree)}, rule {plan.rule}"
