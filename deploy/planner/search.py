"""Which members run, with which trees, block lengths and rule: the fastest plan, as simulated.

Every set of members that can run is tried with the trees and block lengths of the grid. If there
are many of them, the search simulates a coarse grid first and climbs from its best points; a test
keeps it within one percent of the exhaustive search. The rule `token` never keeps more than
`block`, from the same draws at the same costs: it is tried with the best plans of `block`.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

import numpy as np

from polybasic.chain.formats.plan import AdaptiveFlush, Flush, Plan, Rule, Window
from polybasic.deploy.planner.lattice import (
    Lattice,
    MemberSet,
    Point,
    least_probabilities,
    ngram_matches,
    tree_axes,
)
from polybasic.deploy.planner.measuring.agreement import acceptance_by_bin
from polybasic.deploy.planner.measuring.measurements import Measurements
from polybasic.deploy.planner.prediction import Predicted
from polybasic.deploy.planner.settings import PlanGrid
from polybasic.deploy.planner.simulation import NUM_DRAWS, Simulator

BREAK_EVENS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
BREAK_EVENS_OVER_LINK = (0.02, 0.05, 0.1, *BREAK_EVENS)
"""The slower the target's answers come, the less likely a block may be that is worth another round.
"""
MIN_GAIN = 0.01
"""Share of the time that a member, an adaptive flush or another rule must save to be chosen."""
MIN_GAIN_OF_LEAST_PROBABILITY = 0.03
"""The same of a least probability: trees of many sizes are predicted less well."""
EXHAUSTIVE_POINTS = 100
"""Up to this many plans of one set of members, all are simulated."""
NUM_CLIMBS = 4


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
class PlanChoice:
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
            candidate
            for candidate in self.by_members
            if candidate.members.is_part_of(fastest.members)
            and (1 - MIN_GAIN) * candidate.seconds_per_token <= fastest.seconds_per_token
        ]
        return min(
            as_good, key=lambda candidate: len(candidate.names) + candidate.members.has_ngram
        )

    @property
    def rule(self) -> Rule:
        """The chosen one, which all plans have but those of other rules."""
        return self.by_members[0].plan.rule

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest plan of other members; None if there are none."""
        best = self.best
        return next((candidate for candidate in self.by_members if candidate is not best), None)

    @property
    def alone(self) -> Candidate:
        """The plan of the target alone."""
        return next(
            candidate
            for candidate in self.by_members
            if candidate.members == MemberSet(candidate.names[:1], False)
        )

    def best_with(self, name: str) -> Candidate | None:
        """The best plan in which this member runs; None if it cannot run."""
        return next((candidate for candidate in self.by_members if name in candidate.names), None)

    def best_without(self, name: str) -> Candidate:
        """The best plan in which this member, not the target, does not run."""
        return next(candidate for candidate in self.by_members if name not in candidate.names)

    def best_by_ngram(self, has_ngram: bool) -> Candidate | None:
        """The best plan with n-gram drafts, or without; None if there is none."""
        return next(
            (
                candidate
                for candidate in self.by_members
                if candidate.members.has_ngram == has_ngram
            ),
            None,
        )


def choose_plan(
    measurements: Sequence[Measurements],
    grid: PlanGrid,
    seed: int = 0,
    num_draws: int = NUM_DRAWS,
    among: Collection[tuple[Rule, MemberSet]] | None = None,
    simulators: Sequence[Simulator] = (),
) -> PlanChoice:
    """The fastest plan of every set of members, with the rule of the fastest of all.

    Args:
        measurements: for each rule or several; earlier ones are preferred where they are as good.
        grid: trees and block lengths; only trees that were measured are used.
        seed: of the simulation's uniforms.
        num_draws: see `Simulator`.
        among: rules and sets to consider; None for all.
        simulators: one for each of the measurements, of some that differ in seconds alone; their
            rounds are played only once.

    Raises:
        UserError: a measurement without traces.
    """
    by_rule: dict[Rule, PlanChoice] = {}
    simulators = simulators or [Simulator(each, seed, num_draws) for each in measurements]
    for simulator, measurement in zip(simulators, measurements, strict=True):
        simulating = simulator.at(measurement)
        best_rule, *others = measurement.rules
        candidates: list[Candidate] = []
        num_simulated = 0
        for members in member_sets(measurement, grid):
            if among is None or (best_rule, members) in among:
                best, num = _best_plan(members, simulating, grid)
                num_simulated += num
                candidates.append(best)
        if candidates:
            by_rule[best_rule] = PlanChoice(fastest_first(candidates), num_simulated)
        for rule in others if candidates else ():
            again = [_with_rule(candidate, rule, simulating) for candidate in candidates]
            by_rule[rule] = PlanChoice(fastest_first(again), len(again))
    fastest = min(choice.best.seconds_per_token for choice in by_rule.values())
    chosen = next(
        choice
        for choice in by_rule.values()
        if (1 - MIN_GAIN) * choice.best.seconds_per_token <= fastest
    )
    return replace(
        chosen,
        num_simulated=sum(choice.num_simulated for choice in by_rule.values()),
        other_rules=fastest_first(
            choice.best for choice in by_rule.values() if choice is not chosen
        ),
        windows=grid.windows,
    )


def fastest_first(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """The same, sorted by their times."""
    return tuple(sorted(candidates, key=lambda candidate: candidate.seconds_per_token))


def _with_rule(candidate: Candidate, rule: Rule, simulator: Simulator) -> Candidate:
    plan = candidate.plan.model_copy(update={"rule": rule})
    return replace(candidate, plan=plan, predicted=simulator.run(plan))


def choose_windows(
    choice: PlanChoice,
    windowed: Sequence[Measurements],
    grid: PlanGrid,
    seed: int = 0,
    num_draws: int = NUM_DRAWS,
) -> PlanChoice:
    """The same choice, with windows where they save enough.

    Args:
        choice: without windows.
        windowed: measurements with windows, for the chosen rule, on the same scale as those
            without.

    The other arguments are those of `choose_plan`.
    """
    tried: dict[MemberSet, list[Candidate]] = {
        candidate.members: [] for candidate in choice.by_members
    }
    num_simulated = choice.num_simulated
    for measurements in windowed:
        simulator = Simulator(measurements, seed, num_draws)
        for members in member_sets(measurements, grid):
            if members in tried and set(measurements.windows) <= set(members.names):
                best, num = _best_plan(members, simulator, grid)
                tried[members].append(best)
                num_simulated += num
    candidates: list[Candidate] = []
    trials: list[WindowTrial] = []
    for without in choice.by_members:
        best = _fewest_windows_that_pay(without, tried[without.members])
        candidates.append(best)
        trials += [
            WindowTrial(candidate, without, candidate is best)
            for candidate in tried[without.members]
        ]
    return replace(
        choice,
        by_members=fastest_first(candidates),
        num_simulated=num_simulated,
        window_trials=tuple(trials),
    )


def _fewest_windows_that_pay(without: Candidate, tried: Sequence[Candidate]) -> Candidate:
    """The fastest plan, ignoring windows that save less than `MIN_GAIN` over fewer windows."""
    best = without
    for num in sorted({len(candidate.plan.windows) for candidate in tried}):
        same_number = [candidate for candidate in tried if len(candidate.plan.windows) == num]
        fastest = min(same_number, key=lambda candidate: candidate.seconds_per_token)
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
    if ngram_matches(measurements, grid):
        has_ngrams.append(True)
    sets: list[MemberSet] = []
    for num in range(len(intermediates) + 1):
        for chosen in combinations(intermediates, num):
            verifying = (target, *chosen)
            is_far = not chosen and measurements.link is not None
            drafters = [
                (name,)
                for name, drafts_for in measurements.drafters.items()
                if verifying[-1] in drafts_for
                and not is_far
                and tree_axes(measurements, grid, name, verifying[-1])
            ]
            sets += [
                MemberSet((*verifying, *drafter), has_ngram)
                for drafter in [(), *drafters]
                for has_ngram in has_ngrams
            ]
    return sets


def candidate_plans(measurements: Measurements, grid: PlanGrid) -> Iterator[Plan]:
    """Every plan of the grid with fixed block lengths."""
    for members in member_sets(measurements, grid):
        lattice = Lattice(members, measurements, grid)
        for point in lattice.points():
            yield lattice.plan(point)


def _best_plan(members: MemberSet, simulator: Simulator, grid: PlanGrid) -> tuple[Candidate, int]:
    """The best plan of a set of members, and the number of plans simulated."""
    measurements = simulator.measurements
    search = _Search(simulator, Lattice(members, measurements, grid))
    best, num_simulated = search.run(), search.num_simulated
    least = least_probabilities(measurements, grid)
    if "depth" in search.lattice.axes and least:
        lattice = Lattice(members, measurements, grid, least)
        adaptive = _Search(simulator, lattice)
        fastest = adaptive.run_from(lattice.largest_trees(best.plan))
        num_simulated += adaptive.num_simulated
        most = (1 - MIN_GAIN_OF_LEAST_PROBABILITY) * best.seconds_per_token
        if fastest.seconds_per_token <= most:
            best = fastest
    best, num_adaptive = _with_adaptive_flush(best, simulator, grid)
    return best, num_simulated + num_adaptive


class _Search:
    """Finds the best point of a lattice."""

    def __init__(self, simulator: Simulator, lattice: Lattice) -> None:
        self.simulator, self.lattice = simulator, lattice
        self._simulated: dict[Point, Candidate] = {}

    @property
    def num_simulated(self) -> int:
        return len(self._simulated)

    def run(self) -> Candidate:
        lattice = self.lattice
        if np.prod(lattice.sizes, initial=1) <= EXHAUSTIVE_POINTS:
            return self._simulate(min(lattice.points(), key=self._seconds))
        starts = sorted(lattice.coarse_points(), key=self._seconds)[:NUM_CLIMBS]
        return self.run_from(starts)

    def run_from(self, starts: Iterable[Point]) -> Candidate:
        """The best point that a climb from one of these ends at."""
        return self._simulate(min(map(self._climb, starts), key=self._seconds))

    def _climb(self, point: Point) -> Point:
        while True:
            best = min(self.lattice.neighbours(point), key=self._seconds)
            if self._seconds(best) >= self._seconds(point):
                return point
            point = best

    def _seconds(self, point: Point) -> float:
        return self._simulate(point).seconds_per_token

    def _simulate(self, point: Point) -> Candidate:
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
        fastest = min(adaptive, key=lambda candidate: candidate.seconds_per_token)
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
