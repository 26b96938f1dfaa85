"""The native kernel that draws tokens, against PyTorch's warping and the reference's noise."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polybasic.chain.kernels import noise
from polybasic.chain.kernels.cpu.library import Kernels
from polybasic.deploy.runtime.rounds.warping import Sampling, Warping
from tests.chain.kernels.cpu.test_noise import kernels
from tests.chain.native_models import threads

__all__ = ["kernels"]

POSITIONS = [0, 1, 2, 4095, 2**31, 2**32 - 1]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 700},
    {"top_k": 1 << 30},
    {"top_p": 1e-9},
    {"top_p": 0.3, "min_p": 0.1},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 100, "top_p": 0.9, "min_p": 0.02},
]


def rows_of(num_tokens: int, scale: float) -> Tensor:
    """Logits: as they come, with ties, with tokens that cannot be drawn, and all equal."""
    logits = torch.randn(6, num_tokens, generator=torch.Generator().manual_seed(num_tokens)) * scale
    logits[1], logits[2] = logits[1].round(), (4 * logits[2]).round() / 4
    logits[3, 1::3] = -math.inf
    logits[4] = 0
    logits[5, 1:] = -math.inf
    return logits


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 1000])
def test_masked_tokens_have_no_logit(kernels: Kernels, num_tokens: int) -> None:
    is_allowed = torch.rand(4, -(-num_tokens // 32) * 32, generator=torch.manual_seed(1)) < 0.5
    is_allowed[2], is_allowed[3] = True, False
    bits = np.packbits(is_allowed.numpy(), axis=1, bitorder="little")
    logits = torch.randn(5, num_tokens)
    masked = logits.clone()
    kernels.mask(masked[:4], torch.from_numpy(bits.view(np.int32)))
    expected = logits[:4].masked_fill(~is_allowed[:, :num_tokens], -math.inf)
    assert torch.equal(masked, torch.cat([expected, logits[4:]]))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("scale", [0.1, 2.5, 9.0])
@pytest.mark.parametrize("num_tokens", [1, 13, 1000, 4097])
def test_tokens_are_those_of_the_reference(
    kernels: Kernels, num_tokens: int, scale: float, settings: dict[str, Any]
) -> None:
    sampling = Sampling(0.7, **settings)
    logits, values = rows_of(num_tokens, scale), Warping.values_of(sampling)
    for seed in range(5):
        key = noise.noise_key(seed, seed)
        warped = Warping.of(sampling).truncated(logits, torch.tensor(values))
        added = noise.gumbel_noise(key, torch.tensor(POSITIONS), num_tokens)
        found = kernels.draw(logits, values, key, POSITIONS)
        assert found == (warped + added).argmax(-1).tolist()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("scale", [0.1, 2.5, 9.0])
@pytest.mark.parametrize("num_tokens", [1, 13, 4097])
def test_shares_are_those_of_the_softmax(
    kernels: Kernels, num_tokens: int, scale: float, settings: dict[str, Any]
) -> None:
    sampling, key = Sampling(0.7, **settings), noise.noise_key(2, 1)
    logits, values = rows_of(num_tokens, scale), Warping.values_of(sampling)
    warped = Warping.of(sampling).truncated(logits, torch.tensor(values))
    noisy = warped + noise.gumbel_noise(key, torch.tensor(POSITIONS), num_tokens)
    rows = [5, 0, 1, 2, 3, 3, 4]
    for tokens in (noisy.argmax(-1)[rows], logits.argmax(-1)[rows], torch.zeros(7).long()):
        drawn = noisy.softmax(-1)[rows, tokens].tolist()
        found = kernels.shares(logits, rows, tokens.tolist(), values, key, POSITIONS)
        assert found == pytest.approx(drawn, rel=1e-3, abs=1e-7)
        for given in (logits, logits.bfloat16()):
            greedy = given.float().softmax(-1)[rows, tokens].tolist()
            found = kernels.shares(given, rows, tokens.tolist())
            assert found == pytest.approx(greedy, rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 13, 1000, 4097])
def test_the_most_probable_token_is_the_first_of_the_largest_logits(
    kernels: Kernels, num_tokens: int, dtype: torch.dtype
) -> None:
    logits = rows_of(num_tokens, 9.0).to(dtype)
    expected = logits.float().numpy().argmax(-1).tolist()
    assert kernels.most_probable(logits) == expected
    assert kernels.most_probable(logits.repeat(7, 1)) == 7 * expected
    for wrong in (math.nan, -math.nan, math.inf):
        logits[2, num_tokens // 2], logits[3] = wrong, -math.inf
        kept = [*expected[:2], -1, -1, *expected[4:]]
        assert kernels.most_probable(logits) == kept


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_bfloat16_logits_are_drawn_from_as_they_are(
    kernels: Kernels, settings: dict[str, Any]
) -> None:
    values, key = Warping.values_of(Sampling(0.7, **settings)), noise.noise_key(5)
    for num_tokens in (13, 4097):
        logits = rows_of(num_tokens, 2.5).bfloat16()
        found = kernels.draw(logits, values, key, POSITIONS)
        assert found == kernels.draw(logits.float(), values, key, POSITIONS)


def test_a_row_does_not_depend_on_others_or_threads(kernels: Kernels) -> None:
    logits, key = rows_of(5000, 2.0), noise.noise_key(3)
    values = Warping.values_of(Sampling(1.3, top_p=0.97))
    together = kernels.draw(logits, values, key, POSITIONS)
    for num in (1, 2, 3):
        with threads(num):
            assert kernels.draw(logits, values, key, POSITIONS) == together
    for row, position in enumerate(POSITIONS):
        assert kernels.draw(logits[row : row + 1], values, key, [position]) == [together[row]]


@pytest.mark.parametrize("settings", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}])
@pytest.mark.parametrize("wrong", [math.nan, -math.nan, math.inf])
def test_nothing_is_drawn_from_what_is_no_number(
    kernels: Kernels, wrong: float, settings: dict[str, Any]
) -> None:
    logits, values = rows_of(1000, 1.0), Warping.values_of(Sampling(1.0, **settings))
    logits[0, 999], logits[1, 0], logits[2] = wrong, wrong, -math.inf
    found = kernels.draw(logits, values, noise.noise_key(1), POSITIONS)
    assert [token >= 0 for token in found] == [False, False, False, True, True, True]
