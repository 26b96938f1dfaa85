"""The fastest plan for each number of active sequences.

Sequences that wait for the same model share a pass, which reads its weights once. The more of them
there are, the more a further row costs, and a tree that pays for one sequence may not pay for
sixteen. What happens in a sequence's rounds does not depend on the others, so it is simulated as
for one. What the rounds cost is timed with so many sequences: of each shared pass, a sequence bears
its share of the seconds. A plan's time is then the machine's, for a token of any sequence.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from polybasic.chain.formats.plan import Plan
from polybasic.deploy.planner.alternatives import (
    Alternative,
    narrower,
    of_one_size,
    repeatable_choice,
    shapes_to_time,
    without_copies,
)
from polybasic.deploy.planner.finalists import close_to_best, shape_of
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.planner.measuring.costs import RoundCosts
from polybasic.deploy.planner.measuring.load_costs import LoadTimer
from polybasic.deploy.planner.measuring.measurements import DraftCosts, Measurements
from polybasic.deploy.planner.measuring.traces import Measured
from polybasic.deploy.planner.search import Candidate, PlanChoice, choose_plan, fastest_first
from polybasic.deploy.planner.settings import PlanGrid
from polybasic.deploy.planner.simulation import Simulator

WORTH_TIMING = 1.25
"""Sets of members whose best plan takes at most so many times as long as the best of all are timed
with more sequences, and those that are a part of the best."""
CLEARLY_FASTER = 1.03
"""Less is the noise of timings, for which no sequence has to change its plan."""
MAX_ROUNDS = 3
"""Of timings: the first is of some shapes, the others of plans that seem to be the fastest."""


def choose_by_load(
    measured: Measured,
    choice: PlanChoice,
    loads: Collection[int],
    timer: LoadTimer,
    budget: Budget,
    say: Callable[[str], None],
) -> list[Alternative]:
    """The fastest plans by number of sequences, among those under which a seed means a text.

    Args:
        measured: with one sequence.
        choice: for one sequence; members keep its windows under any load.
        loads: numbers of sequences. The largest are left out where there is no time or no room.
        say: called with each line of progress.

    Returns:
        In increasing order; none if there was time for one sequence alone.
    """
    if not loads:
        return []
    of_one = repeatable_choice(measured, choice)
    search = _LoadSearch(of_one, measured.calibration.grid, timer, budget)
    by_load: list[Alternative] = []
    for sequences in sorted(set(loads) - {1}):
        if sequences > timer.most_sequences:
            budget.leave_out(f"plans for {sequences} sequences, for which there is no room")
            continue
        if not search.has_time_for(sequences):
            budget.leave_out(f"plans for {sequences} sequences")
            continue
        say(f"plan: rounds of {sequences} sequences at a time")
        by_load.append(search.run(sequences))
    if not by_load or 1 not in loads:
        return by_load
    return [Alternative(1, of_one, of_one.best, CLEARLY_FASTER), *by_load]


class _LoadSearch:
    """Finds the fastest plan of one load after the other, in increasing order.

    What is far from the best at a load is not tried at larger ones, nor are wider trees than the
    best: what a member costs beside the target, and a row beside a pass, grows with the load.
    """

    def __init__(
        self, of_one: PlanChoice, grid: PlanGrid, timer: LoadTimer, budget: Budget
    ) -> None:
        self.plan_of_one, self.base = of_one.best, of_one.best.measurements
        self._last, self._grid, self._timer, self._budget = of_one, grid, timer, budget
        self._simulator = Simulator(self.base)
        self._seconds_of_a_sequence = 0.0

    def has_time_for(self, sequences: int) -> bool:
        """Whether there is time even if passes were not shared, by the seconds of the last run."""
        return sequences * self._seconds_of_a_sequence < self._budget.left()

    def run(self, sequences: int) -> Alternative:
        """The choice for so many sequences; plans that are close to the best are timed again."""
        began, costs = self._budget.seconds, RoundCosts()
        tried = self._worth_trying()
        timed: list[Plan] = []
        plans = shapes_to_time(tried, self.base)
        of_one = without_copies(self.plan_of_one.plan, self.base)
        plans += [of_one] if of_one not in plans else []
        for _ in range(MAX_ROUNDS):
            for plan in plans:
                self._timer(plan, sequences, costs)
            timed += plans
            load = self._choose(sequences, costs, tried)
            plans = [of_one_size(candidate.plan) for candidate in close_to_best(load.choice)]
            if len(plans) == 1 and shape_of(plans[0]) in map(shape_of, timed):
                break
        self._last = load.choice
        self._seconds_of_a_sequence = (self._budget.seconds - began) / sequences
        return load

    def _worth_trying(self) -> list[Candidate]:
        """The best plans of the last load, and that of one sequence."""
        best = self._last.best
        slowest = WORTH_TIMING * best.seconds_per_token
        return [
            *(
                candidate
                for candidate in self._last.by_members
                if candidate.seconds_per_token <= slowest
                or candidate.members.is_part_of(best.members)
            ),
            self.plan_of_one,
        ]

    def _choose(
        self, sequences: int, costs: RoundCosts, tried: Collection[Candidate]
    ) -> Alternative:
        measurements = at_load(self.base, costs)
        choice = choose_plan(
            [measurements],
            narrower(self._grid, max(candidate.plan.tree.rows for candidate in tried)),
            among={(self.plan_of_one.plan.rule, candidate.members) for candidate in tried},
            simulators=[self._simulator],
        )
        predicted = self._simulator.at(measurements).run(self.plan_of_one.plan)
        plan_of_one = replace(self.plan_of_one, predicted=predicted, measurements=measurements)
        by_members = fastest_first(
            min(candidate, plan_of_one, key=lambda contender: contender.seconds_per_token)
            if candidate.members == plan_of_one.members
            else candidate
            for candidate in choice.by_members
        )
        choice = replace(choice, by_members=by_members)
        return Alternative(sequences, choice, plan_of_one, CLEARLY_FASTER)


def at_load(base: Measurements, costs: RoundCosts) -> Measurements:
    """Measurements whose seconds are a sequence's share at a load.

    Args:
        base: with one sequence.
        costs: timed at the load. Members that lack there cannot run.
    """
    return replace(
        base,
        passes=costs.passes(),
        drafts={name: _scaled(base.drafts[name], timed) for name, timed in costs.drafts().items()},
        block_overhead_seconds=costs.block_overheads(),
    )


def _scaled(base: DraftCosts, timed: DraftCosts) -> DraftCosts:
    """Costs as timed, and of each `top_k` that was not timed, those of one sequence times the
    ratios of another `top_k`."""
    top_k, (first, further) = next(iter(timed.by_top_k.items()))
    first_of_one, further_of_one = base.by_top_k[top_k]
    ratio = first / first_of_one
    further_ratio = further / further_of_one if further_of_one > 0 else ratio
    scaled = {
        k: (first_level * ratio, each * further_ratio)
        for k, (first_level, each) in base.by_top_k.items()
    }
    return DraftCosts(scaled | timed.by_top_k)
