"""Gumbel noise that belongs to a position, the same for every model of a chain and on every device.

The noise of a token is a function of seed, choice, position and token id, with the same bits here
(PyTorch), in C++ (cpu/source/noise.h) and in Triton (cuda/noise_kernels.py), so that models which
draw argmax(log p + noise) at one position draw with the same random numbers.

Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) turns the key
(low and high word of the seed) and the counter (block, position, choice, 0) into four words. Token
t has word (t // 16) % 4 of block 16 * (t // 64) + t % 16.

A word w stands for the number x = (w + 1/2) / 2**32, rounded to float32, and for the noise
-log(-log(1 - x)), of which every step is one float32 operation, rounded to nearest:

    half(w)  = (float(w >> 16) * 65536 + (float(w & 65535) + 0.5)) * 2**-32
    x, y     = half(w), half(~w)                        # y is 1 - x, precise where that is small
    f, e     = (-x, 0) if x <= 1 - sqrt(1/2) else (m - 1, e) with y = m * 2**e
    wait     = -(e * log(2) + ln1p(f))                  # exponentially distributed
    noise    = -(e * log(2) + ln1p(m - 1)) with wait = m * 2**e
    ln1p(f)  = f + f * f * (f * (c0 + f * (c1 + f * (.. + f * c7))) - 0.5)

where m is in [sqrt(1/2), sqrt(2)), found from the bits. No product is contracted with a sum. The
polynomial is off by 6e-9 of the result, the noise by 3e-7 of its own size or of 1, and x takes
2**32 values: noise lies between -3.2 and 22.9.

#   P = positions, V = tokens of the vocabulary
"""

from collections.abc import Sequence

import torch
from torch import Tensor

GROUP, LANES = 64, 16
"""Tokens that share four rows of words, and the blocks that these come from."""
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_MASK = 0xFFFFFFFF
NEAR = 0.29289323
LOG_2 = 0.6931472
ROOT_HALF_BITS = 0x3F3504F3
COEFFICIENTS = (
    0.33333317, -0.2500081, 0.20002286, -0.16624554,
    0.14181193, -0.13128755, 0.12881644, -0.07859607,
)  # fmt: skip


def noise_key(seed: int, choice: int = 0) -> Tensor:
    """The key of `gumbel_noise`: int64 [3].

    Args:
        seed: of a request, 0 to 2**64 - 1.
        choice: which of several answers to the same prompt, 0 to 2**32 - 1.
    """
    return torch.tensor([seed & _MASK, seed >> 32, choice])


def gumbel_noise(key: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Noise float32 [P, V] of all tokens at each position; reads no number on the host.

    Args:
        key: as `noise_key` gives it, on the device of `positions`; or [P, 3], one for each.
        positions: int64 [P], of the tokens to draw, from 0 to 2**32 - 1.
        num_tokens: V.
    """
    first, second, choice = key[..., None].unbind(-2)
    num_groups = -(-num_tokens // GROUP)
    blocks = torch.arange(num_groups * LANES, device=positions.device)
    counter = torch.broadcast_tensors(blocks, positions[:, None], choice, torch.zeros_like(choice))
    words = [word.view(-1, num_groups, LANES) for word in philox(counter, (first, second))]
    return gumbel(torch.stack(words, 2).flatten(1)[:, :num_tokens])


def philox(counter: Sequence[Tensor], key: tuple[Tensor, Tensor]) -> Sequence[Tensor]:
    """Four words of Philox4x32-10, int64, for each counter of four such words."""
    (c0, c1, c2, c3), (first, second) = counter, key
    for _ in range(_ROUNDS):
        # the low 64 bits of a product are the same with and without a sign
        product, other = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (other >> 32 & _MASK) ^ c1 ^ first,
            other & _MASK,
            (product >> 32 & _MASK) ^ c3 ^ second,
            product & _MASK,
        )
        first, second = first + _WEYL[0] & _MASK, second + _WEYL[1] & _MASK
    return c0, c1, c2, c3


def gumbel(words: Tensor) -> Tensor:
    """The noise, float32, of words, int64 of any shape."""
    x, y = _half(words), _half(words ^ _MASK)
    is_near = x <= NEAR
    exponent, rest = _split(y)
    f = torch.where(is_near, -x, rest)
    exponent = torch.where(is_near, 0.0, exponent)
    wait = -(exponent * LOG_2 + _ln1p(f))
    exponent, rest = _split(wait)
    return -(exponent * LOG_2 + _ln1p(rest))


def _half(words: Tensor) -> Tensor:
    return ((words >> 16).float() * 65536.0 + ((words & 0xFFFF).float() + 0.5)) * 2.0**-32


def _split(y: Tensor) -> tuple[Tensor, Tensor]:
    """Exponent and mantissa - 1 of positive numbers, the mantissa from sqrt(1/2) to sqrt(2)."""
    bits = y.view(torch.int32)
    exponent = (bits - ROOT_HALF_BITS) >> 23
    return exponent.float(), (bits - (exponent << 23)).view(torch.float32) - 1.0


def _ln1p(f: Tensor) -> Tensor:
    total = f * COEFFICIENTS[-1] + COEFFICIENTS[-2]
    for coefficient in COEFFICIENTS[-3::-1]:
        total = total * f + coefficient
    return f + f * f * (f * total - 0.5)
