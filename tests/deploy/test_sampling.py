"""Warping against transformers' own, and draws against hand-worked probabilities."""

from collections import Counter

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from polybasic.deploy.sampling import GreedySampler, Probabilities, RandomSampler, Sampling, warp

CPU = torch.device("cpu")


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 1, 5, 500])
@pytest.mark.parametrize("top_p", [None, 0.2, 0.9, 1.0])
def test_warping_is_transformers(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 100) * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p is not None and top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    found = warp(logits, Sampling(temperature, top_k, top_p))
    assert torch.allclose(found, expected.softmax(-1), atol=1e-6)
    assert ((found > 0) == (expected > float("-inf"))).all()


def test_equal_probabilities_are_cut_to_the_mass_and_no_further() -> None:
    found = warp(torch.zeros(1, 4), Sampling(1.0, top_p=0.5))
    assert sorted(found[0].tolist()) == [0.0, 0.0, 0.5, 0.5]


def test_draws_follow_the_probabilities() -> None:
    sampler = RandomSampler(Sampling(1.0, seed=0), CPU)
    row = torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.2, 0.0]])
    drawn = Counter(sampler.draw(Probabilities(row), 0) for _ in range(4000))
    assert set(drawn) == {1, 3, 4}
    for token, probability in ((1, 0.5), (3, 0.3), (4, 0.2)):
        deviation = (4000 * probability * (1 - probability)) ** 0.5
        assert abs(drawn[token] - 4000 * probability) < 4 * deviation


def test_impossible_tokens_are_never_drawn_at_the_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = RandomSampler(Sampling(1.0, seed=0), CPU)
    row = torch.tensor([[0.0, 0.7, 0.3, 0.0]])
    for uniform, token in ((0.0, 1), (0.69, 1), (0.71, 2), (1.0, 2)):
        monkeypatch.setattr(torch, "rand", lambda *size, u=uniform, **_: torch.full(size, u))
        assert sampler.draw(Probabilities(row), 0) == token


def test_greedy_verification_keeps_the_common_prefix() -> None:
    sampler = GreedySampler()
    assert sampler.verify([4, 5, 6], [4, 5, 6], [4, 5, 7, 8], "block") == (2, 7)
    assert sampler.verify([4, 5, 6], [4, 5, 6], [4, 5, 6, 8], "block") == (3, 8)
    assert sampler.verify([], None, [3], "block") == (0, 3)
