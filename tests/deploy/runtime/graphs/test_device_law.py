"""The law of chains' answers is the target's, wherever the rounds run.

Stages of the host, stages of the device in PyTorch's operations, and those on a GPU answer the same
requests. Each token of an answer is compared with the target's warped distribution after all before
it, which plain float32 passes of the target give: the place of the token between 0 and 1, where
tokens stand in some order and fill the interval by their probabilities, is uniform and independent
of all places before, whatever the order was, as long as it does not depend on the token. There are
two orders: by the target's probability, and by how much more probable a token is to the target than
to the intermediate, along which wrong acceptance would push.

The test: Pearson's chi-square over bins of equal probability, for both orders, at significance 1e-4
together, over 1000 tokens; seeds are fixed. `test_power` shows that a law at a total variation
distance of 0.13 a token, along one of the orders, is rejected with a probability of 0.99.

Passes in bfloat16 and float16 draw from logits that are rounded in their own way. That moves places
to either side and leaves them uniform, where nothing is truncated.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polybasic.chain.formats.plan import Plan
from polybasic.chain.kernels.torch.operations import Operations
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.bench.exactness.rereading import ReadPattern, answer_logits
from polybasic.deploy.runtime.graphs import round_parts
from polybasic.deploy.runtime.graphs.device_stages import DeviceTreeStage
from polybasic.deploy.runtime.graphs.drawing import DeviceNoise, DeviceSampler
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.sampling import Prefixes, Sampling
from polybasic.deploy.runtime.rounds.warping import warp
from tests.deploy.noisy_chain import (
    DEVICE,
    GPU,
    HOST,
    NUM_NEW_TOKENS,
    PLACES,
    PLANS,
    PROMPT,
    ROUNDED_PLACES,
    ChainAt,
    Where,
    answer,
    chains_of,
    needs_gpu,
    write_noisy_chain,
)

NUM_TOKENS = 1000
NUM_TOKENS_OF_FAULTS = 2000
NUM_BINS = 8
SIGNIFICANCE = 1e-4
DETECTED_DISTANCE = 0.13
"""Total variation of a token's law that is detected with probability 0.99."""
MOST_IMPOSSIBLE = 3
"""Tokens at the edge of a truncation, which rounding moves, out of `NUM_TOKENS`."""
SAMPLINGS = {
    "temperature": Sampling(1.3),
    "top-k": Sampling(2.0, top_k=7),
    "top-p": Sampling(1.5, top_p=0.8),
    "min-p": Sampling(1.5, min_p=0.05),
    "all": Sampling(1.8, top_k=12, top_p=0.9, min_p=0.02),
}
CASES = [("block", "all"), ("adaptive", "top-k"), ("coupled", "min-p")]
"""On a CPU, where a thousand tokens by operations of the device path take half a minute."""
CASES_OF_GPUS = [
    *CASES,
    ("two", "temperature"),
    ("two", "all"),
    ("independent", "all"),
    ("head", "top-p"),
    ("block", "temperature"),
    ("coupled", "temperature"),
    ("token", "top-p"),
    ("token", "min-p"),
]
proof = pytest.mark.proof


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_noisy_chain(tmp_path_factory.mktemp("law"))


@pytest.fixture(scope="module")
def chain_at(folder: Path) -> Iterator[ChainAt]:
    with chains_of(folder) as at:
        yield at


@pytest.fixture(scope="module")
def reference(folder: Path) -> Chain:
    """Of which float32 passes over whole answers are read."""
    return load_chain(folder, device="cpu", dtype="float32")


def answers(chain: Chain, plan: Plan, sampling: Sampling, num_tokens: int) -> list[list[int]]:
    seeds = range(num_tokens // NUM_NEW_TOKENS)
    return [answer(chain, plan, replace(sampling, seed=seed)) for seed in seeds]


def warped(reference: Chain, name: str, tokens: list[int], sampling: Sampling) -> Any:
    """Float64 [T, V], what a member draws each token of an answer from."""
    verifier = reference.engine.verifiers[name]
    logits = answer_logits(verifier, PROMPT, tokens, ReadPattern(len(tokens)))
    prefixes = Prefixes(PROMPT, [[]] * len(tokens))
    return warp(logits, sampling, prefixes, len(PROMPT)).double().numpy()


def places(
    reference: Chain, found: list[list[int]], sampling: Sampling
) -> tuple[tuple[Any, Any], int]:
    """Places [N] of all tokens in both orders, and how many tokens were impossible."""
    uniform = np.random.default_rng(0)
    by_order: tuple[list[Any], list[Any]] = ([], [])
    num_impossible = 0
    for tokens in found:
        own = warped(reference, "target", tokens, sampling)
        below = warped(reference, "near", tokens, sampling)
        num_impossible += int((own[np.arange(len(tokens)), tokens] == 0).sum())
        share = uniform.random(len(tokens))
        for kept, key in zip(by_order, (own, own / (below + 1e-9)), strict=True):
            kept.append(place(own, np.argsort(-key, axis=-1, kind="stable"), tokens, share))
    first, second = (np.concatenate(kept) for kept in by_order)
    return (first, second), num_impossible


def place(probabilities: Any, order: Any, tokens: list[int], share: Any) -> Any:
    """[T]: where the tokens [T] lie in the interval that the rows' probabilities fill in an order.

    Args:
        share: [T] of [0, 1), distance from the beginning of the token's own part.
    """
    rows = np.arange(len(tokens))
    ordered = np.take_along_axis(probabilities, order, -1)
    ranks = (order == np.array(tokens)[:, None]).argmax(-1)
    own = ordered[rows, ranks]
    return ordered.cumsum(-1)[rows, ranks] - own + share * own


def p_value(by_order: tuple[Any, Any]) -> float:
    """That places as uneven as the more uneven of the two orders come by chance."""
    tails = []
    for found in by_order:
        counts = np.histogram(found, NUM_BINS, (0, 1))[0]
        expected = len(found) / NUM_BINS
        chi_square = ((counts - expected) ** 2 / expected).sum()
        half_freedom = torch.tensor((NUM_BINS - 1) / 2, dtype=torch.float64)
        tails.append(float(torch.special.gammaincc(half_freedom, torch.tensor(chi_square / 2))))
    return min(1.0, 2 * min(tails))


# The test itself


def test_places_are_uniform_in_any_order() -> None:
    numbers = np.random.default_rng(1)
    probabilities = numbers.dirichlet(np.ones(5), size=20_000)
    tokens = [int(numbers.choice(5, p=row)) for row in probabilities]
    order = np.argsort(numbers.random((20_000, 5)), axis=-1)
    found = place(probabilities, order, tokens, numbers.random(20_000))
    assert p_value((found, found)) > 0.01
    # by hand: in the order 2, 0, 1 token 0 fills what follows token 2's 0.3
    row, order = np.array([[0.5, 0.2, 0.3]]), np.array([[2, 0, 1]])
    assert place(row, order, [0], np.array([0.4])) == pytest.approx([0.3 + 0.4 * 0.5])


def test_power() -> None:
    numbers, num = np.random.default_rng(0), 2000
    even = numbers.random((num, NUM_TOKENS))
    uneven = numbers.random((num, NUM_TOKENS)) / 2
    uneven += 0.5 * (numbers.random((num, NUM_TOKENS)) > 0.5 + DETECTED_DISTANCE)
    assert np.mean([p_value((row, row)) < 0.02 for row in even]) < 0.02
    rejected = [p_value(both) < SIGNIFICANCE for both in zip(even, uneven, strict=True)]
    assert np.mean(rejected) >= 0.99


# The law


@pytest.mark.parametrize(
    ("where", "plan", "sampling"),
    [
        (DEVICE, *CASES[0]),
        *(pytest.param(DEVICE, *case, marks=proof) for case in CASES[1:]),
        *(pytest.param(GPU[0], *case, marks=needs_gpu) for case in CASES_OF_GPUS),
    ],
    ids=str,
)
def test_law_is_the_targets(
    chain_at: ChainAt, reference: Chain, where: Where, plan: str, sampling: str
) -> None:
    found = answers(chain_at(where), PLANS[plan], SAMPLINGS[sampling], NUM_TOKENS)
    by_order, num_impossible = places(reference, found, SAMPLINGS[sampling])
    assert num_impossible <= MOST_IMPOSSIBLE
    assert p_value(by_order) >= SIGNIFICANCE


def test_law_is_the_targets_in_rounds_of_the_host(chain_at: ChainAt, reference: Chain) -> None:
    """Of which `test_law` has more."""
    test_law_is_the_targets(chain_at, reference, HOST, *CASES[0])


@proof
@pytest.mark.parametrize("where", ROUNDED_PLACES, ids=str)
def test_rounding_leaves_the_law(chain_at: ChainAt, reference: Chain, where: Where) -> None:
    found = answers(chain_at(where), PLANS["block"], SAMPLINGS["temperature"], NUM_TOKENS)
    by_order, num_impossible = places(reference, found, SAMPLINGS["temperature"])
    assert num_impossible == 0
    assert p_value(by_order) >= SIGNIFICANCE


def test_rounds_run_where_they_should(chain_at: ChainAt) -> None:
    request = Request(PROMPT, 1, SAMPLINGS["all"], frozenset(), PLANS["block"])
    for where, is_on_device in ((HOST, False), (DEVICE, True)):
        stages, _ = chain_at(where).engine.stages(request)
        assert isinstance(stages[-1], DeviceTreeStage) == is_on_device


@proof
@pytest.mark.parametrize("where", PLACES, ids=str)
def test_seeds_reproduce(chain_at: ChainAt, where: Where) -> None:
    chain, plan, sampling = chain_at(where), PLANS["adaptive"], SAMPLINGS["all"]
    first, second, other = (answer(chain, plan, replace(sampling, seed=seed)) for seed in (5, 5, 6))
    assert first == second != other
    answer(chain, PLANS["head"], replace(sampling, top_k=3))
    assert answer(chain, plan, replace(sampling, seed=5)) == first
    assert answer(chain, plan, sampling) != answer(chain, plan, sampling)


# What is wrong is rejected


def is_rejected(chain: Chain, reference: Chain, plan: str) -> bool:
    sampling = SAMPLINGS["temperature"]
    found = answers(chain, PLANS[plan], sampling, NUM_TOKENS_OF_FAULTS)
    return p_value(places(reference, found, sampling)[0]) < SIGNIFICANCE


@proof
def test_blocks_that_are_kept_whole_are_rejected(
    chain_at: ChainAt, reference: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The law is then the intermediate's."""
    right = round_parts.verify

    def verify(block: Tensor, num: Tensor, p: Tensor, q: Tensor, *others: Any) -> Any:
        return right(block, num, p, p[: len(q)], *others)

    monkeypatch.setattr(round_parts, "verify", verify)
    assert is_rejected(chain_at(DEVICE), reference, "block")


@proof
def test_a_token_after_a_cut_that_is_not_from_the_residual_is_rejected(
    chain_at: ChainAt, reference: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = round_parts.verify

    def verify(block: Tensor, num: Tensor, p: Tensor, q: Tensor, u: Tensor, *others: Any) -> Any:
        num_kept, _ = right(block, num, p, q, u, *others)
        return num_kept, Operations().draw(p.index_select(0, num_kept), u[-1:]).squeeze(0)

    monkeypatch.setattr(round_parts, "verify", verify)
    assert is_rejected(chain_at(DEVICE), reference, "token")


@proof
def test_walks_that_prefer_candidates_are_rejected(
    chain_at: ChainAt, reference: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row steps to a child of its own, whatever was drawn."""
    right = Operations.walk

    def walk(self: Operations, tree: Any, drawn: Tensor, *others: Any) -> Any:
        return right(self, tree, drawn.index_copy(0, tree.parents[1:], tree.tokens[1:]), *others)

    monkeypatch.setattr(Operations, "walk", walk)
    assert is_rejected(chain_at(DEVICE), reference, "independent")


@proof
def test_random_numbers_that_stay_are_rejected(
    chain_at: ChainAt, reference: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a graph has taken in the numbers of its capture."""

    def fill(self: DeviceSampler, uniforms: Tensor) -> None:
        uniforms.copy_(torch.linspace(0, 0.99, len(uniforms)))

    monkeypatch.setattr(DeviceSampler, "fill", fill)
    assert is_rejected(chain_at(DEVICE), reference, "independent")


@proof
def test_noise_that_stays_is_rejected(
    chain_at: ChainAt, reference: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a graph has taken in the key of its capture."""
    # the key that stays is this seed's, not a random one of whichever test ran before
    answer(chain_at(DEVICE), PLANS["coupled"], replace(SAMPLINGS["temperature"], seed=1))
    monkeypatch.setattr(DeviceNoise, "set", lambda noise, other: None)
    assert is_rejected(chain_at(DEVICE), reference, "coupled")
