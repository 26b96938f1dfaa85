"""Gumbel noise by position in Triton: the bits of `polybasic.chain.kernels.noise`.

The float steps are those written there, each rounded on its own: kernels are launched with fusion
of products and sums switched off.

#   P = positions, V = tokens of the vocabulary
"""
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from polybasic.chain.kernels import noise

_BLOCKS = 256
"""Blocks of Philox of one program, each of four tokens."""
_GROUP, _LANES = tl.constexpr(noise.GROUP), tl.constexpr(noise.LANES)
_NEAR, _LOG_2 = tl.constexpr(noise.NEAR), tl.constexpr(noise.LOG_2)
_ROOT_HALF_BITS = tl.constexpr(noise.ROOT_HALF_BITS)
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7 = map(tl.constexpr, noise.COEFFICIENTS)


@triton.jit
def _half(words):
    high, low = (words >> 16).to(tl.float32), (words & 0xFFFF).to(tl.float32)
    return (high * 65536.0 + (low + 0.5)) * 2.3283064365386963e-10


@triton.jit
def _split(y):
    """Exponent and mantissa - 1, the mantissa from sqrt(1/2) to sqrt(2)."""
    bits = y.to(tl.int32, bitcast=True)
    exponent = (bits - _ROOT_HALF_BITS) >> 23
    return exponent.to(tl.float32), (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _ln1p(f):
    total = f * _C7 + _C6
    total = total * f + _C5
    total = total * f + _C4
    total = total * f + _C3
    total = total * f + _C2
    total = total * f + _C1
    total = total * f + _C0
    return f + f * f * (f * total - 0.5)


@triton.jit
def _gumbel(words):
    x = _half(words)
    exponent, rest = _split(_half(words ^ 0xFFFFFFFF))
    is_near = x <= _NEAR
    f = tl.where(is_near, -x, rest)
    exponent = tl.where(is_near, 0.0, exponent)
    wait = -(exponent * _LOG_2 + _ln1p(f))
    exponent, rest = _split(wait)
    # Triton's minus is a difference from 0, which makes another zero of 0
    return (exponent * _LOG_2 + _ln1p(rest)) * -1.0


@triton.jit(do_not_specialize=["key_stride"])
def fill_noise(key, key_stride, positions, out, num_tokens, BLOCKS: tl.constexpr):
    """Noise of the tokens of BLOCKS blocks at one position. Grid: (blocks / BLOCKS, P)."""
    place = tl.program_id(1)
    key += place * key_stride
    blocks = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    seed = tl.load(key) | (tl.load(key + 1) << 32)
    zeros = tl.zeros([BLOCKS], tl.uint32)
    position = zeros + tl.load(positions + place).to(tl.uint32)
    choice = zeros + tl.load(key + 2).to(tl.uint32)
    words = tl.philox(seed, blocks, position, choice, zeros)
    tokens = blocks // _LANES * _GROUP + blocks % _LANES
    row = out + place.to(tl.int64) * num_tokens
    for part in tl.static_range(4):
        own = tokens + part * _LANES
        tl.store(row + own, _gumbel(words[part]), mask=own < num_tokens)


def gumbel_noise(key: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """See `polybasic.chain.kernels.noise.gumbel_noise`."""
    assert key.is_contiguous()
    assert positions.is_contiguous()
    out = torch.empty(len(positions), num_tokens, device=positions.device)
    key_stride = key.stride(0) if key.ndim == 2 else 0
    num_programs = triton.cdiv(triton.cdiv(num_tokens, noise.GROUP) * noise.LANES, _BLOCKS)
    with torch.cuda.device_of(out):
        fill_noise[(num_programs, len(positions))](
            key, key_stride, positions, out, num_tokens,
            BLOCKS=_BLOCKS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
