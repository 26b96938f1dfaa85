"""How long a plan would take: its rounds simulated along answers of the target, at measured costs.

The output is the target's text y whatever the plan, so a plan is simulated along a given y, of
which `measuring.measurements.AcceptanceTrace` lists what is known. The stages of `simulated_stages`
mirror those of `polybasic.deploy.runtime.rounds.stages`, with positions in y instead of tokens. The
prefill, which gives y_0, is left out.

Let p_k, q_k be the probabilities of y_k under a verifier and the model below it. Given y, a block
keeps at least i tokens with probability prod_{k<=i} min(1, q_k/p_k) under the rule `token` and
min(1, min_{j<=i} prod_{k<=j} q_k/p_k) under the rule `block` (docs/theory.md), so one uniform u
cuts the block after the last i of probability u or more. The block diverges from y exactly there:
both rules replace the first token that they do not keep. So the stage below has followed y for that
many tokens, and wherever it follows y the same holds between it and the stage below it, with its
probabilities of y in place of p. At temperature 0, and at any other with noise that all models
share (the rule `coupled`), a token is kept if it is the verifier's own draw, and q_k is 1 or 0: all
of this is exact, and nothing is left to chance.

The innermost walks on y, limits, and re-reading into separate caches are exact too. What follows
the divergence in a block is rejected, and approximated: it is simulated as if y went on and the
innermost model diverged from it as it does elsewhere. There, if the upper model does not draw y_k,
the lower one counts as agreeing with it if it does not draw y_k either. A copied draft counts the
rows of one copy.

The uniforms belong to positions: any two plans get the same one at the same position.
"""

import math
from collections.abc import Callable
from copy import copy
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import MAX_TREE_ROWS, Ngram, Plan, Rule, Tree
from polybasic.chain.kernels.drafts import Counts
from polybasic.deploy.planner.measuring.measurements import Measurements, Values, num_candidates
from polybasic.deploy.planner.prediction import Played, Predicted, predict
from polybasic.deploy.planner.simulated_stages import (
    SimulatedBlockStage,
    SimulatedTreeStage,
    TreeRounds,
)

NUM_DRAWS = 4
"""How often traces are simulated, each time with other uniforms, where draws are independent."""
_Made = TypeVar("_Made")
_LOG_NEVER = -1e4
"""Below the logarithm of any uniform, and small enough for exact differences of sums."""


def simulate(
    plan: Plan, measurements: Measurements, seed: int = 0, num_draws: int = NUM_DRAWS
) -> Predicted:
    """Simulate a plan along all traces; see `Simulator` for many plans."""
    return Simulator(measurements, seed, num_draws).run(plan)


class Simulator:
    """Simulates plans along the traces of one measurement.

    Traces are concatenated: a position is an index into all of them.

    Args:
        seed: of the uniforms.
        num_draws: how often traces are simulated; once where nothing is random.

    Raises:
        UserError: a measurement without traces of two tokens or more.
    """

    def __init__(
        self, measurements: Measurements, seed: int = 0, num_draws: int = NUM_DRAWS
    ) -> None:
        if all(len(trace) < 2 for trace in measurements.traces):
            raise UserError(
                "nothing to plan from",
                "no answer of two tokens or more",
                "measure prompts with longer answers",
            )
        self.measurements = measurements
        self.num_draws = num_draws if measurements.is_random else 1
        ends = np.cumsum([len(trace) for trace in measurements.traces]).tolist()
        self.spans = list(pairwise([0, *ends]))
        self._ends = np.concatenate([np.full(end - start, end) for start, end in self.spans])
        # Where an answer would have reached its maximum length; a stop token may end it earlier.
        self.limits = [
            start + (trace.max_tokens or len(trace))
            for (start, _), trace in zip(self.spans, measurements.traces, strict=True)
        ]
        self._limits = np.concatenate(
            [
                np.full(end - start, limit)
                for (start, end), limit in zip(self.spans, self.limits, strict=True)
            ]
        )
        self._seed = seed
        self._cached: dict[tuple[Any, ...], Any] = {}

    def at(self, measurements: Measurements) -> "Simulator":
        """A simulator at other costs, for which no plan is played twice.

        Args:
            measurements: the same, but for the seconds.
        """
        simulator = copy(self)
        simulator.measurements = measurements
        return simulator

    def run(self, plan: Plan) -> Predicted:
        """Simulate a plan.

        Raises:
            UserError: the plan needs something that was not measured.
        """
        self._check_measured(plan)
        played = self._memo(("played", plan.model_dump_json()), lambda: self._play(plan))
        return predict(plan, played, self.measurements)

    def _play(self, plan: Plan) -> Played:
        """All rounds of a plan."""
        names = [name for name in plan.members if name in self.measurements.verifying]
        drafter = plan.members[-1] if len(names) < len(plan.members) else None
        stages = self._stages(plan, names, drafter)
        for draw in range(self.num_draws):
            for name, below, stage in zip(names, names[1:], stages, strict=False):
                assert isinstance(stage, SimulatedBlockStage)
                stage.extents = self._extents(name, below, plan.rule, draw)
            for (start, end), limit in zip(self.spans, self.limits, strict=True):
                stages[0].begin(start + 1, end, limit)
                stages[0].propose(start + 1, limit, None, limit)
        tree, root = stages[-1], stages[0]
        assert isinstance(tree, SimulatedTreeStage)
        return Played(
            blocks=tuple(root.blocks) if isinstance(root, SimulatedBlockStage) else (),
            rows={name: stage.rows_read() for name, stage in zip(names, stages, strict=True)},
            gained={name: stage.num_gained() for name, stage in zip(names, stages, strict=True)},
            proposed={
                name: stage.num_proposed
                for name, stage in zip(names, stages, strict=False)
                if isinstance(stage, SimulatedBlockStage)
            },
            num_tokens=(len(self._ends) - len(self.spans)) * self.num_draws,
            num_drafts=np.bincount(tree.rounds.depths[np.array(tree.visited, dtype=np.int64)]),
        )

    def _check_measured(self, plan: Plan) -> None:
        rules = self.measurements.rules
        if self.measurements.temperature > 0 and plan.rule not in rules:
            raise UserError("rule was not measured", plan.rule, f"measured: {', '.join(rules)}")
        wanted, measured = (
            {name: str(window) for name, window in windows.items() if name in plan.members}
            for windows in (plan.windows, self.measurements.windows)
        )
        if wanted != measured:
            raise UserError(
                "windows were not measured",
                f"{wanted or 'none'}",
                f"measured: {measured or 'none'}",
            )

    def _stages(
        self, plan: Plan, names: list[str], drafter: str | None
    ) -> list[SimulatedTreeStage | SimulatedBlockStage]:
        """From the root down."""
        innermost = names[-1]
        rounds = self._memo(
            ("tree", innermost, len(names) - 1, drafter, plan.tree, plan.ngram),
            lambda: self._tree_rounds(innermost, len(names) - 1, drafter, plan.tree, plan.ngram),
        )
        reads_with_tree = drafter is None and not self.measurements.captures_rounds
        stages: list[SimulatedTreeStage | SimulatedBlockStage] = [
            SimulatedTreeStage(rounds, reads_with_tree)
        ]
        owner = self.measurements.shares_cache
        for above, below in reversed(list(pairwise(names))):
            shares_cache = owner[above] == owner[below]
            stage = SimulatedBlockStage(stages[0], plan.flush[above], shares_cache)
            stage.confidence, stage.own_confidence = self._confidences(below)
            stages.insert(0, stage)
        return stages

    def _tree_rounds(
        self, name: str, level: int, drafter: str | None, tree: Tree, ngram: Ngram | None
    ) -> TreeRounds:
        """The gain and cost of a round of the innermost stage, at each position."""
        # A stage may gain all that remains but one token for each stage above it.
        positions = np.arange(len(self._ends))
        headroom = np.maximum(self._limits - positions - level - 1, 0)
        depths = np.zeros_like(headroom)
        accepted, rows = np.zeros_like(headroom), np.ones_like(headroom)
        own_accepted = accepted
        if drafter is not None:
            depths = np.minimum(headroom, tree.depth)
            ranks = self._ranks("ranks", drafter, name, tree)
            by_depth = [num_candidates(depth, tree.top_k) for depth in range(tree.depth + 1)]
            num = np.array(by_depth)[depths]
            if tree.least_probability:
                likely = self._likely(drafter, name, tree)
                num = np.where(depths > 0, likely[positions, depths - 1], 0)
                # A level without any is the last one.
                goes_on = np.diff(likely, axis=1, prepend=0) > 0
                depths = np.minimum(depths, 1 + goes_on.sum(1))
            rows = np.minimum(tree.rows, 1 + num)
            accepted = own_accepted = _accepted(ranks, depths, rows)
            if (drafter, name) in self.measurements.traces[0].own_ranks:
                own_ranks = self._ranks("own_ranks", drafter, name, tree)
                own_accepted = _accepted(own_ranks, depths, rows)
        if ngram is not None and ngram.extends and drafter is not None:
            more, right = self._behind(drafter, name, tree, ngram, depths, rows, headroom)
            accepted, rows = accepted + right, rows + more
        if ngram is not None:
            copied = self._copied(ngram.min_match)
            copy_tokens = np.minimum(headroom, min(ngram.num_tokens, tree.rows - 1))
            is_copied = copied >= 0
            depths = np.where(is_copied, 0, depths)
            rows = np.where(is_copied, 1 + copy_tokens, rows)
            copied = np.minimum(copied, copy_tokens)
            accepted = np.where(is_copied, copied, accepted)
            own_accepted = np.where(is_copied, copied, own_accepted)
        longest = np.minimum(headroom + 1, self._ends - positions)
        gains, own_gains = (np.minimum(counts + 1, longest) for counts in (accepted, own_accepted))
        return TreeRounds(gains.tolist(), own_gains.tolist(), rows, depths)

    def _behind(
        self,
        drafter: str,
        name: str,
        tree: Tree,
        ngram: Ngram,
        depths: Counts,
        rows: Counts,
        headroom: Counts,
    ) -> tuple[Counts, Counts]:
        """Tokens of the copy behind a draft's most probable path, at each position, and how many of
        them are right.

        Whether a path that is wrong is gone on from is told by the text that stands in its place.
        """
        length = _accepted(self._ranks("best_ranks", drafter, name, tree), depths, rows)
        matches = self._ranks("best_matches", drafter, name, tree)
        places = np.arange(len(length)) + length
        copied = self._copied(ngram.min_match)[np.minimum(places, len(length) - 1)]
        is_copied = (length > 0) & (places < self._ends) & (copied >= 0)
        room = np.minimum(headroom - length, MAX_TREE_ROWS - rows)
        more = np.where(is_copied, np.minimum(room, ngram.num_tokens), 0)
        is_right = is_copied & (matches >= length)
        return more, np.where(is_right, np.minimum(copied, more), 0)

    def _ranks(self, what: str, drafter: str, name: str, tree: Tree) -> Counts:
        deepest = self.measurements.measured_depths(drafter, name)
        if tree.depth > deepest.get(tree.top_k, 0):
            measured = ", ".join(
                f"top_k {top_k} to depth {depth}" for top_k, depth in deepest.items()
            )
            raise UserError(
                "draft tree was not measured",
                f"top_k {tree.top_k}, depth {tree.depth} of {drafter} for {name}",
                f"measured: {measured or 'none'}",
            )
        return self._memo(
            (what, drafter, name, tree.top_k),
            lambda: np.concatenate(
                [
                    getattr(trace, what)[drafter, name][tree.top_k]
                    for trace in self.measurements.traces
                ]
            ),
        )

    def _likely(self, drafter: str, name: str, tree: Tree) -> Counts:
        """How many candidates are probable enough for the tree, by position and depth."""
        measured = self.measurements.least_probabilities
        if tree.least_probability not in measured:
            raise UserError(
                "least probability of candidates was not measured",
                f"{tree.least_probability}",
                f"measured: {', '.join(map(str, measured)) or 'none'}",
            )
        place = measured.index(tree.least_probability)
        parts = [
            trace.likely[drafter, name][tree.top_k][:, :, place]
            for trace in self.measurements.traces
        ]
        return np.concatenate(parts)

    def _copied(self, min_match: int) -> Counts:
        parts = [(trace.ngram or {}).get(min_match) for trace in self.measurements.traces]
        if any(part is None for part in parts):
            raise UserError(
                "n-gram drafts were not measured", f"min_match {min_match}", "leave them out"
            )
        return np.concatenate([part for part in parts if part is not None])

    def _extents(self, above: str, below: str, rule: Rule, draw: int) -> list[int]:
        """For each position, how many tokens an endless block from there on would keep."""
        return self._memo(
            ("extents", above, below, rule, draw),
            lambda: self._find_extents(above, below, rule, draw),
        )

    def _find_extents(self, above: str, below: str, rule: Rule, draw: int) -> list[int]:
        place = self.measurements.verifying.index(above)
        generator = np.random.default_rng((self._seed, draw, place))
        if self.measurements.is_random:
            log_uniforms = np.log1p(-generator.random(len(self._ends)))
        else:
            log_uniforms = np.full(len(self._ends), math.log(0.5))
        p, q = (self.measurements.along("probability", name) for name in (above, below))
        ratios = log_ratios(q, p)
        if rule == "token":
            ratios = np.minimum(ratios, 0.0)
        extents: list[int] = []
        for start, end in self.spans:
            sums = np.concatenate([[0.0], ratios[start:end].cumsum()])
            products = sums[None, 1:] - sums[:-1, None]  # [from, up to and including]
            is_cut = np.triu(products < log_uniforms[start:end, None])
            is_cut = np.concatenate([is_cut, np.ones((end - start, 1), dtype=bool)], axis=1)
            extents += (is_cut.argmax(1) - np.arange(end - start)).tolist()
        return extents

    def _confidences(self, name: str) -> tuple[list[float], list[float]]:
        """The flush's input at each position, while the block follows y and after that."""

        def make() -> tuple[list[float], list[float]]:
            along, own = self.measurements.along, self.measurements.along("own_confidence", name)
            can_follow = along("probability", name) > 0
            follows = np.where(can_follow, along("confidence", name), own)
            return follows.tolist(), own.tolist()

        return self._memo(("confidences", name), make)

    def _memo(self, key: tuple[Any, ...], make: Callable[[], _Made]) -> _Made:
        if key not in self._cached:
            self._cached[key] = make()
        made: _Made = self._cached[key]
        return made


def _accepted(ranks: Counts, depths: Counts, rows: Counts) -> Counts:
    """Drafted tokens that a walk accepts, by position, for trees of the given sizes."""
    accepted = np.zeros_like(depths)
    for depth in range(1, depths.max(initial=0) + 1):
        at = np.flatnonzero(depths == depth)
        is_kept = ranks[at, depth - 1, :depth] <= rows[at, None] - 1
        accepted[at] = np.logical_and.accumulate(is_kept, axis=1).sum(1)
    return accepted


def log_ratios(proposer: Values, verifier: Values) -> Values:
    """log(q/p) of each position; where p is 0, 0 if q is 0 too, else never kept."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.log(proposer) - np.log(verifier)
    ratios = np.where(verifier > 0, ratios, np.where(proposer > 0, _LOG_NEVER, 0.0))
    return np.maximum(ratios, _LOG_NEVER)
