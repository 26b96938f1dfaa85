"""What samplers find together is what each finds alone."""

import pytest
import torch

from polybasic.deploy.runtime.rounds import draws
from polybasic.deploy.runtime.rounds.draws import Draws, distributions_together
from polybasic.deploy.runtime.rounds.noise import Noise
from polybasic.deploy.runtime.rounds.sampling import NotFiniteError, Sampling, make_sampler
from polybasic.deploy.runtime.rounds.warping import Prefixes
from tests.deploy.small_chains import CPU, VOCAB_SIZE, Weights, small_config

SETTINGS = [
    Sampling(),
    Sampling(logit_bias={3: 9.0}),
    *(Sampling(1.0 + seed, seed=seed) for seed in range(3)),
    *(Sampling(0.5, top_k=top_k, top_p=top_k / 8, seed=top_k) for top_k in (5, 6, 7)),
    Sampling(0.7, min_p=0.1, seed=8),
    Sampling(0.9, min_p=0.2, top_p=0.9, seed=9, choice=1),
    Sampling(1.1, min_p=0.3, top_p=0.4, seed=2**64 - 1),
    Sampling(0.7, top_k=3, presence_penalty=0.5, seed=8),
    Sampling(min_tokens=9, held_back=frozenset({1})),
    Sampling(),
]


def asked(rule: str) -> tuple[list[Draws], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Weights(0).decoder(small_config(1, 16))
    given, logits = [], []
    for place, sampling in enumerate(SETTINGS):
        noise = Noise(model, sampling) if rule == "coupled" and not sampling.is_greedy else None
        suffixes = [[], [4], [4, 3], [2]][: 1 + place % 4]
        given.append(
            Draws(make_sampler(sampling, CPU, 1, rule, noise), Prefixes([1] * place, suffixes))
        )
        logits.append(3 * torch.randn(len(suffixes), VOCAB_SIZE))
    return given, logits


@pytest.mark.parametrize("most", [draws._MOST_WARPED, 3 * VOCAB_SIZE])
@pytest.mark.parametrize("rule", ["coupled", "block"])
def test_distributions_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, rule: str, most: int
) -> None:
    monkeypatch.setattr(draws, "is_waited_for", lambda device: True)
    monkeypatch.setattr(draws, "_MOST_WARPED", most)
    given, logits = asked(rule)
    found = distributions_together([*given, None], [*logits, None])
    assert found.pop() is None
    given, logits = asked(rule)
    for drawing, rows, give in zip(given, logits, found, strict=True):
        expected, together = drawing.distributions(rows)(), give()
        if rule == "block" and not drawing.sampler.sampling.is_greedy:
            assert torch.equal(together.values, expected.values)
            continue
        assert together.tokens == expected.tokens
        for tokens in (together.tokens, [0] * len(rows)):
            asked_of = [*range(len(rows))], tokens
            probabilities = expected.probabilities(*asked_of)
            assert together.probabilities(*asked_of) == pytest.approx(probabilities, rel=1e-5)


def test_a_device_is_waited_for_once_by_all_of_a_kind(
    monkeypatch: pytest.MonkeyPatch, num_drawn: list[int]
) -> None:
    given, logits = asked("coupled")
    distributions_together(given, logits)
    assert num_drawn == [], "the host's memory is read as it is"
    monkeypatch.setattr(draws, "is_waited_for", lambda device: True)
    distributions_together(given, logits)
    rows = [len(matrix) for matrix in logits]
    plain, warped, top_k, min_p = rows[0] + rows[-1], rows[2:5], rows[5:8], rows[8:11]
    assert num_drawn == [plain, sum(warped), sum(top_k), min_p[0], sum(min_p[1:])]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_logits_that_are_no_numbers_fail(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    monkeypatch.setattr(draws, "is_waited_for", lambda device: True)
    given, logits = asked("coupled")
    wrong = [drawing.sampler.sampling.temperature == temperature for drawing in given].index(True)
    logits[wrong][-1, 5] = torch.nan
    for place, give in enumerate(distributions_together(given, logits)):
        if place == wrong:
            with pytest.raises(NotFiniteError):
                give()
        else:
            give()
