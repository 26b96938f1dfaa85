"""The reference of noise: known answers, its definition step by step, its accuracy and its law."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polybasic.chain.kernels import noise
from polybasic.chain.kernels.noise import gumbel, gumbel_noise, noise_key, philox

NEAR = 1257966912
"""The first word beyond the branch at 1 - sqrt(1/2)."""
ONE = 2714937024
"""The first word whose wait is 1 as float32."""
EDGES = [
    *(2**power + off for power in range(33) for off in (-1, 0, 1) if 0 <= 2**power + off < 2**32),
    *(place + off for place in (NEAR, ONE, ONE + 256) for off in range(-300, 300, 7)),
    *(2**32 - 2**power for power in range(1, 32)),
]
SIGNIFICANCE = 1e-4


def words_of(*numbers: int) -> list[Tensor]:
    return [torch.tensor([number]) for number in numbers]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "digits of pi"],
)
def test_words_are_those_of_random123(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    """Known answers of Philox4x32-10 in its authors' library."""
    first, second = words_of(*key)
    assert [int(word) for word in philox(words_of(*counter), (first, second))] == expected
    changed = philox(words_of(*counter), (first ^ 1, second))
    assert [int(word) for word in changed] != expected


# The definition once more, in whole numbers of Python and numbers of NumPy, one token at a time


def plain_philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        low, high = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = high >> 32 ^ b ^ k, high % 2**32, low >> 32 ^ d ^ m, low % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def plain_half(word: int) -> np.float32:
    high, low = np.float32(word // 65536), np.float32(word % 65536)
    return (high * np.float32(65536) + (low + np.float32(0.5))) * np.float32(2.0**-32)


def plain_split(y: np.float32) -> tuple[np.float32, np.float32]:
    """Exponent, and mantissa from sqrt(1/2) to sqrt(2)."""
    mantissa, exponent = math.frexp(y)
    if np.float32(mantissa) < np.float32(math.sqrt(0.5)):
        mantissa, exponent = 2 * mantissa, exponent - 1
    return np.float32(exponent), np.float32(mantissa)


def plain_ln1p(f: np.float32) -> np.float32:
    total = np.float32(noise.COEFFICIENTS[7])
    for place in range(6, -1, -1):
        total = total * f + np.float32(noise.COEFFICIENTS[place])
    return f + f * f * (f * total - np.float32(0.5))


def plain_gumbel(word: int) -> np.float32:
    log_2, x = np.float32(math.log(2)), plain_half(word)
    if x <= np.float32(1 - math.sqrt(0.5)):
        wait = -plain_ln1p(-x)
    else:
        exponent, mantissa = plain_split(plain_half(2**32 - 1 - word))
        wait = -(exponent * log_2 + plain_ln1p(mantissa - np.float32(1)))
    exponent, mantissa = plain_split(wait)
    return -(exponent * log_2 + plain_ln1p(mantissa - np.float32(1)))


def bits(values: Tensor) -> list[int]:
    found: list[int] = values.contiguous().view(torch.int32).flatten().tolist()
    return found


def random_words(count: int) -> Tensor:
    return torch.randint(0, 2**32, (count,), generator=torch.Generator().manual_seed(0))


def test_noise_of_a_word_is_as_documented_to_the_last_bit() -> None:
    words = [*EDGES, *random_words(500).tolist()]
    found = gumbel(torch.tensor(words))
    expected = torch.from_numpy(np.array([plain_gumbel(word) for word in words]))
    assert bits(found) == bits(expected)
    # both sides of the branch and of the second logarithm's zero are among them
    assert plain_half(NEAR - 1) <= np.float32(noise.NEAR) < plain_half(NEAR)
    assert (found == 0).any()
    assert len({math.copysign(1, value) for value in found.tolist()}) == 2


@pytest.mark.parametrize(("seed", "choice"), [(0, 0), (2**64 - 1, 3), (1 << 32, 2**32 - 1)])
def test_noise_of_a_token_is_that_of_its_word(seed: int, choice: int) -> None:
    positions = [0, 77, 2**32 - 1]
    found = gumbel_noise(noise_key(seed, choice), torch.tensor(positions), 150)
    assert found.shape == (3, 150)
    for row, position in enumerate(positions):
        for token in (0, 1, 15, 16, 63, 64, 100, 149):
            block = 16 * (token // 64) + token % 16
            counter, key = (block, position, choice, 0), (seed % 2**32, seed >> 32)
            word = plain_philox(counter, key)[token // 16 % 4]
            assert bits(found[row, token]) == bits(torch.tensor(plain_gumbel(word)))


def test_noise_does_not_depend_on_what_else_is_asked_for() -> None:
    key, positions = noise_key(9), torch.tensor([4, 0, 4, 1000])
    whole = gumbel_noise(key, positions, 300)
    assert torch.equal(whole[0], whole[2])
    for num_tokens in (1, 64, 65, 299):
        assert torch.equal(gumbel_noise(key, positions[1:], num_tokens), whole[1:, :num_tokens])
    keys = torch.stack([noise_key(2**40, 3), key, noise_key(8), key])
    assert torch.equal(gumbel_noise(keys, positions, 300)[1::2], whole[1::2])
    assert torch.equal(
        gumbel_noise(keys, positions, 300)[:1], gumbel_noise(keys[0], positions[:1], 300)
    )


def test_noise_is_minus_the_logarithm_of_minus_a_logarithm() -> None:
    words = torch.cat([torch.tensor(EDGES), random_words(200_000)])
    exact = -torch.log(-torch.log1p(-(words.double() + 0.5) / 2**32))
    found = gumbel(words).double()
    assert ((found - exact).abs() / exact.abs().clamp(min=1)).max() < 3e-7
    assert found.min() > -3.2
    assert found.max() < 22.9
    ordered = gumbel(words.sort().values)
    assert bool((ordered.diff() <= 1e-6).all()), "the larger a word, the smaller its noise"
    longest = 33 * math.log(2)
    ends = gumbel(torch.tensor([0, 2**32 - 1])).tolist()
    assert ends == pytest.approx([longest, -math.log(longest)])


# The law


def p_value(counts: Any, probabilities: Any) -> float:
    """That counts as far from the probabilities come by chance, by Pearson's chi-square."""
    expected = counts.sum() * probabilities
    chi_square = ((counts - expected) ** 2 / expected).sum()
    half_freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, chi_square.double() / 2))


def test_the_largest_sum_is_drawn_with_its_probability() -> None:
    probabilities = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.04, 0.01])
    for seed, choice in ((0, 0), (2**64 - 1, 1)):
        found = gumbel_noise(noise_key(seed, choice), torch.arange(50_000), len(probabilities))
        drawn = (probabilities.log() + found).argmax(1)
        counts = torch.bincount(drawn, minlength=len(probabilities))
        assert p_value(counts, probabilities) > SIGNIFICANCE
        other = probabilities.roll(1) * 0.05 + probabilities * 0.95
        assert p_value(counts, other) < SIGNIFICANCE


def test_noise_is_gumbels_over_a_whole_vocabulary() -> None:
    found = gumbel_noise(noise_key(1), torch.arange(20), 20_000).flatten()
    shares = (-(-found.double()).exp()).exp()
    counts = torch.histc(shares.float(), 200, 0, 1)
    assert p_value(counts, torch.full((200,), 1 / 200)) > SIGNIFICANCE
    assert p_value(torch.histc(found, 200, -3.2, 22.9), torch.full((200,), 1 / 200)) == 0


def test_seeds_choices_positions_and_tokens_are_independent() -> None:
    """Uniform shares of neighbours fall into the cells of a grid as if by chance."""

    def shares(seed: int, choice: int, first: int) -> Tensor:
        positions = torch.arange(first, first + 30)
        found = gumbel_noise(noise_key(seed, choice), positions, 1000)
        return (-(-found.double()).exp()).exp()

    def of_pairs(uniform: Tensor, other: Tensor) -> float:
        cells = (uniform * 10).long().clamp(max=9) * 10 + (other * 10).long().clamp(max=9)
        counts = torch.bincount(cells.flatten(), minlength=100)
        return p_value(counts, torch.full((100,), 0.01))

    own = shares(5, 0, 0)
    for other in (
        shares(6, 0, 0),
        shares(5 + 2**32, 0, 0),
        shares(5, 1, 0),
        shares(5, 0, 1),
        own.roll(1, 1),
        own.roll(16, 1),
        own.roll(64, 1),
    ):
        assert of_pairs(own, other) > SIGNIFICANCE
    assert of_pairs(own, own) == 0
