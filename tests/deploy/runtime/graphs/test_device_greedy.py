"""Greedy answers of two and three models on the device are the target's, up to its rounding."""

from collections.abc import Iterator

import pytest
import torch

from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain
from polybasic.deploy.bench.exactness.outputs import Comparer
from polybasic.deploy.bench.exactness.rereading import read_patterns_of
from polybasic.deploy.bench.exactness.rounding import NUM_POSITIONS, Rounding, measure_rounding
from polybasic.deploy.bench.schema import Agreement
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.deploy.changed_kernels import kernels_that, rounds_otherwise
from tests.deploy.noisy_chain import (
    PLACES,
    PLANS,
    ROUNDED,
    ROUNDED_PLACES,
    TREE,
    ChainAt,
    Where,
    answer,
    chains_of,
    write_noisy_chain,
)

NUM_PROMPTS = 8

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def chain_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChainAt]:
    with chains_of(write_noisy_chain(tmp_path_factory.mktemp("greedy"))) as at:
        yield at


def agreement_with_the_target(chain: Chain) -> tuple[Agreement, Rounding]:
    """Of greedy answers to some prompts by two and three models."""
    numbers = torch.Generator().manual_seed(3)
    prompts = torch.randint(0, 60, (NUM_PROMPTS, 12), generator=numbers).tolist()
    alone = Plan(members=("target",), tree=TREE)
    expected = [answer(chain, alone, Sampling(), prompt) for prompt in prompts]
    verifier, plans = chain.engine.verifiers["target"], [PLANS["two"], PLANS["block"]]
    ways = read_patterns_of(plans, ["target", "near"], NUM_POSITIONS)
    rounding = measure_rounding(verifier, list(zip(prompts, expected, strict=True)), ways, {})
    comparer = Comparer(verifier, rounding.tolerance)
    for prompt, own in zip(prompts, expected, strict=True):
        sampler = chain.engine.repeatable_sampler(prompt, Sampling())
        for plan in plans:
            found = answer(chain, plan, Sampling(), prompt)
            comparer.count(sampler, prompt, own, found)
    return comparer.agreement(), rounding


@pytest.mark.parametrize("where", [*PLACES, *ROUNDED_PLACES], ids=str)
def test_greedy_answers_diverge_at_near_ties_only(chain_at: ChainAt, where: Where) -> None:
    agreement, rounding = agreement_with_the_target(chain_at(where))
    assert rounding.unsound == []
    assert rounding.close_share < 0.2
    assert agreement.identical + agreement.near_ties == agreement.answers == 2 * NUM_PROMPTS
    if where.dtype == "float32":
        assert agreement.near_ties == 0


def test_answers_of_kernels_that_round_differently_diverge_at_near_ties(chain_at: ChainAt) -> None:
    chain = chain_at(ROUNDED[0])
    with kernels_that(rounds_otherwise):
        agreement, rounding = agreement_with_the_target(chain)
    assert rounding.unsound == []
    assert agreement.near_ties >= 3
    assert agreement.identical + agreement.near_ties == agreement.answers
    assert 0 < agreement.widest_near_tie < agreement.tolerance == rounding.tolerance


def test_answers_of_a_faulty_kernel_are_no_near_ties(chain_at: ChainAt) -> None:
    """Of products of eight rows or more a twentieth is lost."""
    chain = chain_at(ROUNDED[0])
    with kernels_that(lambda rows, found: found if rows < 8 else 0.95 * found):
        agreement, rounding = agreement_with_the_target(chain)
    assert rounding.unsound == ["trees of 8 rows, 2 deep", "blocks of 6 rows"]
    missed = agreement.different
    assert missed > NUM_PROMPTS / 2
    # had its departure been taken for rounding:
    wrong = max(change.from_one_row or 0.0 for change in rounding.ways.values())
    assert wrong > 3 * rounding.tolerance
