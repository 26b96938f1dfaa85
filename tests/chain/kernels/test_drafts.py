"""Drafts of several sequences in one call: each gets what it gets alone."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.drafts import Candidates, DraftTree
from polybasic.chain.kernels.executor import DraftRequest, Executor, Perturbation
from tests.chain.native_models import (
    CONFIG,
    SCALES,
    cache_of,
    drafting,
    eager,
    states_before_draft,
    threads,
)

DTYPES = [torch.float32, torch.bfloat16]


def random_request(
    model: Executor, seed: int, scale: float, depth: int | None = None
) -> DraftRequest:
    """A draft of any shape, after a text that was read into a cache of its own."""
    chosen, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num, any_depth, top_k = chosen.randint(1, 40), chosen.randint(1, 6), chosen.randint(1, 10)
    depth, cache = depth or any_depth, cache_of(model, len(model.weights.layers))
    features = torch.randn(num, CONFIG.hidden_size, generator=generator)
    ids = torch.randint(0, CONFIG.vocab_size, (num,), generator=generator)
    state = states_before_draft(model, cache, ids, features, depth)
    window = chosen.choice([None, Window(tokens=chosen.randint(2, 20), sinks=chosen.randint(0, 3))])
    perturbation = None
    if chosen.random() < 0.5:
        added = torch.randn(depth + 1, CONFIG.vocab_size, generator=generator)
        perturbation = Perturbation(scale * chosen.uniform(0.5, 2), added)
    return DraftRequest(state, cache.layers, num, depth, top_k, window, perturbation)


def is_same(candidates: Candidates, other: Candidates) -> bool:
    parts = [
        (found.tokens, found.scores.view(torch.int32), found.beams) for found in (candidates, other)
    ]
    return candidates.top_k == other.top_k and all(map(torch.equal, *parts))


def written(request: DraftRequest) -> Tensor:
    """Rows of the cache that the draft wrote."""
    assert isinstance(request.start, int)
    end = request.start + (request.depth - 1) * request.top_k
    return torch.cat([layer[:, request.start : end].flatten() for layer in request.cache])


def alone(model: Executor, requests: Sequence[DraftRequest]) -> list[tuple[Candidates, Tensor]]:
    return [(model.drafts([request])[0], written(request)) for request in requests]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", SCALES)
@torch.inference_mode()
def test_drafts_have_the_bits_of_each_alone(kind: str, dtype: torch.dtype) -> None:
    model, chosen = drafting(kind, dtype), random.Random(5)
    assert model.name == "cpu"
    requests = [random_request(model, seed, SCALES[kind]) for seed in range(12)]
    assert {request.depth for request in requests} >= {1, 5}
    expected = alone(model, requests)
    for num in (1, 2, 3):
        mixed = chosen.sample(range(12), chosen.randint(4, 12))
        for request in requests:
            for layer in request.cache:
                layer[:, request.start :] = 0
        with threads(num):
            found = model.drafts([requests[place] for place in mixed])
        for place, drafted in zip(mixed, found, strict=True):
            assert is_same(drafted, expected[place][0])
            assert torch.equal(written(requests[place]), expected[place][1])


def test_a_tree_without_some_rows_is_without_those_below_them() -> None:
    tree = DraftTree([9, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 2, 3], "head")
    kept = tree.where([True, False, True, True, True, True])
    assert (kept.tokens, kept.parents, kept.proposer) == ([9, 2, 4], [-1, 0, 1], "head")
    assert kept == DraftTree.of_path([9, 2, 4], "")


@pytest.mark.parametrize("kind", SCALES)
@torch.inference_mode()
def test_a_draft_ends_after_a_level_of_improbable_candidates(kind: str) -> None:
    """Alone, in company of others that go on, and by the reference."""
    model = drafting(kind)
    requests = [random_request(model, seed, SCALES[kind], depth=6) for seed in range(12)]
    added = torch.randn(6, CONFIG.vocab_size, generator=torch.Generator().manual_seed(3))
    perturbation = Perturbation(SCALES[kind], added)
    requests = [replace(request, perturbation=perturbation) for request in requests]
    whole = [drafted for drafted, _ in alone(model, requests)]
    ending, expected = [], []
    for place, (request, candidates) in enumerate(zip(requests, whole, strict=True)):
        best = [max(level) for level in levels_of(candidates)]
        least = [*best, 0.0, -math.inf][place % 8]
        num_levels = sum(score >= least for score in best[:-1]) + 1
        ending.append(replace(request, least_score=least))
        expected.append(candidates.first_levels(num_levels))
    assert {drafted.num_levels for drafted in expected} == set(range(1, 7))
    for num in (1, 2, 3):
        with threads(num):
            found = model.drafts(ending)
        assert all(map(is_same, found, expected))
    assert all(
        is_same(*pair) for pair in zip(model.drafts(ending[::-1]), expected[::-1], strict=True)
    )
    with eager():
        plain = drafting(kind)
    for request, drafted in zip(ending, expected, strict=True):
        # the reference rounds otherwise: a best score that is the least one may be below it
        (other,) = plain.drafts([replace(request, least_score=request.least_score - 1e-3)])
        (longer,) = model.drafts([replace(request, least_score=request.least_score - 1e-3)])
        assert other.num_levels == longer.num_levels >= drafted.num_levels


def levels_of(candidates: Candidates) -> list[list[float]]:
    """Scores, level by level."""
    top_k, levels = candidates.top_k, candidates.num_levels
    sizes = [top_k, *[top_k**2] * (levels - 1)]
    return [part.tolist() for part in candidates.scores.split(sizes)]


@torch.inference_mode()
def test_everything_that_a_request_says_counts() -> None:
    model = drafting("head")
    request, other = (random_request(model, seed, SCALES["head"]) for seed in (2, 3))
    added = torch.randn(6, CONFIG.vocab_size, generator=torch.Generator().manual_seed(6))
    request = replace(request, depth=4, top_k=5, perturbation=Perturbation(1e-3, added))
    for changed in (
        replace(request, state=other.state),
        replace(request, cache=other.cache),
        replace(request, start=request.start - 1),
        replace(request, depth=3),
        replace(request, top_k=4),
        replace(request, least_score=-1e-3),
        replace(request, window=Window(tokens=2, sinks=0)),
        replace(request, perturbation=Perturbation(1.5e-3, added)),
        replace(request, perturbation=Perturbation(1e-3, added.roll(1, 0))),
    ):
        (first, _), (second, _) = (model.drafts([variant, other]) for variant in (request, changed))
        assert not is_same(first, second)


@torch.inference_mode()
def test_levels_of_too_many_rows_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    model = drafting("head")
    requests = [replace(random_request(model, seed, SCALES["head"]), top_k=40) for seed in range(8)]
    expected, calls = alone(model, requests), []
    call = model.kernels.library.polybasic_drafts  # type: ignore[attr-defined]
    monkeypatch.setattr(
        model.kernels.library,  # type: ignore[attr-defined]
        "polybasic_drafts",
        lambda *arguments: (calls.append(arguments[2]), call(*arguments)),
    )
    found = model.drafts(requests)
    assert calls == [6, 2]
    assert all(is_same(drafted, own) for drafted, (own, _) in zip(found, expected, strict=True))
    assert model.drafts([]) == []


@torch.inference_mode()
def test_drafts_of_the_reference_are_those_of_each_alone() -> None:
    native = drafting("model")
    with eager():
        plain = drafting("model")
    assert (native.name, plain.name) == ("cpu", "torch")
    requests, expected = (
        [random_request(model, seed, SCALES["model"]) for seed in range(4)]
        for model in (native, plain)
    )
    found = plain.drafts(expected)
    for drafted, (own, _), fast in zip(
        found, alone(plain, expected), native.drafts(requests), strict=True
    ):
        assert is_same(drafted, own)
        assert torch.equal(drafted.tokens, fast.tokens)
        torch.testing.assert_close(drafted.scores, fast.scores, rtol=1e-5, atol=1e-5)
