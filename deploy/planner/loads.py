"""The fastest plan for each number of active sequences.

Sequences that wait for the same model share a pass, which reads its weights once. The more of them
there are, the more a further row costs, and a tree that pays for one sequence may not pay for
sixteen. What happens in a sequence's rounds does not depend on the others, so it is simulated as
for one. What the rounds cost is timed with so many sequences: of each shared pass, a sequence bears
its share of the seconds. A plan's time is then the machine's, for a token of any sequence.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from polybasic.chain.formats.plan import LoadPlan, Plan, Tree
from polybasic.deploy.planner.explanation import describe_shape
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


@dataclass(frozen=True)
class LoadChoice:
    """The outcome of a search among plans for several sequences.

    Attributes:
        sequences: that are active.
        plan_of_one: the plan that is the fastest for one sequence, at this load.
    """

    sequences: int
    choice: PlanChoice
    plan_of_one: Candidate

    @property
    def best(self) -> Candidate:
        """The fastest; the plan of one sequence where no other one is clearly faster."""
        fastest, of_one = self.choice.best, self.plan_of_one
        is_close = of_one.seconds_per_token <= CLEARLY_FASTER * fastest.seconds_per_token
        return of_one if is_close else fastest

    def planned(self) -> LoadPlan:
        """What the chain's manifest holds. Where nothing is drawn, all rules are `coupled`."""
        return LoadPlan(
            sequences=self.sequences,
            plan=self.best.plan.model_copy(update={"rule": "coupled"}),
            seconds_per_token=self.best.seconds_per_token,
        )


def choose_by_load(
    measured: Measured,
    choice: PlanChoice,
    loads: Collection[int],
    timer: LoadTimer,
    budget: Budget,
    say: Callable[[str], None],
) -> list[LoadChoice]:
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
    by_load: list[LoadChoice] = []
    for sequences in sorted(set(loads) - {1}):
        if sequences > timer.most_sequences:
            budget.leave_out(f"plans for {sequences} sequences, for which there is no room")
            continue
        if not search.has_time_for(sequences):
            budget.leave_out(f"plans for {sequences} sequences")
            continue
        say(f"plan: rounds of {sequences} sequences at a time")
        by_load.append(search.run(sequences))
    return [LoadChoice(1, of_one, of_one.best), *by_load] if by_load and 1 in loads else by_load


def loads_compared(by_load: Collection[LoadChoice]) -> list[dict[str, Any]]:
    """The plan of each load, beside the target alone and the plan of one, as plain JSON."""
    return [
        {
            "sequences": load.sequences,
            "members": str(load.best.members),
            "shape": describe_shape(load.best.plan, load.best.measurements),
            "seconds_per_token": load.best.seconds_per_token,
            "seconds_of_target_alone": load.choice.alone.seconds_per_token,
            "seconds_of_plan_of_one": load.plan_of_one.seconds_per_token,
        }
        for load in by_load
    ]


def repeatable_choice(measured: Measured, choice: PlanChoice) -> PlanChoice:
    """The same choice, or one among plans under which a seed means a text."""
    if not choice.best.measurements.is_random:
        return choice
    repeatable = [measurement for measurement in measured.measurements if not measurement.is_random]
    return choose_plan(repeatable, measured.calibration.grid)


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

    def run(self, sequences: int) -> LoadChoice:
        """The choice for so many sequences; plans that are close to the best are timed again."""
        began, costs = self._budget.seconds, RoundCosts()
        tried = self._worth_trying()
        timed: list[Plan] = []
        plans = shapes_to_time(tried, self.base)
        of_one = _without_copies(self.plan_of_one.plan, self.base)
        plans += [of_one] if of_one not in plans else []
        for _ in range(MAX_ROUNDS):
            for plan in plans:
                self._timer(plan, sequences, costs)
            timed += plans
            load = self._choose(sequences, costs, tried)
            plans = [_of_one_size(candidate.plan) for candidate in close_to_best(load.choice)]
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
    ) -> LoadChoice:
        measurements = at_load(self.base, costs)
        choice = choose_plan(
            [measurements],
            narrower(self._grid, max(candidate.plan.tree.rows for candidate in tried)),
            among={(self.plan_of_one.plan.rule, candidate.members) for candidate in tried},
            simulator=self._simulator,
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
        return LoadChoice(sequences, choice, plan_of_one)


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


def shapes_to_time(tried: Collection[Candidate], base: Measurements) -> list[Plan]:
    """The fastest plan of each set of models, and where it has a draft tree, two narrower ones.

    Between them costs are nearly a line. They have different depths, so that the first level of a
    draft and each further one are known.
    """
    fastest: dict[tuple[str, ...], Plan] = {}
    for candidate in tried:
        fastest.setdefault(candidate.names, _without_copies(candidate.plan, base))
    shapes: list[Plan] = []
    for names, plan in fastest.items():
        trees = [Tree(depth=1, top_k=1, rows=2)]
        if names[-1] in base.drafters:
            wide = plan.tree.model_copy(update={"depth": max(plan.tree.depth, 2)})
            narrow = Tree(depth=1, top_k=wide.top_k, rows=2)
            middle = {"depth": (wide.depth + 1) // 2, "rows": (wide.rows + 3) // 2}
            trees = list(dict.fromkeys([narrow, wide.model_copy(update=middle), wide]))
        shapes += [plan.model_copy(update={"tree": tree}) for tree in trees]
    return shapes


def _without_copies(plan: Plan, base: Measurements) -> Plan:
    return _of_one_size(plan).model_copy(update={"ngram": None, "windows": base.windows})


def _of_one_size(plan: Plan) -> Plan:
    """With trees that are all as large: of their shares of a step, costs of smaller ones follow."""
    return plan.model_copy(update={"tree": plan.tree.model_copy(update={"least_probability": 0.0})})


def narrower(grid: PlanGrid, rows: int) -> PlanGrid:
    """The grid's trees of at most so many rows, and narrower ones: wider ones than pay for one
    sequence pay for several even less."""
    return grid.model_copy(
        update={
            "depths": tuple(sorted({1, *grid.depths})),
            "rows": tuple(
                sorted({2, 3, *(num_rows for num_rows in grid.rows if num_rows <= rows)})
            ),
        }
    )
