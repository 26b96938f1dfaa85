"""Draws against hand-worked probabilities, and the samplers' other verbs."""

from collections import Counter

import pytest
import torch

from polybasic.chain.formats.plan import Rule
from polybasic.deploy.runtime.rounds.noise import Noise
from polybasic.deploy.runtime.rounds.sampling import (
    GreedyRows,
    GreedySampler,
    Prefixes,
    Probabilities,
    RandomSampler,
    Sampling,
    make_sampler,
)
from tests.deploy.small_chains import CPU, VOCAB_SIZE, Weights, small_config

LOG = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()


def greedy_rows(*tokens: int) -> GreedyRows:
    return GreedyRows(list(tokens))


def test_draws_follow_the_probabilities() -> None:
    sampler = RandomSampler(Sampling(1.0, seed=0), CPU, 0)
    row = torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.2, 0.0]])
    drawn = Counter(sampler.draw(Probabilities(row), 0) for _ in range(4000))
    assert set(drawn) == {1, 3, 4}
    for token, probability in ((1, 0.5), (3, 0.3), (4, 0.2)):
        deviation = (4000 * probability * (1 - probability)) ** 0.5
        assert abs(drawn[token] - 4000 * probability) < 4 * deviation


def test_impossible_tokens_are_never_drawn_at_the_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = RandomSampler(Sampling(1.0, seed=0), CPU, 0)
    row = torch.tensor([[0.0, 0.7, 0.3, 0.0]])
    for uniform, token in ((0.0, 1), (0.69, 1), (0.71, 2), (1.0, 2)):
        monkeypatch.setattr(torch, "rand", lambda *size, u=uniform, **_: torch.full(size, u))
        assert sampler.draw(Probabilities(row), 0) == token


def test_greedy_verification_keeps_the_common_prefix() -> None:
    sampler = GreedySampler(Sampling(), 0)
    tokens, proposed = [4, 5, 6], greedy_rows(4, 5, 6)
    assert sampler.verify(tokens, proposed, greedy_rows(4, 5, 7, 8)) == (2, 7)
    assert sampler.verify(tokens, proposed, greedy_rows(4, 5, 6, 8)) == (3, 8)
    assert sampler.verify([], greedy_rows(), greedy_rows(3)) == (0, 3)


@pytest.mark.parametrize(
    ("temperature", "rule"), [(0.0, "block"), (1.0, "block"), (1.0, "coupled")]
)
def test_the_same_prefix_gives_the_same_row_wherever_it_is_cut(
    temperature: float, rule: Rule
) -> None:
    """A tree's row, a block's row and a single one must agree, or verification is of another q."""
    sampling = Sampling(temperature, repetition_penalty=1.5, frequency_penalty=0.7, seed=0)
    torch.manual_seed(0)
    logits = torch.randn(3, VOCAB_SIZE)
    model = Weights(0).decoder(small_config(1, 16))
    noise = Noise(model, sampling) if rule == "coupled" else None
    sampler = make_sampler(sampling, CPU, 2, rule, noise)
    tree = sampler.distributions(logits, Prefixes([1, 2, 3], [[], [4], [4, 3]]))
    for row, prefix in enumerate(([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 3])):
        alone = sampler.distributions(logits[row : row + 1], Prefixes(prefix, [[]]))
        (probability,) = sampler.probabilities(alone, [0], [3])
        assert sampler.probabilities(tree, [row], [3]) == [probability]
        (unlike,) = sampler.probabilities(
            sampler.distributions(logits[row : row + 1], Prefixes([1, 2], [[]])), [0], [3]
        )
        assert unlike != probability


def test_greedy_takes_bias_and_penalties_into_account() -> None:
    def most_probable(**settings: object) -> list[int]:
        sampler = make_sampler(Sampling(**settings), CPU, 1)  # type: ignore[arg-type]
        rows = sampler.distributions(logits, Prefixes([7, 2], [[], [2]]))
        return [sampler.draw(rows, 0), sampler.draw(rows, 1)]

    logits = torch.tensor([[0.0, 1.0, 2.0, 1.5]]).repeat(2, 1)
    logits = torch.cat([logits, torch.zeros(2, 6)], 1)
    assert most_probable() == [2, 2]
    assert most_probable(frequency_penalty=0.4) == [2, 3]  # 2 - 0.4, 2 - 0.8 against 1.5
    assert most_probable(presence_penalty=0.6) == [3, 3]
    assert most_probable(repetition_penalty=2) == [3, 3]
    assert most_probable(logit_bias={1: 1.1}) == [1, 1]


def test_greedy_ignores_what_keeps_the_argmax() -> None:
    sampler = make_sampler(Sampling(0.0, top_k=1, top_p=0.1, min_p=0.9), CPU, 0)
    rows = sampler.distributions(LOG, Prefixes([0], [[], []]))
    assert [sampler.draw(rows, 0), sampler.draw(rows, 1)] == [0, 2]
    found = sampler.probabilities(rows, [1, 0], [2, 1])
    assert found == pytest.approx([0.8, 0.3])


def test_probabilities_are_those_that_were_drawn_with() -> None:
    sampler = make_sampler(Sampling(1.0, top_k=2, seed=0), CPU, 0)
    rows = sampler.distributions(LOG, Prefixes([0], [[], []]))
    assert sampler.probabilities(rows, [0, 0], [0, 1]) == pytest.approx([0.625, 0.375])
    assert sampler.probabilities(rows, [1, 0], [2, 2]) == pytest.approx([0.8, 0.0])
    for variant in (sampler, make_sampler(Sampling(), CPU, 0)):
        assert (
            variant.probabilities(variant.distributions(LOG, Prefixes([], [[], []])), [], []) == []
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_were_taken_hold_nothing_of_the_others(temperature: float) -> None:
    sampler = make_sampler(Sampling(temperature, seed=0), CPU, 0)
    rows, other = (
        sampler.distributions(logits, Prefixes([0], [[], []])) for logits in (LOG, LOG.flip(0))
    )
    joined = sampler.join([sampler.take(rows, [0, 1]), sampler.take(other, [0])])
    if temperature == 0:
        assert joined == GreedyRows([0, 2, 2])
        assert rows.probabilities is not None  # as long as a flush may ask for probabilities
        return
    torch.testing.assert_close(joined.values, torch.cat([LOG, LOG[1:]]).exp())
    assert joined.values.untyped_storage().nbytes() == joined.values.nbytes
    alone = sampler.join([sampler.take(rows, [1])])
    assert alone.values.untyped_storage().nbytes() == rows.values[1].nbytes


def test_seeds_decide_the_draws() -> None:
    def drawn(seed: int | None) -> list[int]:
        sampler = make_sampler(Sampling(1.0, seed=seed), CPU, 0)
        rows = sampler.distributions(torch.zeros(64, 1000), Prefixes([], [[]] * 64))
        return [sampler.draw(rows, row) for row in range(64)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(None) != drawn(None)
    assert drawn((1 << 64) - 1) == drawn((1 << 64) - 1)
