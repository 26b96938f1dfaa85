"""Which members run, with which trees, flush lengths and rule: the fastest plan, as simulated.

Every set of members that can run is tried with the trees and flush lengths of the grid. If there
are many of them, the search simulates a coarse grid first and climbs from its best points; a test
keeps it within one percent of the exhaustive search. The rule `token` never keeps more than
`block`, from the same draws at the same costs: it is tried with the best plans of `block`.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import combinations, pairwise, product

import numpy as np

from polybasic.chain.formats.plan import AdaptiveFlush, Flush, Ngram, Plan, Rule, Tree, Window
from polybasic.deploy.planner.agreement import acceptance_by_bin
from polybasic.deploy.planner.measurements import Measurements
from polybasic.deploy.planner.prediction import Predicted
from polybasic.deploy.planner.simulation import NUM_DRAWS, Simulator
from polybasic.deploy.settings import PlanGrid

BREAK_EVENS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
BREAK_EVENS_OVER_LINK = (0.02, 0.05, 0.1, *BREAK_EVENS)
"""The slower the target's answers come, the less likely a block may be that is worth another round.
"""
MIN_GAIN = 0.01
"""Share of the time that a member, an adaptive flush or another rule must save to be chosen."""
EXHAUSTIVE_POINTS = 100
"""Up to this many plans of one set of members, all are simulated."""
NUM_CLIMBS = 4


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
        return " -> ".join(self.names) + (" + n-gram" if self.has_ngram else "")


@dataclass(frozen=True)
class Candidate:
    """A plan and its predicted time, by one measurement."""

    members: MemberSet
    plan: Plan
    predicted: Predicted
    measurements: Measurements = field(compare=False, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the members that run."""
        return self.members.names

    @property
    def seconds_per_token(self) -> float:
        return self.predicted.seconds_per_token

    @property
    def milliseconds(self) -> str:
        """The time of a token, as text."""
        return f"{1e3 * self.seconds_per_token:.3g} ms"


@dataclass(frozen=True)
class WindowTrial:
    """How much time windows would save a set of members.

    Attributes:
        best: their best plan with these windows.
        without: their best plan without windows.
        is_taken: whether `best` is now the best plan of the set.
    """

    best: Candidate
    without: Candidate
    is_taken: bool

    @property
    def windows(self) -> dict[str, Window]:
        """By member."""
        return self.best.plan.windows


@dataclass(frozen=True)
class Choice:
    """The outcome of a search.

    Attributes:
        by_members: the best plan of each set of members with the chosen rule, the fastest first; at
            least one.
        num_simulated: plans that were simulated.
        other_rules: the best plan of each other rule that was compared, the fastest first.
        windows: window lengths of the grid.
        window_trials: windows that were tried.
    """

    by_members: tuple[Candidate, ...]
    num_simulated: int
    other_rules: tuple[Candidate, ...] = ()
    windows: tuple[int, ...] = ()
    window_trials: tuple[WindowTrial, ...] = ()

    @property
    def best(self) -> Candidate:
        """The fastest plan, or one with fewer of its members that is as good.

        Members that save less than `MIN_GAIN` are left out: predictions are no more precise.
        """
        fastest = self.by_members[0]
        as_good = [
            one
            for one in self.by_members
            if one.members.is_part_of(fastest.members)
            and (1 - MIN_GAIN) * one.seconds_per_token <= fastest.seconds_per_token
        ]
        return min(as_good, key=lambda one: len(one.names) + one.members.has_ngram)

    @property
    def rule(self) -> Rule:
        """The chosen one, which all plans have but those of other rules."""
        return self.by_members[0].plan.rule

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest plan of other members; None if there are none."""
        best = self.best
        return next((one for one in self.by_members if one is not best), None)

    @property
    def alone(self) -> Candidate:
        """The plan of the target alone."""
        return next(
            one for one in self.by_members if one.members == MemberSet(one.names[:1], False)
        )

    def best_with(self, name: str) -> Candidate | None:
        """The best plan in which this member runs; None if it cannot run."""
        return next((one for one in self.by_members if name in one.names), None)

    def best_without(self, name: str) -> Candidate:
        """The best plan in which this member, not the target, does not run."""
        return next(one for one in self.by_members if name not in one.names)

    def best_by_ngram(self, has_ngram: bool) -> Candidate | None:
        """The best plan with n-gram drafts, or without; None if there is none."""
        return next((one for one in self.by_members if one.members.has_ngram == has_ngram), None)


def choose_plan(
    measurements: Sequence[Measurements],
    grid: PlanGrid,
    seed: int = 0,
    num_draws: int = NUM_DRAWS,
    among: Collection[tuple[Rule, MemberSet]] | None = None,
    simulator: Simulator | None = None,
) -> Choice:
    """The fastest plan of every set of members, with the rule of the fastest of all.

    Args:
        measurements: for each rule or several; earlier ones are preferred where they are as good.
        grid: trees and flush lengths; only trees that were measured are used.
        seed: of the simulation's uniforms.
        num_draws: see `Simulator`.
        among: rules and sets to consider; None for all.
        simulator: of measurements that differ in seconds alone; its rounds are played only once.

    Raises:
        UserError: a measurement without traces.
    """
    by_rule: dict[Rule, Choice] = {}
    for one in measurements:
        simulating = simulator.at(one) if simulator else Simulator(one, seed, num_draws)
        best_rule, *others = one.rules
        found: list[Candidate] = []
        num_simulated = 0
        for members in member_sets(one, grid):
            if among is None or (best_rule, members) in among:
                best, num = _best_plan(members, simulating, grid)
                num_simulated += num
                found.append(best)
        if found:
            by_rule[best_rule] = Choice(fastest_first(found), num_simulated)
        for rule in others if found else ():
            again = [_with_rule(candidate, rule, simulating) for candidate in found]
            by_rule[rule] = Choice(fastest_first(again), len(again))
    fastest = min(choice.best.seconds_per_token for choice in by_rule.values())
    chosen = next(
        choice
        for choice in by_rule.values()
        if (1 - MIN_GAIN) * choice.best.seconds_per_token <= fastest
    )
    return replace(
        chosen,
        num_simulated=sum(choice.num_simulated for choice in by_rule.values()),
        other_rules=fastest_first(one.best for one in by_rule.values() if one is not chosen),
        windows=grid.windows,
    )


def fastest_first(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """The same, sorted by their times."""
    return tuple(sorted(candidates, key=lambda one: one.seconds_per_token))


def _with_rule(candidate: Candidate, rule: Rule, simulator: Simulator) -> Candidate:
    plan = candidate.plan.model_copy(update={"rule": rule})
    return replace(candidate, plan=plan, predicted=simulator.run(plan))


def choose_windows(
    choice: Choice,
    windowed: Sequence[Measurements],
    grid: PlanGrid,
    seed: int = 0,
    num_draws: int = NUM_DRAWS,
) -> Choice:
    """The same choice, with windows where they save enough.

    Args:
        choice: without windows.
        windowed: measurements with windows, for the chosen rule, on the same scale as those
            without.

    The other arguments are those of `choose_plan`.
    """
    tried: dict[MemberSet, list[Candidate]] = {one.members: [] for one in choice.by_members}
    num_simulated = choice.num_simulated
    for measurements in windowed:
        simulator = Simulator(measurements, seed, num_draws)
        for members in member_sets(measurements, grid):
            if members in tried and set(measurements.windows) <= set(members.names):
                best, num = _best_plan(members, simulator, grid)
                tried[members].append(best)
                num_simulated += num
    found: list[Candidate] = []
    trials: list[WindowTrial] = []
    for without in choice.by_members:
        best = _fewest_windows_that_pay(without, tried[without.members])
        found.append(best)
        trials += [WindowTrial(one, without, one is best) for one in tried[without.members]]
    return replace(
        choice,
        by_members=fastest_first(found),
        num_simulated=num_simulated,
        window_trials=tuple(trials),
    )


def _fewest_windows_that_pay(without: Candidate, tried: Sequence[Candidate]) -> Candidate:
    """The fastest plan, ignoring windows that save less than `MIN_GAIN` over fewer windows."""
    best = without
    for num in sorted({len(one.plan.windows) for one in tried}):
        same_number = [one for one in tried if len(one.plan.windows) == num]
        fastest = min(same_number, key=lambda one: one.seconds_per_token)
        if fastest.seconds_per_token <= (1 - MIN_GAIN) * best.seconds_per_token:
            best = fastest
    return best


def member_sets(measurements: Measurements, grid: PlanGrid) -> list[MemberSet]:
    """Every set of measured members that can run: the target, some intermediates, a drafter for
    the innermost verifier or none, with n-grams or without. A target over a link has no drafter:
    its states are not on this side, and no trees on the way."""
    target, *intermediates = measurements.verifying
    intermediates = [name for name in intermediates if name in measurements.passes]
    has_ngrams = [False]
    if _ngram_matches(measurements, grid):
        has_ngrams.append(True)
    found: list[MemberSet] = []
    for num in range(len(intermediates) + 1):
        for chosen in combinations(intermediates, num):
            verifying = (target, *chosen)
            is_far = not chosen and measurements.link is not None
            drafters = [
                (name,)
                for name, drafts_for in measurements.drafters.items()
                if verifying[-1] in drafts_for
                and not is_far
                and _tree_axes(measurements, grid, name, verifying[-1])
            ]
            found += [
                MemberSet((*verifying, *drafter), has_ngram)
                for drafter in [(), *drafters]
                for has_ngram in has_ngrams
            ]
    return found


def candidate_plans(measurements: Measurements, grid: PlanGrid) -> Iterator[Plan]:
    """Every plan of the grid with fixed flush lengths."""
    for members in member_sets(measurements, grid):
        lattice = _Lattice(members, measurements, grid)
        for point in lattice.points():
            yield lattice.plan(point)


def _best_plan(members: MemberSet, simulator: Simulator, grid: PlanGrid) -> tuple[Candidate, int]:
    """The best plan of a set of members, and the number of plans simulated."""
    search = _Search(simulator, _Lattice(members, simulator.measurements, grid))
    best, num_adaptive = _with_adaptive_flush(search.run(), simulator, grid)
    return best, search.num_simulated + num_adaptive


_Point = tuple[int, ...]
"""A place on each axis of a lattice."""


class _Lattice:
    """The plans of one set of members, as points of a grid of ordered axes."""

    def __init__(self, members: MemberSet, measurements: Measurements, grid: PlanGrid) -> None:
        self.members, self.grid, self.windows = members, grid, measurements.windows
        self.rule = measurements.rules[0]
        self.verifying = [name for name in members.names if name in measurements.verifying]
        lengths = tuple(sorted(grid.flush_lengths))
        if len(self.verifying) > 2:
            lengths = lengths[::2]
        self.axes: dict[str, tuple[int, ...]] = {}
        if len(self.verifying) < len(members.names):
            drafter = members.names[-1]
            self.axes |= _tree_axes(measurements, grid, drafter, self.verifying[-1])
        self.axes |= {f"flush {name}": lengths for name in self.verifying[:-1]}
        if members.has_ngram:
            self.axes["min_match"] = _ngram_matches(measurements, grid)

    @property
    def sizes(self) -> list[int]:
        return [len(values) for values in self.axes.values()]

    def points(self) -> Iterator[_Point]:
        return product(*(range(size) for size in self.sizes))

    def coarse_points(self) -> Iterator[_Point]:
        """Both ends and the middle of each axis."""
        return product(*(sorted({0, size // 2, size - 1}) for size in self.sizes))

    def neighbours(self, point: _Point) -> Iterator[_Point]:
        """One or two steps along each axis, and one step along two."""
        steps: list[dict[int, int]] = []
        axes = range(len(point))
        for axis in axes:
            steps += [{axis: step} for step in (-2, -1, 1, 2)]
        for one, other in combinations(axes, 2):
            steps += [{one: a, other: b} for a in (-1, 1) for b in (-1, 1)]
        for step in steps:
            moved = tuple(place + step.get(axis, 0) for axis, place in enumerate(point))
            if all(0 <= place < size for place, size in zip(moved, self.sizes, strict=True)):
                yield moved

    def plan(self, point: _Point) -> Plan:
        value = {
            axis: values[place]
            for (axis, values), place in zip(self.axes.items(), point, strict=True)
        }
        num_tokens = self.grid.ngram_tokens
        if "depth" in value:
            tree = Tree(depth=value["depth"], top_k=value["top_k"], rows=value["rows"])
        else:
            tree = Tree(depth=1, top_k=1, rows=num_tokens + 1 if self.members.has_ngram else 2)
        ngram = None
        if self.members.has_ngram:
            ngram = Ngram(min_match=value["min_match"], num_tokens=num_tokens)
        return Plan(
            members=self.members.names,
            tree=tree,
            flush={name: Flush(length=value[f"flush {name}"]) for name in self.verifying[:-1]},
            ngram=ngram,
            windows=self.windows,
            rule=self.rule,
        )


class _Search:
    """Finds the best point of a lattice."""

    def __init__(self, simulator: Simulator, lattice: _Lattice) -> None:
        self.simulator, self.lattice = simulator, lattice
        self._simulated: dict[_Point, Candidate] = {}

    @property
    def num_simulated(self) -> int:
        return len(self._simulated)

    def run(self) -> Candidate:
        lattice = self.lattice
        if np.prod(lattice.sizes, initial=1) <= EXHAUSTIVE_POINTS:
            return self._simulate(min(lattice.points(), key=self._seconds))
        starts = sorted(lattice.coarse_points(), key=self._seconds)[:NUM_CLIMBS]
        return self._simulate(min(map(self._climb, starts), key=self._seconds))

    def _climb(self, point: _Point) -> _Point:
        while True:
            best = min(self.lattice.neighbours(point), key=self._seconds)
            if self._seconds(best) >= self._seconds(point):
                return point
            point = best

    def _seconds(self, point: _Point) -> float:
        return self._simulate(point).seconds_per_token

    def _simulate(self, point: _Point) -> Candidate:
        if point not in self._simulated:
            plan = self.lattice.plan(point)
            predicted = self.simulator.run(plan)
            self._simulated[point] = Candidate(
                self.lattice.members, plan, predicted, self.simulator.measurements
            )
        return self._simulated[point]


def _with_adaptive_flush(
    fixed: Candidate, simulator: Simulator, grid: PlanGrid
) -> tuple[Candidate, int]:
    """The plan with adaptive flushes if they save enough, and the number of plans simulated."""
    best, num_simulated = fixed, 0
    for above, below in pairwise(fixed.names):
        if above not in fixed.plan.flush:
            continue
        acceptance = acceptance_by_bin(simulator.measurements, above, below)
        adaptive: list[Candidate] = []
        is_over_link = simulator.measurements.link is not None
        break_evens = BREAK_EVENS_OVER_LINK if is_over_link else BREAK_EVENS
        for flush in _adaptive_flushes(best.plan.flush[above], acceptance, grid, break_evens):
            plan = best.plan.model_copy(update={"flush": best.plan.flush | {above: flush}})
            predicted = simulator.run(plan)
            adaptive.append(Candidate(fixed.members, plan, predicted, simulator.measurements))
        num_simulated += len(adaptive)
        fastest = min(adaptive, key=lambda one: one.seconds_per_token)
        if fastest.seconds_per_token <= (1 - MIN_GAIN) * best.seconds_per_token:
            best = fastest
    return best, num_simulated


def _adaptive_flushes(
    fixed: Flush, acceptance: tuple[float, ...], grid: PlanGrid, break_evens: Sequence[float]
) -> Iterator[Flush]:
    """With the maximum length of the fixed one, of the next two of the grid, and of its last."""
    longer = sorted(length for length in grid.flush_lengths if length > fixed.length)
    for length in sorted({fixed.length, *longer[:2], *longer[-1:]}):
        for break_even in break_evens:
            adaptive = AdaptiveFlush(break_even=break_even, acceptance=acceptance)
            yield Flush(length=length, adaptive=adaptive)


def _tree_axes(
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


def _ngram_matches(measurements: Measurements, grid: PlanGrid) -> tuple[int, ...]:
    """Shortest matches of the grid that were measured in every trace."""
    measured = [set(trace.ngram or {}) for trace in measurements.traces]
    common = reduce(set.intersection, measured) if measured else set()
    return tuple(sorted(common.intersection(grid.ngram_matches)))
