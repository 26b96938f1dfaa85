"""Plans whose predicted times are close to the best one's are timed again, the better half twice
as often: the time that is left goes where it can change the choice.

Only shapes that seem fast are looked at, so one that seems so by chance is found out. Where another
rule is close, its best plan is among them.
"""

from collections import Counter
from collections.abc import Callable
from itertools import cycle

from polybasic.chain.base.readable import counted
from polybasic.chain.formats.card import shown_tree
from polybasic.chain.formats.plan import Plan
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.planner.measuring.costs import COST_TOKENS, time_plan
from polybasic.deploy.planner.measuring.traces import Measured
from polybasic.deploy.planner.search import Candidate, PlanChoice, choose_plan

CLOSE = 0.05
"""Share of the best time within which plans are close: by some such share a prediction from few
rounds is off, see benchmarks/records/cpu-2-cores-planner.md."""
MAX_FINALISTS = 8
MAX_ROUNDS = 5
SHARE = 1.0
SHARE_BEFORE_WINDOWS = 0.6
"""Of the budget, by whose end it is over where windows are to be tried."""


def time_finalists(
    measured: Measured, choice: PlanChoice, budget: Budget, say: Callable[[str], None]
) -> tuple[Measured, PlanChoice, dict[str, int]]:
    """Measurements with further timings of close plans, the choice from them, and what was timed.

    In each round, all that are left are timed in turns; then the better half of those that are
    still close is left, and the number of turns doubles. It ends when one is left whose shape was
    timed, or when time does.

    Returns:
        Measurements, choice, and how often each shape was timed again, in words.
    """
    calibration = measured.calibration
    share = SHARE_BEFORE_WINDOWS if calibration.usable_windows else SHARE
    finalists, num_turns = close_to_best(choice)[:MAX_FINALISTS], 1
    if len(finalists) < 2:
        return measured, choice, {}
    say(f"plan: {len(finalists)} plans are within {CLOSE:.0%} of the best")
    timed: Counter[str] = Counter()
    prompts = cycle([example.prompt for example in calibration.answered])
    for _ in range(MAX_ROUNDS):
        if len(finalists) == 1 and shape_of(finalists[0].plan) in timed:
            break
        plans = [rival.plan for rival in finalists] * num_turns
        if COST_TOKENS * sum(rival.seconds_per_token for rival in finalists) > budget.left(share):
            budget.leave_out(f"further timings of {counted(len(finalists), 'close plan')}")
            break
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
        among = [(rival.plan.rule, rival.members) for rival in finalists]
        left = choose_plan(measured.measurements, calibration.grid, among=among)
        finalists = close_to_best(left)[: -(-len(finalists) // 2)]
        num_turns *= 2
    return measured, choose_plan(measured.measurements, calibration.grid), dict(timed)


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
