"""The plans of one set of members as points of a grid, whose axes are those that were measured."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, product
from typing import Any

from polybasic.chain.formats.plan import Flush, Ngram, Plan, Tree
from polybasic.deploy.planner.measuring.measurements import Measurements
from polybasic.deploy.planner.settings import PlanGrid

Point = tuple[int, ...]
"""A place on each axis of a lattice."""
"""A place on each axis."""


@dataclass(frozen=True)
class MemberSet:
    """Members that run together.

    Attributes:
        names: as in a plan, from the target down.
        has_ngram: n-gram drafts, alone or beside the drafter.
    """

    names: tuple[str, ...]
    has_ngram: bool

    def is_part_of(self, other: "MemberSet") -> bool:
        """Whether the other set contains all of it."""
        return set(self.names) <= set(other.names) and self.has_ngram <= other.has_ngram

    def __str__(self) -> str:
        return " → ".join(self.names) + (" + n-grams" if self.has_ngram else "")


class Lattice:
    """The plans of one set of members, as points of a grid of ordered axes.

    Args:
        least_probabilities: of candidates, to try beside trees of one size.
    """

    def __init__(
        self,
        members: MemberSet,
        measurements: Measurements,
        grid: PlanGrid,
        least_probabilities: tuple[float, ...] = (),
    ) -> None:
        self.members, self.grid, self.windows = members, grid, measurements.windows
        self.rule = measurements.rules[0]
        self.verifying = [name for name in members.names if name in measurements.verifying]
        lengths = tuple(sorted(grid.flush_lengths))
        if len(self.verifying) > 2:
            lengths = lengths[::2]
        self.axes: dict[str, tuple[Any, ...]] = {}
        if len(self.verifying) < len(members.names):
            drafter = members.names[-1]
            self.axes |= tree_axes(measurements, grid, drafter, self.verifying[-1])
            self.axes["least_probability"] = (0.0, *least_probabilities)
        self.axes |= {f"flush {name}": lengths for name in self.verifying[:-1]}
        if members.has_ngram:
            self.axes["min_match"] = ngram_matches(measurements, grid)
            if "depth" in self.axes and has_best_paths(measurements, members.names[-1]):
                self.axes["extends"] = (False, True)

    @property
    def sizes(self) -> list[int]:
        return [len(values) for values in self.axes.values()]

    def points(self) -> Iterator[Point]:
        return product(*(range(size) for size in self.sizes))

    def coarse_points(self) -> Iterator[Point]:
        """Both ends and the middle of each axis."""
        return product(*(sorted({0, size // 2, size - 1}) for size in self.sizes))

    def neighbours(self, point: Point) -> Iterator[Point]:
        """One or two steps along each axis, and one step along two."""
        steps: list[dict[int, int]] = []
        axes = range(len(point))
        for axis in axes:
            steps += [{axis: step} for step in (-2, -1, 1, 2)]
        for first, second in combinations(axes, 2):
            steps += [{first: a, second: b} for a in (-1, 1) for b in (-1, 1)]
        for step in steps:
            moved = tuple(place + step.get(axis, 0) for axis, place in enumerate(point))
            if all(0 <= place < size for place, size in zip(moved, self.sizes, strict=True)):
                yield moved

    def largest_trees(self, plan: Plan) -> list[Point]:
        """A plan's other numbers, with the largest trees and each least probability."""
        numbers = {f"flush {name}": flush.length for name, flush in plan.flush.items()}
        numbers |= {"top_k": plan.tree.top_k}
        if plan.ngram is not None:
            numbers |= {"min_match": plan.ngram.min_match, "extends": plan.ngram.extends}
        places = [
            values.index(numbers[axis]) if axis in numbers else len(values) - 1
            for axis, values in self.axes.items()
        ]
        which = list(self.axes).index("least_probability")
        return [
            (*places[:which], least, *places[which + 1 :]) for least in range(1, self.sizes[which])
        ]

    def plan(self, point: Point) -> Plan:
        value = {
            axis: values[place]
            for (axis, values), place in zip(self.axes.items(), point, strict=True)
        }
        num_tokens = self.grid.ngram_tokens
        if "depth" in value:
            shape = ("depth", "top_k", "rows", "least_probability")
            tree = Tree(**{name: value[name] for name in shape})
        else:
            tree = Tree(depth=1, top_k=1, rows=num_tokens + 1 if self.members.has_ngram else 2)
        ngram = None
        if self.members.has_ngram:
            extends = value.get("extends", False)
            ngram = Ngram(min_match=value["min_match"], num_tokens=num_tokens, extends=extends)
        return Plan(
            members=self.members.names,
            tree=tree,
            flush={name: Flush(length=value[f"flush {name}"]) for name in self.verifying[:-1]},
            ngram=ngram,
            windows=self.windows,
            rule=self.rule,
        )


def tree_axes(
    measurements: Measurements, grid: PlanGrid, drafter: str, verifying: str
) -> dict[str, tuple[int, ...]]:
    """Trees of the grid that were measured; empty if there are none."""
    deepest = measurements.measured_depths(drafter, verifying)
    top_ks = tuple(sorted(top_k for top_k in grid.top_ks if top_k in deepest))
    at_most = min((deepest[top_k] for top_k in top_ks), default=0)
    depths = tuple(sorted(depth for depth in grid.depths if depth <= at_most))
    if not depths:
        return {}
    return {"depth": depths, "top_k": top_ks, "rows": tuple(sorted(grid.rows))}


def least_probabilities(measurements: Measurements, grid: PlanGrid) -> tuple[float, ...]:
    """Those of the grid that were measured."""
    measured = set(measurements.least_probabilities)
    return tuple(sorted(measured.intersection(grid.least_probabilities)))


def has_best_paths(measurements: Measurements, drafter: str) -> bool:
    """Whether it was measured how probable paths of a drafter go on."""
    drafters = [{name for name, _ in trace.best_ranks} for trace in measurements.traces]
    return all(drafter in names for names in drafters)


def ngram_matches(measurements: Measurements, grid: PlanGrid) -> tuple[int, ...]:
    """Shortest matches of the grid that were measured in every trace."""
    measured = [set(trace.ngram or {}) for trace in measurements.traces]
    common = reduce(set.intersection, measured) if measured else set()
    return tuple(sorted(common.intersection(grid.ngram_matches)))
