"""Measures what a plan is chosen from: acceptance along the target's text, and costs of rounds.

Acceptance is read off the target's own answers: every verifying model reads them, and each drafter
drafts behind each of their tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from polybasic.chain.manifest import Ngram, Plan, Tree
from polybasic.deploy.eagle_drafter import EagleDrafter
from polybasic.deploy.engine import Engine, Request
from polybasic.deploy.hardware import hardware_name
from polybasic.deploy.measurements import ABSENT, Measurements, Trace
from polybasic.deploy.ngram import NgramDrafter
from polybasic.deploy.round_costs import measure_costs
from polybasic.deploy.sampling import Prefixes, Sampling, make_sampler
from polybasic.deploy.settings import PlanGrid
from polybasic.deploy.stages import TreeStage
from polybasic.deploy.tree import DraftTree

BLOCK_TOKENS = 16
"""Tokens that a model which shares its cache reads behind the rows of the model above."""
OWN_ANSWER_TREE = Tree(depth=5, top_k=2, rows=8)
OWN_ANSWERS_EVERY = 3
"""Every which prompt intermediates answer themselves."""


@dataclass(frozen=True)
class CalibrationPrompt:
    """A prompt of known task, and the target's answer to it."""

    task: str
    prompt: list[int]
    answer: list[int]


def calibrate(
    engine: Engine,
    prompts: Sequence[tuple[str, list[int]]],
    stop_tokens: frozenset[int],
    max_new_tokens: int,
    sampling: Sampling,
    grid: PlanGrid,
    say: Callable[[str], None],
) -> Measurements:
    """Measure a chain on the machine that it is loaded on.

    Args:
        prompts: (task, token ids) of each; not those that the plan will be judged on.
        sampling: of the answers; a plan holds for its temperature.
        grid: the shapes that costs are needed for.
        say: takes one line for people.

    Returns:
        Costs, and one trace for each answer of at least two tokens.
    """
    models = engine.models
    say("plan: the target answers the calibration prompts")
    answered = [
        CalibrationPrompt(task, prompt, answer)
        for task, prompt in prompts
        if len(answer := _answer(engine, prompt, stop_tokens, max_new_tokens, sampling)) > 1
    ]
    say("plan: acceptance along the answers")
    traces = [
        _trace(engine, one, max_new_tokens, sampling, grid, index % OWN_ANSWERS_EVERY == 0)
        for index, one in enumerate(answered)
    ]
    say("plan: costs of rounds")
    costs = measure_costs(engine, [one.prompt for one in answered], stop_tokens, sampling, grid)
    return Measurements(
        hardware=hardware_name(models.target.device),
        dtype=str(models.target.dtype).removeprefix("torch."),
        temperature=sampling.temperature,
        verifying=tuple(engine.verifiers),
        drafters={member.name: member.drafts_for for member in models.members if member.drafts_for},
        passes=costs.passes(),
        drafts=costs.drafts(),
        shares_cache={name: _cache_owner(engine, name) for name in engine.verifiers},
        round_overhead_seconds=costs.overheads(),
        ngram_seconds=costs.ngram_seconds(),
        traces=traces,
    )


def _answer(
    engine: Engine,
    prompt: list[int],
    stop_tokens: frozenset[int],
    max_new_tokens: int,
    sampling: Sampling,
) -> list[int]:
    target = next(iter(engine.verifiers))
    plan = Plan(members=(target,), tree=Tree(depth=1, top_k=1, rows=2))
    request = Request(prompt, max_new_tokens, sampling, stop_tokens, plan)
    return [token for new_tokens in engine.run(request) for token in new_tokens]


def _cache_owner(engine: Engine, name: str) -> str:
    cache = engine.verifiers[name].cache
    return next(other for other, verifier in engine.verifiers.items() if verifier.cache is cache)


def _trace(
    engine: Engine,
    one: CalibrationPrompt,
    max_new_tokens: int,
    sampling: Sampling,
    grid: PlanGrid,
    reads_own: bool,
) -> Trace:
    """What every model says along one answer; `reads_own` asks for answers of its own, too."""
    prompt, answer = one.prompt, one.answer
    probability, confidence, own_confidence = {}, {}, {}
    states = _states(engine, one)
    prefixes = Prefixes(prompt, [answer[:length] for length in range(len(answer))])
    places = list(range(len(answer)))
    for name, verifier in engine.verifiers.items():
        sampler = make_sampler(sampling, engine.models.target.device, len(prompt))
        with torch.inference_mode():
            logits = verifier.logits(states[name][len(prompt) - 1 :])
        rows = sampler.distributions(logits, prefixes)
        drawn = [sampler.draw(rows, place) for place in places]
        confidence[name] = np.array(sampler.probabilities(rows, places, answer))
        own_confidence[name] = np.array(sampler.probabilities(rows, places, drawn))
        is_random = sampling.temperature > 0
        probability[name] = confidence[name] if is_random else np.equal(drawn, answer) * 1.0
    if sampling.temperature == 0:
        # Where passes of other lengths round to another token, the answer is right all the same.
        probability[next(iter(probability))][:] = 1.0
    ranks = {
        (member.name, name): {
            top_k: _ranks(engine, member.name, top_k, states[name], one, grid)
            for top_k in grid.top_ks
        }
        for member in engine.models.members
        for name in member.drafts_for
    }
    return Trace(
        task=one.task,
        probability=probability,
        confidence=confidence,
        own_confidence=own_confidence,
        ranks=ranks,
        own_ranks=_own_ranks(engine, one, max_new_tokens, sampling, grid) if reads_own else {},
        ngram={m: _copied(prompt, answer, m, grid) for m in grid.ngram_matches} or None,
        max_tokens=max_new_tokens,
    )


@torch.inference_mode()
def _states(engine: Engine, one: CalibrationPrompt) -> dict[str, Tensor]:
    """States [T, D] of each verifying model over prompt and answer, the last token excepted.

    As when a chain runs, a model that shares its cache reads a block behind rows of the model
    above, which then reads the block again.
    """
    tokens = [*one.prompt, *one.answer[:-1]]
    num_prompt = len(one.prompt) - 1
    states: dict[str, list[Tensor]] = {name: [] for name in engine.verifiers}
    for verifier in engine.verifiers.values():
        verifier.cache.truncate(0)
    bounds = [*range(num_prompt, len(tokens), BLOCK_TOKENS), len(tokens)]
    for start, end in pairwise([0, *bounds] if num_prompt else bounds):
        for name, verifier in reversed(engine.verifiers.items()):
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


@torch.inference_mode()
def _ranks(
    engine: Engine,
    name: str,
    top_k: int,
    states: Tensor,
    one: CalibrationPrompt,
    grid: PlanGrid,
) -> np.ndarray:
    """Ranks [N, D, D] of the answer's tokens among the candidates drafted at each position."""
    prompt, answer, depth = one.prompt, one.answer, max(grid.depths)
    tree = Tree(depth=depth, top_k=top_k, rows=2)
    drafter = engine.drafters.named(name, tree)
    drafter.rewind(0)
    drafter.observe(states[: len(prompt) - 1])
    ranks = np.full((len(answer), depth, depth), ABSENT, dtype=np.int64)
    for place in range(len(answer)):
        if place:
            drafter.observe(states[len(prompt) + place - 2 : len(prompt) + place - 1])
        if len(prompt) + place == 1 and isinstance(drafter, EagleDrafter):
            continue  # a head reads states, and none stands before the first token
        candidates = drafter.candidates([*prompt, *answer[:place]], depth)
        ranks[place] = candidates.ranks(answer[place : place + depth])
    return ranks


@torch.inference_mode()
def _own_ranks(
    engine: Engine,
    one: CalibrationPrompt,
    max_new_tokens: int,
    sampling: Sampling,
    grid: PlanGrid,
) -> dict[tuple[str, str], dict[int, np.ndarray]]:
    """Ranks along answers that intermediates with a drafter give by themselves."""
    prompt, found = one.prompt, {}
    for member in engine.models.members:
        for name in member.drafts_for:
            if name == next(iter(engine.verifiers)):
                continue
            verifier = engine.verifiers[name]
            sampler = make_sampler(sampling, engine.models.target.device, len(prompt))
            drafter = engine.drafters.named(member.name, OWN_ANSWER_TREE)
            stage = TreeStage(verifier, drafter, sampler)
            stage.prefill(prompt)
            answer = stage.propose(len(one.answer), max_new_tokens).tokens
            verifier.cache.truncate(0)
            states = verifier.read([*prompt, *answer[:-1]])
            own = CalibrationPrompt(one.task, prompt, answer)
            found[member.name, name] = {
                top_k: _ranks(engine, member.name, top_k, states, own, grid)
                for top_k in grid.top_ks
            }
    return found


def _copied(prompt: list[int], answer: list[int], min_match: int, grid: PlanGrid) -> np.ndarray:
    """Tokens of the n-gram drafter's proposals that come true, [N]; -1 where it has none."""
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
