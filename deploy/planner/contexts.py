"""The fastest plan behind contexts of several lengths.

Every row of a pass attends to the whole context: behind a long one a further row, which costs next
to nothing after a short prompt, is paid for. So wide trees, and in the end drafts at all, stop
paying. What a round costs is timed behind the planning prompts and behind a long context, in turns,
and is a line between them, since each token of context adds as much. Rounds are as they were found
for the planning prompts: acceptance is that of short contexts.

Nothing reads the long context. Costs do not depend on what a cache holds, so it is filled with as
many rows.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from polybasic.deploy.planner.alternatives import (
    Alternative,
    narrower,
    repeatable_choice,
    shapes_to_time,
)
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.planner.measuring.costs import RoundCosts
from polybasic.deploy.planner.measuring.load_costs import LoadTimer
from polybasic.deploy.planner.measuring.measurements import DraftCosts, Measurements, PassCosts
from polybasic.deploy.planner.measuring.traces import Measured
from polybasic.deploy.planner.search import PlanChoice, choose_plan
from polybasic.deploy.planner.simulation import Simulator

CLEARLY_FASTER = 1.08
"""Less may be another text's acceptance, for which no answer has to change its plan."""


def choose_by_context(
    measured: Measured,
    choice: PlanChoice,
    contexts: Collection[int],
    timer: LoadTimer,
    budget: Budget,
    say: Callable[[str], None],
) -> list[Alternative]:
    """The fastest plans by tokens of context, among the chosen members and parts of them, and among
    those under which a seed means a text.

    Args:
        measured: behind the planning prompts.
        choice: for these; members keep its windows.
        contexts: tokens. Costs behind more than the chain leaves room for are on the same line.
        say: called with each line of progress.

    Returns:
        In increasing order, the first of them for the planning prompts; none where there is nothing
        to choose or no time.
    """
    examples = measured.calibration.answered
    if not contexts or not examples:
        return []
    choice = repeatable_choice(measured, choice)
    best = choice.best
    near_tokens = sum(map(len, examples)) // len(examples)
    further = sorted(tokens for tokens in set(contexts) if tokens > near_tokens)
    timed_tokens = min(further[-1], timer.most_context) if further else 0
    drafts = len(best.names) > 1 or best.members.has_ngram
    if timed_tokens <= near_tokens or not drafts:
        return []
    parts = [each for each in choice.by_members if each.members.is_part_of(best.members)]
    say(f"plan: rounds behind {timed_tokens:,} tokens")
    near, far = RoundCosts(), RoundCosts()
    base = best.measurements
    for plan in budget.within(shapes_to_time(parts, base), 1, "timings behind a long context"):
        timer(plan, 1, near)
        timer.behind(timed_tokens, plan, far)
    behind = at_context(base, near, far, 1)
    if not set(best.names) <= behind.passes.keys() | behind.drafts.keys():
        budget.leave_out("plans behind long contexts")
        return []
    grid = narrower(measured.calibration.grid, best.plan.tree.rows)
    simulator = Simulator(base)
    found: list[Alternative] = []
    for tokens in (near_tokens, *further):
        share = (tokens - near_tokens) / (timed_tokens - near_tokens)
        there = at_context(base, near, far, share)
        among = {(best.plan.rule, each.members) for each in parts}
        chosen = choose_plan([there], grid, among=among, simulators=[simulator])
        predicted = simulator.at(there).run(best.plan)
        usual = replace(best, predicted=predicted, measurements=there)
        found.append(Alternative(tokens, chosen, usual, CLEARLY_FASTER))
    return found


def at_context(base: Measurements, near: RoundCosts, far: RoundCosts, share: float) -> Measurements:
    """Measurements whose seconds are those behind a context.

    Args:
        base: behind the planning prompts.
        near, far: of the same shapes, timed in turns behind these prompts and behind a long
            context.
        share: of the way from the one to the other. Members that lack there cannot run.
    """
    before, after = near.passes(), far.passes()
    drafts_before, drafts_after = near.drafts(), far.drafts()
    return replace(
        base,
        passes={
            name: _passes(base.passes[name], before[name], after[name], share)
            for name in before.keys() & after.keys()
        },
        drafts={
            name: _drafts(base.drafts[name], drafts_before[name], drafts_after[name], share)
            for name in drafts_before.keys() & drafts_after.keys()
        },
    )


def _passes(base: PassCosts, before: PassCosts, after: PassCosts, share: float) -> PassCosts:
    seconds = [
        at_base + share * max(after.at(rows) - before.at(rows), 0.0)
        for rows, at_base in zip(base.rows, base.seconds, strict=True)
    ]
    return PassCosts(base.rows, tuple(seconds))


def _drafts(base: DraftCosts, before: DraftCosts, after: DraftCosts, share: float) -> DraftCosts:
    """Of each `top_k` that was not timed with what another one costs more."""

    def more(top_k: int) -> Sequence[float]:
        timed = top_k if top_k in after.by_top_k else next(iter(after.by_top_k))
        both = zip(before.by_top_k[timed], after.by_top_k[timed], strict=True)
        return [share * max(later - earlier, 0.0) for earlier, later in both]

    return DraftCosts(
        {
            top_k: (first + more(top_k)[0], further + more(top_k)[1])
            for top_k, (first, further) in base.by_top_k.items()
        }
    )
