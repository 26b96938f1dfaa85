"""Measures what a plan is chosen from: acceptance along the target's text, and costs of rounds.

Acceptance is measured along the target's own answers: every verifying model reads them, and each
drafter drafts after each of their tokens. The answers are drawn with noise that all members share:
each is a sample of the target's law, too, and serves for rules that draw independently.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polybasic.chain.formats.plan import Ngram, Plan, Rule, Tree, Window
from polybasic.chain.kernels.drafts import ABSENT, DraftTree
from polybasic.chain.kernels.product_times import name_of
from polybasic.deploy.planner.measuring.answers import (
    MIN_TOKENS,
    Calibration,
    CalibrationPrompt,
)
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.planner.measuring.costs import RoundCosts, measure_costs
from polybasic.deploy.planner.measuring.measurements import AcceptanceTrace, Measurements
from polybasic.deploy.planner.settings import PlanGrid
from polybasic.deploy.runtime.drafters.expansion import ExpandingDrafter
from polybasic.deploy.runtime.drafters.ngram import NgramDrafter
from polybasic.deploy.runtime.engine import Engine
from polybasic.deploy.runtime.hardware import hardware_name
from polybasic.deploy.runtime.remote.link import Link
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.passes import alone
from polybasic.deploy.runtime.rounds.sampling import Prefixes, Sampling, make_sampler
from polybasic.deploy.runtime.rounds.stages import BaseTreeStage
from polybasic.deploy.runtime.rounds.verifier import Verifier
from polybasic.deploy.runtime.slots import num_common

BLOCK_TOKENS = 16
"""Tokens that a model with a shared cache reads after the rows of the model above."""
OWN_TEXT_TREE = Tree(depth=5, top_k=2, rows=8)
"""Shape of the drafts for an intermediate's own text where it leaves the answer."""
TRACES_SHARE, COSTS_SHARE = 0.65, 0.85
"""Of the budget, by whose end traces and costs are measured."""
LONG_TRACES_SHARE, LONG_COSTS_SHARE = 0.45, 0.6
"""The same where windows are to be tried, too."""

CountsByDrafter = dict[tuple[str, str], dict[int, np.ndarray]]
"""Drafter and its verifier -> top_k -> see `AcceptanceTrace`."""


Windows = Mapping[str, Window]
"""Of the members that have one, by name."""


@dataclass(frozen=True)
class Measured:
    """What a plan is chosen from, and how it was found.

    Attributes:
        calibration: with the answers that there was time for.
        measurements: for each of the calibration's rules.
        costs: of all rounds that were timed, likewise; further ones may be added.
        trace_seconds: that one pass over all answers took, for one of them.
    """

    calibration: Calibration
    measurements: tuple[Measurements, ...]
    costs: tuple[RoundCosts, ...]
    trace_seconds: float

    def by_rule(self, rule: Rule) -> tuple[Measurements, RoundCosts]:
        """What holds for plans of a rule."""
        pairs = zip(self.measurements, self.costs, strict=True)
        return next(pair for pair in pairs if rule in pair[0].rules)

    def over(self, link: Link, message_seconds: float, is_optimistic: bool) -> "Measured":
        """The same with a target behind a link; see `Measurements`."""
        linked = [
            replace(
                measurement, link=link, message_seconds=message_seconds, is_optimistic=is_optimistic
            )
            for measurement in self.measurements
        ]
        return replace(self, measurements=tuple(linked))

    def with_costs(self) -> "Measured":
        """With the costs as they are now."""
        pairs = zip(self.measurements, self.costs, strict=True)
        return replace(
            self,
            measurements=tuple(
                replace(measurement, **_costs_of(costs)) for measurement, costs in pairs
            ),
        )


def measure(calibration: Calibration, budget: Budget, say: Callable[[str], None]) -> Measured:
    """Costs and traces of members that see the whole context.

    Answers are cut where there is no time for one of each task, and the last ones left out where
    there is none for all; after that, shapes are timed less often or not at all.
    """
    engine, grid, models = calibration.engine, calibration.grid, calibration.engine.models
    traces_share, costs_share = TRACES_SHARE, COSTS_SHARE
    if calibration.usable_windows:
        traces_share, costs_share = LONG_TRACES_SHARE, LONG_COSTS_SHARE
    say("plan: acceptance along the answers")
    answered = _affordable(calibration, budget, traces_share)
    began = budget.seconds
    traces = [
        trace_answer(calibration, example, {}, grid.top_ks)
        for example in budget.within(answered, traces_share, "answers", calibration.num_tasks)
    ]
    trace_seconds = (budget.seconds - began) / len(calibration.rules)
    answered = answered[: len(traces)]
    say("plan: costs of rounds")
    costs = measure_costs(
        engine,
        [example.prompt for example in answered],
        calibration.stop_tokens,
        calibration.sampling,
        grid,
        [rules[0] for rules in calibration.rules],
        budget,
        costs_share,
    )
    measurements = tuple(
        Measurements(
            hardware=hardware_name(models.target.device, models.num_parts),
            dtype=name_of(models.target.dtype),
            temperature=calibration.sampling.temperature,
            verifying=tuple(engine.verifiers),
            drafters=dict(models.drafts_for),
            shares_cache={name: _cache_owner(engine, name) for name in engine.verifiers},
            traces=[of_answer[place] for of_answer in traces],
            rules=rules,
            least_probabilities=calibration.grid.least_probabilities,
            captures_rounds=engine.captures_rounds,
            **_costs_of(costs[place]),
        )
        for place, rules in enumerate(calibration.rules)
    )
    return Measured(replace(calibration, answered=answered), measurements, costs, trace_seconds)


def _costs_of(costs: RoundCosts) -> dict[str, Any]:
    """Fields of `Measurements`."""
    return {
        "passes": costs.passes(),
        "drafts": costs.drafts(),
        "block_overhead_seconds": costs.block_overheads(),
        "ngram_seconds": costs.ngram_seconds(),
    }


def _affordable(calibration: Calibration, budget: Budget, share: float) -> list[CalibrationPrompt]:
    """The answers, cut where tracing one of each task would take longer than a share."""
    answered = calibration.answered
    for _ in range(2 if answered else 0):  # the first time, much else happens
        began = budget.seconds
        trace_answer(calibration, answered[0].cut(MIN_TOKENS), {}, calibration.grid.top_ks)
        seconds_per_token = (budget.seconds - began) / len(answered[0].cut(MIN_TOKENS).answer)
    longest = max((len(example.answer) for example in answered), default=0)
    num_tasks = calibration.num_tasks
    if not answered or seconds_per_token * longest * num_tasks <= budget.left(share):
        return answered
    most = max(int(budget.left(share) / (seconds_per_token * num_tasks)), MIN_TOKENS)
    if most < longest:
        budget.leave_out(f"all but the first {most} tokens of each answer", is_rough=True)
    return [example.cut(most) for example in answered]


def _cache_owner(engine: Engine, name: str) -> str:
    cache = engine.verifiers[name].cache
    return next(owner for owner, verifier in engine.verifiers.items() if verifier.cache is cache)


def trace_answer(
    calibration: Calibration, one: CalibrationPrompt, windows: Windows, top_ks: Sequence[int]
) -> list[AcceptanceTrace]:
    """How every model rates one answer, for each of the calibration's rules.

    Args:
        top_ks: of the drafts.
    """
    states = _states(calibration.engine, one, windows)
    grid = calibration.grid
    copied = {m: _copied(one.prompt, one.answer, m, grid) for m in grid.ngram_matches} or None
    return [
        _trace(calibration, one, windows, top_ks, states, copied, rules[0])
        for rules in calibration.rules
    ]


def _trace(
    calibration: Calibration,
    example: CalibrationPrompt,
    windows: Windows,
    top_ks: Sequence[int],
    states: Mapping[str, Tensor],
    copied: dict[int, np.ndarray] | None,
    rule: Rule,
) -> AcceptanceTrace:
    """How every model rates one answer by a rule, given what does not depend on rules."""
    engine, sampling, grid = calibration.engine, calibration.sampling, calibration.grid
    prompt, answer = example.prompt, example.answer
    probability, confidence, own_confidence, drawn = {}, {}, {}, {}
    prefixes = Prefixes(prompt, [answer[:length] for length in range(len(answer))])
    places = list(range(len(answer)))
    target = next(iter(engine.verifiers))
    plan = Plan(members=(target,), tree=OWN_TEXT_TREE, rule=rule)
    noise = engine.noise(Request(prompt, len(answer), sampling, frozenset(), plan))
    is_random = sampling.temperature > 0 and noise is None
    for name, verifier in engine.verifiers.items():
        sampler = make_sampler(sampling, engine.models.target.device, len(prompt), rule, noise)
        with torch.inference_mode():
            logits = _logits(verifier, states[name][len(prompt) - 1 :], prompt, answer)
        rows = sampler.distributions(logits, prefixes)
        drawn[name] = [sampler.draw(rows, place) for place in places]
        confidence[name] = np.array(sampler.probabilities(rows, places, answer))
        own_confidence[name] = np.array(sampler.probabilities(rows, places, drawn[name]))
        probability[name] = confidence[name] if is_random else np.equal(drawn[name], answer) * 1.0
    if not is_random:
        # Passes of other lengths may round to another token; the answer is right all the same.
        probability[target][:] = 1.0
    ranks: CountsByDrafter = {}
    own_ranks: CountsByDrafter = {}
    likely: CountsByDrafter = {}
    best_ranks: CountsByDrafter = {}
    best_matches: CountsByDrafter = {}
    for name in engine.verifiers:
        drafters = engine.models.drafters_of(name)
        texts = [[answer[place:] for place in places]]
        if drafters and name != target:
            depth = max(grid.depths)
            own = _continuations(engine, name, example, drawn[name], sampling, depth, windows, rule)
            texts.append(own)
        for drafter, top_k in product(drafters, top_ks):
            tree = Tree(depth=max(grid.depths), top_k=top_k, rows=2)
            drafting = engine.drafters.named(drafter, tree, windows.get(drafter), noise)
            drafts = _drafts(drafting, states[name], example, texts, grid.least_probabilities)
            pair = drafter, name
            if grid.least_probabilities:
                likely.setdefault(pair, {})[top_k] = drafts.likely
            ranks.setdefault(pair, {})[top_k] = drafts.ranks[0]
            if name != target:
                own_ranks.setdefault(pair, {})[top_k] = drafts.ranks[1]
            best_ranks.setdefault(pair, {})[top_k] = drafts.best_ranks
            best_matches.setdefault(pair, {})[top_k] = drafts.best_matches
    return AcceptanceTrace(
        task=example.task,
        probability=probability,
        confidence=confidence,
        own_confidence=own_confidence,
        ranks=ranks,
        own_ranks=own_ranks,
        ngram=copied,
        likely=likely,
        best_ranks=best_ranks,
        best_matches=best_matches,
        max_tokens=example.max_tokens,
        num_prompt_tokens=len(prompt),
    )


def _logits(
    verifier: Verifier, states: Tensor, prompt: Sequence[int], answer: Sequence[int]
) -> Tensor:
    """Logits [N, V] before each token of the answer, as a round has them that saw none after it."""
    logits, seen = verifier.logits(states), verifier.decoder.shortlist()
    if seen is not None:
        seen.add(prompt)
        for row, token in zip(logits, answer, strict=True):
            row[torch.from_numpy(seen.left_out(len(row)))] = -torch.inf
            seen.add([token])
    return logits


@torch.inference_mode()
def _states(engine: Engine, example: CalibrationPrompt, windows: Windows) -> dict[str, Tensor]:
    """States [T, W] of each verifying model over prompt and answer, without the last token.

    As when a chain runs, a model that shares its cache reads a block after rows of the model above,
    which then reads the block again.
    """
    tokens = [*example.prompt, *example.answer[:-1]]
    num_prompt = len(example.prompt) - 1
    states: dict[str, list[Tensor]] = {name: [] for name in engine.verifiers}
    verifiers = {
        name: verifier.seeing(windows.get(name)) for name, verifier in engine.verifiers.items()
    }
    for verifier in verifiers.values():
        verifier.cache.truncate(0)
    bounds = [*range(num_prompt, len(tokens), BLOCK_TOKENS), len(tokens)]
    for start, end in pairwise([0, *bounds] if num_prompt else bounds):
        for name, verifier in reversed(verifiers.items()):
            is_owner = _cache_owner(engine, name) == name
            if is_owner or start >= num_prompt:
                states[name].append(verifier.read(tokens[start:end]))
            if is_owner:
                verifier.cache.keep(range(end - start))
        if start < num_prompt:
            for name in engine.verifiers:
                if not states[name]:
                    states[name] = [states[_cache_owner(engine, name)][0]]
    return {name: torch.cat(parts) for name, parts in states.items()}


@dataclass(frozen=True)
class _Drafts:
    """What was drafted at each of N positions of an answer, to depth D.

    Attributes:
        ranks: of each text, [N, D, D].
        likely: candidates that are probable enough, [N, D, P].
        best_ranks: [N, D, D], of the most probable path.
        best_matches: [N], leading tokens of that path that the answer has.
    """

    ranks: list[np.ndarray]
    likely: np.ndarray
    best_ranks: np.ndarray
    best_matches: np.ndarray


@torch.inference_mode()
def _drafts(
    drafter: ExpandingDrafter,
    states: Tensor,
    example: CalibrationPrompt,
    texts: Sequence[Sequence[list[int]]],
    least_probabilities: Sequence[float],
) -> _Drafts:
    """What a drafter drafts at each position of an answer.

    Args:
        drafter: whose trees are D deep at most.
        states: of its verifier, over prompt and answer.
        texts: to be ranked: of each, at each position, the tokens from there on. The first is the
            answer.
    """
    prompt, answer, depth = example.prompt, example.answer, drafter.max_depth
    drafter.rewind(0)
    drafter.observe(states[: len(prompt) - 1])
    *by_text, best_ranks = (
        np.full((len(answer), depth, depth), ABSENT, dtype=np.int64) for _ in range(len(texts) + 1)
    )
    best_matches = np.zeros(len(answer), dtype=np.int64)
    likely = np.zeros((len(answer), depth, len(least_probabilities)), dtype=np.int64)
    least_scores = [math.log(probability) for probability in least_probabilities]
    for place in range(len(answer)):
        if place:
            drafter.observe(states[len(prompt) + place - 2 : len(prompt) + place - 1])
        if len(prompt) + place < drafter.min_tokens:
            continue
        candidates = drafter.candidates([*prompt, *answer[:place]], depth)
        for ranks, text in zip(by_text, texts, strict=True):
            ranks[place] = candidates.ranks(text[place][:depth])
        likely[place] = candidates.counts(least_scores)
        path = candidates.best_path()
        best_ranks[place] = candidates.ranks(path)
        best_matches[place] = num_common(path, answer[place:])
    return _Drafts(by_text, likely, best_ranks, best_matches)


@torch.inference_mode()
def _continuations(
    engine: Engine,
    name: str,
    example: CalibrationPrompt,
    drawn: list[int],
    sampling: Sampling,
    depth: int,
    windows: Windows,
    rule: Rule,
) -> list[list[int]]:
    """The tokens that a model draws from each position of the answer on, `depth` or more.

    These are the answer until the model leaves it, and its own text from there.

    Args:
        drawn: the model's own draw at each position.
    """
    prompt, answer = example.prompt, example.answer
    drafter = engine.models.drafters_of(name)[0]
    members = (name, drafter)
    seen = {member: windows[member] for member in members if member in windows}
    plan = Plan(members=members, tree=OWN_TEXT_TREE, windows=seen, rule=rule)
    (stage,), _ = engine.stages(Request(prompt, len(answer), sampling, frozenset(), plan))
    assert isinstance(stage, BaseTreeStage)
    continuations: list[list[int]] = []
    following: list[int] = []
    for place in reversed(range(len(answer))):
        if drawn[place] == answer[place]:
            following = [answer[place], *following]
        else:
            # from the end to the beginning, so that the cache's rows stay valid
            if stage.tokens:
                stage.resolve(len(prompt) + place, drawn[place])
            else:
                alone(stage.prefill([*prompt, *answer[:place], drawn[place]]))
            block = alone(stage.propose(depth, depth + OWN_TEXT_TREE.depth))
            following = [drawn[place], *block.tokens]
        continuations.insert(0, following)
    return continuations


def _copied(prompt: list[int], answer: list[int], min_match: int, grid: PlanGrid) -> np.ndarray:
    """Tokens of the n-gram drafter's proposals that are right, [N]; -1 if it proposes none."""
    tree = Tree(depth=grid.ngram_tokens, top_k=1, rows=grid.ngram_tokens + 1)
    drafter = NgramDrafter(Ngram(min_match=min_match, num_tokens=grid.ngram_tokens), tree)
    drafter.rewind(0)
    states = torch.zeros(len(prompt) - 1, 1)
    drafter.observe(states)
    copied = np.full(len(answer), -1, dtype=np.int64)
    for place in range(len(answer)):
        if place:
            drafter.observe(torch.zeros(1, 1))
        draft = drafter.draft([*prompt, *answer[:place]], max_depth=grid.ngram_tokens)
        if len(draft) > 1:
            copied[place] = _depth_along(draft, answer[place:])
    return copied


def _depth_along(tree: DraftTree, tokens: list[int]) -> int:
    children, row = tree.children(), 0
    for depth, token in enumerate(tokens):
        if token not in children[row]:
            return depth
        row = children[row][token]
    return len(tokens)
