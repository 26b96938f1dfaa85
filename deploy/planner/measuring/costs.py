"""What rounds cost on this machine, timed in real answers.

Rounds are timed in place and not as passes in a loop: which weights are in a processor's caches
depends on the models that ran before, and a round does more than its pass. On a GPU these are
rounds of graphs captured earlier, within which the host does not wait.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, cycle, product, zip_longest
from statistics import mean
from typing import Any

import numpy as np
import torch

from polybasic.chain.base.progress import tracked
from polybasic.chain.formats.plan import Flush, Ngram, Plan, Rule, Tree, Window
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.planner.measuring.measurements import DraftCosts, PassCosts, num_candidates
from polybasic.deploy.planner.settings import PlanGrid
from polybasic.deploy.runtime.drafters.ngram import NgramDrafter
from polybasic.deploy.runtime.engine import Engine
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.flushing import Flushing
from polybasic.deploy.runtime.rounds.passes import Passes
from polybasic.deploy.runtime.rounds.sampling import Sampling
from polybasic.deploy.runtime.rounds.stages import (
    BaseBlockStage,
    BaseTreeStage,
    Block,
    Round,
    Stage,
)
from polybasic.deploy.runtime.rounds.verifier import PassClock

LEAST_TREE = Tree(depth=1, top_k=1, rows=2)
"""Of plans without drafts."""
MIN_SAMPLES = 5
"""Fewest rounds of a row count from which its cost is estimated."""
NUM_TURNS = 3
"""Times that every shape is run, in turns, so that drift affects all alike."""
COST_TOKENS = 48
"""Tokens of an answer that serves only for timing."""


def measure_costs(
    engine: Engine,
    prompts: Sequence[list[int]],
    stop_tokens: frozenset[int],
    sampling: Sampling,
    grid: PlanGrid,
    rules: Sequence[Rule],
    budget: Budget,
    share: float,
) -> "tuple[RoundCosts, ...]":
    """Time the rounds of every set of members that can run, over the shapes of the grid.

    Args:
        prompts: answered in turns, one for each shape, by each rule.
        share: of the budget, by whose end it is over.

    Returns:
        Those of each rule.
    """
    costs = {rule: RoundCosts() for rule in rules}
    plans = _plans_to_time(engine, grid)
    timings = [
        (prompt, plan.model_copy(update={"rule": rule}))
        for plan, prompt in zip(NUM_TURNS * plans, cycle(prompts), strict=False)
        for rule in rules
    ]
    num = len(plans) * len(rules)
    if engine.models.target.device.type == "cuda":
        # kernels are compiled, and the fastest ones chosen, when they first run
        for prompt, plan in timings[:num]:
            time_plan(engine, prompt, plan, stop_tokens, sampling, RoundCosts())
    for prompt, plan in budget.within(timings, share, "timings of rounds", num):
        time_plan(engine, prompt, plan, stop_tokens, sampling, costs[plan.rule])
    for prompt, plan in timings[: len(rules)]:
        if next(iter(engine.verifiers)) not in costs[plan.rule].passes():
            # answers that end at once, or no time left
            time_plan(engine, prompt, plan, frozenset(), sampling, costs[plan.rule])
    return tuple(costs.values())


def time_plan(
    engine: Engine,
    prompt: list[int],
    plan: Plan,
    stop_tokens: frozenset[int],
    sampling: Sampling,
    costs: "RoundCosts",
) -> None:
    """Answer once by a plan, and add its rounds to the costs."""
    _time_rounds(engine, Request(prompt, COST_TOKENS, sampling, stop_tokens, plan), costs)


def compare_costs(
    engine: Engine,
    prompts: Sequence[list[int]],
    plans: Sequence[Plan],
    windows: Sequence[Mapping[str, Window]],
    stop_tokens: frozenset[int],
    sampling: Sampling,
) -> list[tuple["RoundCosts", "RoundCosts"]]:
    """Time plans without and with windows, in turns and on the same prompts.

    Args:
        prompts: each is answered by every plan.
        plans: without windows.
        windows: by member; plans are timed if all of these members run in them.

    Returns:
        For each of `windows`, the same plans without and with them.
    """
    pairs = [(RoundCosts(), RoundCosts()) for _ in windows]

    def timed(prompt: list[int], plan: Plan) -> RoundCosts:
        costs = RoundCosts()
        time_plan(engine, prompt, plan, stop_tokens, sampling, costs)
        return costs

    for prompt, plan in tracked(list(product(prompts, plans)), "windows timed"):
        without = timed(prompt, plan)
        for by_member, (costs_without, costs_with) in zip(windows, pairs, strict=True):
            if set(by_member) <= set(plan.members):
                costs_without.add(without)
                costs_with.add(timed(prompt, plan.model_copy(update={"windows": dict(by_member)})))
    return pairs


def _plans_to_time(engine: Engine, grid: PlanGrid) -> list[Plan]:
    """The target alone, then a plan of each set of members, then the next one of each."""
    by_members: dict[Any, list[Plan]] = defaultdict(list)
    for plan in _plans_by_members(engine, grid):
        by_members[plan.members, plan.ngram].append(plan)
    return [plan for turn in zip_longest(*by_members.values()) for plan in turn if plan is not None]


def _plans_by_members(engine: Engine, grid: PlanGrid) -> Iterator[Plan]:
    target, *intermediates = engine.verifiers
    flushes = cycle(_spread(grid.flush_lengths))
    for num in range(len(intermediates) + 1):
        for chosen in combinations(intermediates, num):
            verifying = (target, *chosen)
            flush = {name: Flush(length=next(flushes)) for name in verifying[:-1]}
            yield Plan(members=verifying, tree=LEAST_TREE, flush=flush)
            for drafter in engine.models.drafters_of(verifying[-1]):
                for tree in _trees_to_time(grid):
                    flush = {name: Flush(length=next(flushes)) for name in verifying[:-1]}
                    yield Plan(members=(*verifying, drafter), tree=tree, flush=flush)
    if grid.ngram_matches:
        tree = Tree(depth=1, top_k=1, rows=grid.ngram_tokens + 1)
        ngram = Ngram(min_match=min(grid.ngram_matches), num_tokens=grid.ngram_tokens)
        yield Plan(members=(target,), tree=tree, ngram=ngram)


def _trees_to_time(grid: PlanGrid) -> list[Tree]:
    """Every top_k at the smallest, a middle and the largest depth, and every number of rows.

    The smallest comes first, then the largest, the second smallest and so on: between them costs
    are nearly a line. Trees with a least probability have all sizes.
    """
    shapes = [(depth, top_k) for depth in _spread(grid.depths) for top_k in grid.top_ks]
    num = max(len(shapes), len(grid.rows))
    trees = [
        Tree(depth=depth, top_k=top_k, rows=rows)
        for (depth, top_k), rows, _ in zip(cycle(shapes), cycle(grid.rows), range(num))
    ]
    trees.sort(key=lambda tree: min(tree.rows, 1 + num_candidates(tree.depth, tree.top_k)))
    trees = [trees.pop(-1 if place % 2 else 0) for place in range(len(trees))]
    if grid.least_probabilities:
        least = sorted(grid.least_probabilities)[len(grid.least_probabilities) // 2]
        largest = {"depth": max(grid.depths), "rows": max(grid.rows), "top_k": min(grid.top_ks)}
        trees.insert(2, Tree(**largest, least_probability=least))
    return trees


def _spread(values: Sequence[int]) -> list[int]:
    """The smallest, a middle and the largest."""
    ordered = sorted(values)
    return sorted({ordered[0], ordered[len(ordered) // 2], ordered[-1]})


@torch.inference_mode()
def _time_rounds(engine: Engine, request: Request, costs: "RoundCosts") -> None:
    """Answer once, using stages that time their rounds."""
    watch = _Watch(engine, request.plan.members[-1], costs)

    def timed(kind: type, *arguments: Any) -> Stage:
        stage = _timed_kind(kind)(*arguments)
        stage.watch = watch
        watch.root = stage  # which is made last
        return stage

    for _ in engine.pieces_of(engine.begin(request, make=timed)):
        pass


@dataclass
class RoundCosts:
    """Seconds of real rounds, and their means; see `_mean`.

    Attributes:
        trees: (verifying member, rows) -> seconds of its tree rounds, without the draft; what the
            engine does between two rounds of the target belongs to the later one.
        blocks: the same for its block rounds, without the stages below.
        levels: (drafter, top_k, depth) -> seconds of a draft.
        copies: seconds of n-gram drafts.
    """

    trees: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    blocks: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    levels: dict[tuple[str, int, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    copies: list[float] = field(default_factory=list)

    def add(self, other: "RoundCosts") -> None:
        """Add the other's rounds."""
        for key, seconds in other.trees.items():
            self.trees[key] += seconds
        for key, seconds in other.blocks.items():
            self.blocks[key] += seconds
        for shape, seconds in other.levels.items():
            self.levels[shape] += seconds
        self.copies += other.copies

    def passes(self) -> dict[str, PassCosts]:
        """Mean seconds of a tree round by its rows, which more rows do not make cheaper."""
        by_member: dict[str, dict[int, float]] = defaultdict(dict)
        for (name, rows), seconds in sorted(self.trees.items()):
            if len(seconds) >= MIN_SAMPLES:
                by_member[name][rows] = _mean(seconds)
        return {
            name: PassCosts(
                tuple(by_rows),
                _increasing(by_rows.values(), [len(self.trees[name, rows]) for rows in by_rows]),
            )
            for name, by_rows in by_member.items()
        }

    def block_overheads(self) -> dict[str, float]:
        """Mean seconds of a block round beyond a tree round over as many rows; at least 0, however
        noisy the machine."""
        passes = self.passes()
        beyond: dict[str, list[float]] = defaultdict(list)
        for (name, rows), seconds in self.blocks.items():
            if name in passes:
                beyond[name] += [sample - passes[name].at(rows) for sample in seconds]
        return {name: max(_mean(beyond[name]), 0.0) if name in beyond else 0.0 for name in passes}

    def draft_means(self, name: str) -> dict[tuple[int, int], float]:
        """Mean seconds of a drafter's drafts, by (top_k, depth)."""
        return {
            (top_k, depth): _mean(seconds)
            for (drafter, top_k, depth), seconds in self.levels.items()
            if drafter == name and len(seconds) >= MIN_SAMPLES
        }

    def drafts(self) -> dict[str, DraftCosts]:
        """For each top_k, a line fitted to the mean seconds of drafts by depth."""
        lines: dict[str, dict[int, tuple[float, float]]] = {}
        for name in dict.fromkeys(name for name, _, _ in self.levels):
            by_top_k: dict[int, dict[int, float]] = defaultdict(dict)
            for (top_k, depth), seconds in self.draft_means(name).items():
                by_top_k[top_k][depth] = seconds
            if by_top_k:
                lines[name] = {
                    top_k: _line(
                        means, {depth: len(self.levels[name, top_k, depth]) for depth in means}
                    )
                    for top_k, means in by_top_k.items()
                }
        return {name: DraftCosts(by_top_k) for name, by_top_k in lines.items()}

    def rounds(self, name: str) -> dict[int, float]:
        """Mean seconds of a member's rounds of either kind, by their rows."""
        by_rows: dict[int, list[float]] = defaultdict(list)
        for (member, rows), seconds in (*self.trees.items(), *self.blocks.items()):
            if member == name:
                by_rows[rows] += seconds
        return {
            rows: _mean(seconds) for rows, seconds in by_rows.items() if len(seconds) >= MIN_SAMPLES
        }

    def ngram_seconds(self) -> float:
        return _mean(self.copies) if self.copies else 0.0


def _mean(values: list[float]) -> float:
    """The mean without the largest and smallest twentieth.

    A plan takes the sum of all its rounds, hence no median; trimming removes other load on the
    machine.
    """
    ordered = sorted(values)
    cut = len(ordered) // 20
    return mean(ordered[cut : len(ordered) - cut])


def _increasing(values: Iterable[float], weights: Iterable[float]) -> tuple[float, ...]:
    """Of the sequences that never fall the nearest to these values.

    By the pool-adjacent-violators algorithm (Ayer et al., 1955).

    Args:
        weights: of the squared distances.
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for value, weight in zip(values, weights, strict=True):
        pool = (value, float(weight), 1)
        while pools and pools[-1][0] >= pool[0]:
            both = pools.pop(), pool
            total = sum(weight for _, weight, _ in both)
            joint = sum(value * weight for value, weight, _ in both) / total
            pool = (joint, total, sum(num for _, _, num in both))
        pools.append(pool)
    return tuple(value for value, _, num in pools for _ in range(num))


def _line(by_depth: dict[int, float], counts: dict[int, int]) -> tuple[float, float]:
    """Seconds of the first level and of each further one, by means of so many drafts.

    If only one depth was measured, or noise would make one of the two negative, all levels are
    assumed to cost the same.
    """
    depths = np.array(sorted(by_depth))
    seconds = np.array([by_depth[depth] for depth in depths])
    if len(depths) > 1:
        weights = np.sqrt([counts[depth] for depth in depths])
        each, first = np.polyfit(depths - 1, seconds, 1, w=weights)
        if each >= 0 and first > 0:
            return float(first), float(each)
    level = float(np.median(seconds / depths))
    return level, level


class _Watch:
    """The clock and the results that the timed stages of an answer share.

    Args:
        drafter: name of the last member.

    Attributes:
        root: the stage of the target.
    """

    root: Stage

    def __init__(self, engine: Engine, drafter: str, costs: RoundCosts) -> None:
        self.drafter, self.costs = drafter, costs
        self.device, self._graphs = engine.models.target.device, engine.graphs
        self._root_ended: float | None = None

    def now(self) -> float:
        """Seconds, once the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def begin(self, stage: Stage) -> float:
        """When a stage's next round begins: for the root when the one before has ended."""
        ended = self._root_ended if stage is self.root else None
        return self.now() if ended is None else ended

    def end(self, stage: Stage) -> float:
        """When a stage's round has ended: now."""
        now = self.now()
        if stage is self.root:
            self._root_ended = now
        return now

    @property
    def num_captured(self) -> int:
        """Graphs captured so far: a round that captures one is not representative."""
        return self._graphs.counts.captures


class _TimedStage:
    """Adds up the seconds of its blocks."""

    watch: _Watch
    seconds: float = 0.0

    def propose(
        self, num_tokens: int, limit: int, flushing: Flushing | None = None
    ) -> Passes[Block]:
        begin = self.watch.now()
        block: Block = yield from super().propose(num_tokens, limit, flushing)  # type: ignore[misc]
        self.seconds += self.watch.now() - begin
        return block


class _TimedTree(_TimedStage, BaseTreeStage):
    """Times its rounds and their drafts separately."""

    def _round(self, limit: int) -> Passes[Round]:
        watch, rows, num_captured = self.watch, self.verifier.num_rows, self.watch.num_captured
        self._draft_clock, self._num_levels = PassClock(watch.device), 0
        begin = watch.begin(self)
        outcome = yield from super()._round(limit)
        seconds = watch.end(self) - begin
        if watch.num_captured == num_captured:
            drafting = self._draft_clock.seconds
            rows = self.verifier.num_rows - rows
            watch.costs.trees[self.verifier.name, rows].append(seconds - drafting)
            self._take_draft(drafting)
        return outcome

    def _draft(self, limit: int) -> Passes[Any]:
        clock = self.drafter.clock
        num_before = 0 if clock is None else clock.num_levels
        with self._draft_clock.running(num_passes=1):
            tree = yield from super()._draft(limit)  # type: ignore[safe-super]
        if clock is not None:
            self._num_levels = clock.num_levels - num_before
        return tree

    def _take_draft(self, seconds: float) -> None:
        costs, top_k = self.watch.costs, self.drafter.tree.top_k
        if self._num_levels:
            costs.levels[self.watch.drafter, top_k, self._num_levels].append(seconds)
        elif isinstance(self.drafter, NgramDrafter):
            costs.copies.append(seconds)


class _TimedBlock(_TimedStage, BaseBlockStage):
    """Times its rounds without the stages below."""

    below: "_TimedTree | _TimedBlock"

    def _round(self, limit: int) -> Passes[Round]:
        watch, rows, num_captured = self.watch, self.verifier.num_rows, self.watch.num_captured
        begin, below = watch.begin(self), self.below.seconds
        outcome = yield from super()._round(limit)
        seconds = watch.end(self) - begin - (self.below.seconds - below)
        if watch.num_captured == num_captured:
            rows = self.verifier.num_rows - rows
            watch.costs.blocks[self.verifier.name, rows].append(seconds)
        return outcome


@cache
def _timed_kind(kind: type) -> Any:
    """The class of stages of this kind that time their rounds."""
    timed = _TimedTree if issubclass(kind, BaseTreeStage) else _TimedBlock
    return type(f"Timed{kind.__name__}", (timed, kind), {})
