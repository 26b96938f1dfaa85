"""Native kernels of noise and of drafts that follow it, against the reference."""

import pytest
import torch

from polybasic.chain.kernels import noise
from polybasic.chain.kernels.cpu.library import Kernels, load_kernels
from polybasic.chain.kernels.drafts import Candidates
from polybasic.chain.kernels.executor import Perturbation
from polybasic.chain.kernels.rows import consecutive_rows
from tests.chain.kernels.cpu.test_passes import random_ids
from tests.chain.native_models import (
    CONFIG,
    SCALES,
    cache_of,
    decoder,
    drafting,
    eager,
    states_before_draft,
    threads,
)

POSITIONS = torch.tensor([0, 1, 4095, 7408, 2**31, 2**32 - 1])
DEPTH, TOP_K, PROMPT = 4, 5, 30


@pytest.fixture
def kernels() -> Kernels:
    found = load_kernels()
    assert found is not None, "no native kernels"
    return found


@pytest.mark.parametrize("num_tokens", [1, 13, 64, 1000, 4096])
@pytest.mark.parametrize(("seed", "choice"), [(3, 0), (2**33 + 1, 2**32 - 1), (2**64 - 1, 1)])
def test_native_noise_has_the_bits_of_the_reference(
    kernels: Kernels, seed: int, choice: int, num_tokens: int
) -> None:
    key = noise.noise_key(seed, choice)
    expected = noise.gumbel_noise(key, POSITIONS, num_tokens)
    for num in (1, 2, 3):
        with threads(num):
            found = kernels.noise(key, POSITIONS, num_tokens)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    for other in (noise.noise_key(seed ^ 1 << 40, choice), noise.noise_key(seed, choice ^ 1)):
        assert not torch.equal(kernels.noise(other, POSITIONS, num_tokens), expected)


def test_native_zeros_have_the_sign_of_the_reference(kernels: Kernels) -> None:
    found = kernels.noise(noise.noise_key(3), POSITIONS, 1000)
    assert found[3, 796].view(torch.int32) == -(2**31)


def test_noise_of_an_executor_covers_the_vocabulary() -> None:
    native, key = decoder(torch.float32), noise.noise_key(5)
    with eager():
        plain = decoder(torch.float32)
    assert (native.name, plain.name) == ("cpu", "torch")
    found, expected = (model.noise(key, POSITIONS) for model in (native, plain))
    assert found.shape == (len(POSITIONS), CONFIG.vocab_size)
    assert torch.equal(found, expected)
    keys = torch.stack([noise.noise_key(seed) for seed in range(len(POSITIONS))])
    found, expected = (model.noise(keys, POSITIONS) for model in (native, plain))
    assert torch.equal(found, expected)


@torch.inference_mode()
def draft(kind: str, perturbation: Perturbation | None) -> Candidates:
    model, ids = drafting(kind), random_ids(PROMPT)
    cache = cache_of(model, len(model.weights.layers))
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(PROMPT, CONFIG.hidden_size, generator=generator)
    state = states_before_draft(model, cache, ids, features, DEPTH)
    return model.draft(state, cache.layers, PROMPT, DEPTH, TOP_K, perturbation=perturbation)


@pytest.mark.parametrize("kind", SCALES)
def test_perturbed_drafts_are_those_of_the_reference(kind: str) -> None:
    added = noise.gumbel_noise(noise.noise_key(8), torch.arange(PROMPT, PROMPT + DEPTH + 2), 100)
    perturbation = Perturbation(SCALES[kind], added)
    found, unperturbed = draft(kind, perturbation), draft(kind, None)
    with eager():
        expected = draft(kind, perturbation)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.beams, expected.beams)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found.tokens, unperturbed.tokens)
    # a row for each level: another level's noise gives other candidates
    for level in range(DEPTH):
        changed = added.clone()
        changed[level] = added[DEPTH]
        first = TOP_K + (level - 1) * TOP_K**2 if level > 0 else 0
        other = draft(kind, Perturbation(SCALES[kind], changed))
        assert torch.equal(other.tokens[:first], found.tokens[:first])
        assert not torch.equal(other.tokens, found.tokens)


@pytest.mark.parametrize("kernels_wanted", ["native", "eager"])
@pytest.mark.parametrize("kind", ["head", "trimmed head"])
def test_no_noise_leaves_a_draft_as_it_is(
    kind: str, kernels_wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", kernels_wanted)
    nothing = Perturbation(1.0, torch.zeros(DEPTH, CONFIG.vocab_size))
    found, expected = draft(kind, nothing), draft(kind, None)
    for value, other in zip(vars(found).values(), vars(expected).values(), strict=True):
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other))


@torch.inference_mode()
@pytest.mark.parametrize("kernels_wanted", ["native", "eager"])
def test_scores_are_log_probabilities_of_perturbed_logits(
    kernels_wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", kernels_wanted)
    model, ids = drafting("model"), random_ids(PROMPT)
    cache = cache_of(model)
    state = model.forward(ids, [cache.layers], [consecutive_rows(0, PROMPT)])[-1:]
    added = noise.gumbel_noise(noise.noise_key(8), torch.arange(1), CONFIG.vocab_size)
    scale = torch.tensor(1.25, dtype=torch.float64)
    found = model.draft(
        state, cache.layers, PROMPT, 1, TOP_K, perturbation=Perturbation(scale, added)
    )
    scores = (model.logits(state)[0] * 1.25 + added[0]).log_softmax(-1).topk(TOP_K)
    assert found.tokens.tolist() == scores.indices.tolist()
    torch.testing.assert_close(found.scores, scores.values, rtol=1e-5, atol=1e-5)
