"""The short test of sampled answers: what passes, what is rejected, and by how many tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from polybasic.chain.formats.plan import Plan, Rule
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.bench.exactness.law import NUM_CELLS, check_law, law_of, places, warped_rows
from polybasic.deploy.runtime.rounds.sampling import RandomSampler, Sampling
from tests.deploy.noisy_chain import TREE, answer, three, write_noisy_chain

SIGNIFICANCE = 1e-4
DETECTED_DISTANCES = {6_000: 0.055, 20_000: 0.03, 60_000: 0.0175}
"""Total variation distance from uniform places that is detected with probability 0.99."""
RULES: tuple[Rule, ...] = ("coupled", "block", "token")
SAMPLING = Sampling(1.0)
ALONE = Plan(members=("target",), tree=TREE)

Answers = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    folder = write_noisy_chain(tmp_path_factory.mktemp("noisy"))
    return load_chain(folder, device="cpu", dtype="float32")


def answers(chain: Chain, plan: Plan, sampling: Sampling, num: int = 10) -> Answers:
    """Of 100 tokens each, with a seed for each."""
    found = []
    for seed in range(num):
        prompt = [(7 * seed + 3 * place) % 60 for place in range(8)]
        found.append((prompt, answer(chain, plan, replace(sampling, seed=seed), prompt)))
    return found


def p_value(chain: Chain, found: Answers, sampling: Sampling = SAMPLING) -> float:
    check = check_law(chain.engine.verifiers["target"], sampling, found)
    assert check is not None
    assert (check.tokens, check.cells) == (100 * len(found), NUM_CELLS)
    return check.p_value


@pytest.fixture(scope="module")
def right(chain: Chain) -> Answers:
    return answers(chain, three("block"), SAMPLING)


# What passes


@pytest.mark.parametrize("rule", ["coupled", "token"])
def test_answers_of_a_chain_pass(chain: Chain, rule: Rule) -> None:
    assert p_value(chain, answers(chain, three(rule), SAMPLING, 6)) >= SIGNIFICANCE


def test_answers_by_the_block_rule_pass(chain: Chain, right: Answers) -> None:
    assert p_value(chain, right) >= SIGNIFICANCE


def test_all_warpers_are_undone(chain: Chain) -> None:
    sampling = Sampling(
        0.8, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3
    )
    found = answers(chain, ALONE, sampling)
    assert p_value(chain, found, sampling) >= SIGNIFICANCE
    without = replace(sampling, repetition_penalty=1.0, presence_penalty=0.0)
    assert p_value(chain, found, without) < SIGNIFICANCE


@pytest.mark.proof
@pytest.mark.parametrize("rule", RULES)
def test_many_answers_of_a_chain_pass(chain: Chain, rule: Rule) -> None:
    assert p_value(chain, answers(chain, three(rule), SAMPLING, 60)) >= SIGNIFICANCE


# What is rejected


@pytest.mark.parametrize("temperature", [0.8, 1.3])
def test_another_temperature_is_rejected(chain: Chain, right: Answers, temperature: float) -> None:
    assert p_value(chain, right, replace(SAMPLING, temperature=temperature)) < SIGNIFICANCE


def test_draws_that_ignore_top_p_are_rejected(chain: Chain, right: Answers) -> None:
    assert p_value(chain, right, replace(SAMPLING, top_p=0.95)) == 0


def test_draws_with_a_top_p_that_was_not_asked_for_are_rejected(chain: Chain) -> None:
    assert p_value(chain, answers(chain, ALONE, replace(SAMPLING, top_p=0.9))) < SIGNIFICANCE


@contextmanager
def accepting(share: float) -> Iterator[None]:
    """Tokens that would be rejected are accepted with this probability."""
    happens = RandomSampler._happens

    def too_often(self: RandomSampler, probabilities: list[float]) -> list[bool]:
        return happens(self, [p + share * (1 - p) for p in probabilities])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RandomSampler, "_happens", too_often)
        yield


def test_drafts_that_are_all_taken_are_rejected(chain: Chain) -> None:
    with accepting(1):
        assert p_value(chain, answers(chain, three("token"), SAMPLING, 6)) < SIGNIFICANCE


@pytest.mark.proof
def test_drafts_that_are_taken_too_often_are_rejected(chain: Chain) -> None:
    """A half of those that should be rejected, in 6,000 tokens."""
    with accepting(0.5):
        assert p_value(chain, answers(chain, three("token"), SAMPLING, 60)) < SIGNIFICANCE


def test_answers_of_one_seed_are_no_independent_draws(chain: Chain) -> None:
    """Why each answer needs a seed of its own: an answer that is counted ten times is rejected."""
    found = answers(chain, ALONE, SAMPLING, 1)
    assert p_value(chain, 10 * found) < SIGNIFICANCE


# Places and their chi-square


def test_places_of_a_row() -> None:
    rows = torch.tensor([[0.1, 0.4, 0.0, 0.4, 0.1]]).repeat(5, 1)

    class Middle:
        def random(self, size: int) -> np.ndarray:
            return np.full(size, 0.5)

    found = places(rows, [1, 3, 0, 4, 2], Middle())  # type: ignore[arg-type]
    assert found[:4] == pytest.approx([0.2, 0.6, 0.85, 0.95])
    assert np.isnan(found[4])


def test_places_of_the_targets_draws_are_uniform() -> None:
    numbers = np.random.default_rng(0)
    rows = torch.tensor(numbers.dirichlet([0.3] * 12, 40_000))
    tokens = [int(numbers.choice(12, p=row)) for row in rows.numpy()]
    found = places(rows, tokens, numbers)
    assert np.abs(np.sort(found) - np.linspace(0, 1, len(found))).max() < 1.95 / 200  # 0.1 % point
    check = law_of(found)
    assert check is not None
    assert check.p_value > SIGNIFICANCE


def test_chi_square_against_the_tables() -> None:
    # 36.191 is the 1 % point with 19 degrees of freedom
    shift = (36.191 * 10_000 / 20) ** 0.5
    counts = 10_000 + shift * np.array([1, -1] * 10)
    found = np.repeat((np.arange(20) + 0.5) / 20, counts.round().astype(int))
    check = law_of(found)
    assert check is not None
    assert check.chi_square == pytest.approx(36.191, rel=0.02)
    assert check.p_value == pytest.approx(0.01, rel=0.1)


def test_too_few_tokens_are_not_judged() -> None:
    numbers = np.random.default_rng(0)
    assert law_of(numbers.random(99)) is None
    assert law_of(numbers.random(100)) is not None


@pytest.mark.parametrize(("num_tokens", "distance"), DETECTED_DISTANCES.items())
def test_power(num_tokens: int, distance: float) -> None:
    """Half of the cells too full, half too empty: the direction that is hardest to see."""
    numbers = np.random.default_rng(0)
    density = np.where(np.arange(NUM_CELLS) < 10, 1 + 2 * distance, 1 - 2 * distance) / NUM_CELLS
    assert np.abs(density - 1 / NUM_CELLS).sum() / 2 == pytest.approx(distance)

    def rejected(law: np.ndarray, significance: float) -> float:
        found = []
        for counts in numbers.multinomial(num_tokens, law, 1000):
            check = law_of(np.repeat((np.arange(NUM_CELLS) + 0.5) / NUM_CELLS, counts))
            assert check is not None
            found.append(check.p_value < significance)
        return float(np.mean(found))

    assert rejected(density, SIGNIFICANCE) >= 0.99
    assert rejected(np.full(NUM_CELLS, 1 / NUM_CELLS), 0.01) < 0.025


def test_distributions_are_the_targets(chain: Chain) -> None:
    """Read in large passes, they are those of one row at a time."""
    verifier = chain.engine.verifiers["target"]
    prompt, tokens = list(range(8)), [5, 4, 3, 9, 9, 1]
    rows = warped_rows(verifier, SAMPLING, prompt, tokens)
    assert rows.shape == (6, 64)
    for place in range(6):
        alone = warped_rows(verifier, SAMPLING, [*prompt, *tokens[:place]], [0])
        assert torch.allclose(rows[place], alone[0], atol=1e-6)
