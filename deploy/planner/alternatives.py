"""What searches for the plans of loads and of contexts have in common.

The plan for one sequence behind the planning prompts need not be the fastest for several sequences,
or behind a long context: there a further row of a pass costs more. The searches start from it, and
it stays wherever no other one is clearly faster.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from polybasic.chain.formats.plan import Plan, Tree
from polybasic.deploy.planner.explanation import describe_shape
from polybasic.deploy.planner.measuring.measurements import Measurements
from polybasic.deploy.planner.measuring.traces import Measured
from polybasic.deploy.planner.search import Candidate, PlanChoice, choose_plan
from polybasic.deploy.planner.settings import PlanGrid


@dataclass(frozen=True)
class Alternative:
    """The outcome of a search among plans for one load, or behind one context.

    Attributes:
        number: of active sequences, or of tokens of context.
        usual: the plan that is the fastest for one sequence behind the planning prompts, here.
        clearly_faster: times as fast as the usual plan another one has to be to be taken.
    """

    number: int
    choice: PlanChoice
    usual: Candidate
    clearly_faster: float

    @property
    def best(self) -> Candidate:
        """The fastest; the usual plan where no other one is clearly faster."""
        fastest = self.choice.best
        is_close = self.usual.seconds_per_token <= self.clearly_faster * fastest.seconds_per_token
        return self.usual if is_close else fastest

    def planned(self) -> dict[str, Any]:
        """Fields of the chain's manifest."""
        return planned_at_times(self.best)


def planned_at_times(candidate: Candidate) -> dict[str, Any]:
    """Fields of the chain's manifest of a plan for some of the time. Where nothing is drawn, all
    rules are `coupled`."""
    return {
        "plan": candidate.plan.model_copy(update={"rule": "coupled"}),
        "seconds_per_token": candidate.seconds_per_token,
    }


def compared(found: Collection[Alternative], of: str, usual: str) -> list[dict[str, Any]]:
    """The plan of each number, beside the target alone and the usual plan, as plain JSON.

    Args:
        of: what the number counts.
        usual: what the usual plan is called.
    """
    return [
        {
            of: each.number,
            "members": str(each.best.members),
            "shape": describe_shape(each.best.plan, each.best.measurements),
            "seconds_per_token": each.best.seconds_per_token,
            "seconds_of_target_alone": each.choice.alone.seconds_per_token,
            f"seconds_of_{usual}": each.usual.seconds_per_token,
        }
        for each in found
    ]


def repeatable_choice(measured: Measured, choice: PlanChoice) -> PlanChoice:
    """The same choice, or one among plans under which a seed means a text."""
    if not choice.best.measurements.is_random:
        return choice
    repeatable = [measurement for measurement in measured.measurements if not measurement.is_random]
    return choose_plan(repeatable, measured.calibration.grid)


def shapes_to_time(tried: Collection[Candidate], base: Measurements) -> list[Plan]:
    """The fastest plan of each set of models, and where it has a draft tree, two narrower ones.

    Between them costs are nearly a line. They have different depths, so that the first level of a
    draft and each further one are known.
    """
    fastest: dict[tuple[str, ...], Plan] = {}
    for candidate in tried:
        fastest.setdefault(candidate.names, without_copies(candidate.plan, base))
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


def without_copies(plan: Plan, base: Measurements) -> Plan:
    """The plan without n-grams, with the windows of the measurements."""
    return of_one_size(plan).model_copy(update={"ngram": None, "windows": base.windows})


def of_one_size(plan: Plan) -> Plan:
    """With trees that are all as large: of their shares of a step, costs of smaller ones follow."""
    return plan.model_copy(update={"tree": plan.tree.model_copy(update={"least_probability": 0.0})})


def narrower(grid: PlanGrid, rows: int) -> PlanGrid:
    """The grid's trees of at most so many rows, and narrower ones: wider ones than pay for one
    sequence behind a short context pay even less elsewhere."""
    return grid.model_copy(
        update={
            "depths": tuple(sorted({1, *grid.depths})),
            "rows": tuple(
                sorted({2, 3, *(num_rows for num_rows in grid.rows if num_rows <= rows)})
            ),
        }
    )
