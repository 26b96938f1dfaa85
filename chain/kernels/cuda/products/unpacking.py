"""Weights of few bits in Triton kernels: codes out of words, and scales of GGML's blocks.

#   O = out features, OUTS, INS = what one step of a program reads of outputs and inputs
#   w = words of a group of 4-bit codes: four threads q, INS / 32 blocks b of inputs, of which a
#   word holds pairs p and, in s and h, those 8 and 16 inputs on; see `PackedWeight`
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

from polybasic.chain.formats.checkpoints.block_types import DEVICE_STEP, NESTED

# A word becomes four registers of two codes each: (word >> 4 j) & 0x000f000f | MAGIC is a pair of
# 128 + code in bfloat16 and of 1024 + code in float16, from which 128 (1024) + zero is subtracted:
# all of this is exact.
_UNPACK = """{
.reg .b32 one, mask, magic, word1, word2, word3;
mov.b32 one, ONE;
mov.b32 mask, 0x000f000f;
mov.b32 magic, MAGIC;
shr.u32 word1, $4, 4;
shr.u32 word2, $4, 8;
shr.u32 word3, $4, 12;
lop3.b32 $0, $4, mask, magic, 0xea;
lop3.b32 $1, word1, mask, magic, 0xea;
lop3.b32 $2, word2, mask, magic, 0xea;
lop3.b32 $3, word3, mask, magic, 0xea;
fma.rn.TYPE $0, $0, one, $5;
fma.rn.TYPE $1, $1, one, $5;
fma.rn.TYPE $2, $2, one, $5;
fma.rn.TYPE $3, $3, one, $5;
}"""
_RAISED = "".join(line for line in _UNPACK.splitlines(keepends=True) if "fma" not in line)
_RAISED_BF16 = tl.constexpr(_RAISED.replace("ONE", "0x3f803f80").replace("MAGIC", "0x43004300"))
_RAISED_FP16 = tl.constexpr(_RAISED.replace("ONE", "0x3c003c00").replace("MAGIC", "0x64006400"))
_UNPACK_BF16 = tl.constexpr(
    _UNPACK.replace("ONE", "0x3f803f80").replace("MAGIC", "0x43004300").replace("TYPE", "bf16x2")
)
_UNPACK_FP16 = tl.constexpr(
    _UNPACK.replace("ONE", "0x3c003c00").replace("MAGIC", "0x64006400").replace("TYPE", "f16x2")
)
# Bits of a code above four come in words of their own: 16 times what these hold is added, exactly,
# as all integers below 256 are.
_ADD_HIGH = """{
.reg .b32 one, sixteen, mask, magic, word1, word2, word3, high0, high1, high2, high3;
mov.b32 one, ONE;
mov.b32 sixteen, SIXTEEN;
mov.b32 mask, 0x000f000f;
mov.b32 magic, MAGIC;
shr.u32 word1, $8, 4;
shr.u32 word2, $8, 8;
shr.u32 word3, $8, 12;
lop3.b32 high0, $8, mask, magic, 0xea;
lop3.b32 high1, word1, mask, magic, 0xea;
lop3.b32 high2, word2, mask, magic, 0xea;
lop3.b32 high3, word3, mask, magic, 0xea;
fma.rn.TYPE high0, high0, sixteen, $9;
fma.rn.TYPE high1, high1, sixteen, $9;
fma.rn.TYPE high2, high2, sixteen, $9;
fma.rn.TYPE high3, high3, sixteen, $9;
fma.rn.TYPE $0, high0, one, $4;
fma.rn.TYPE $1, high1, one, $5;
fma.rn.TYPE $2, high2, one, $6;
fma.rn.TYPE $3, high3, one, $7;
}"""
_ADD_HIGH_BF16 = tl.constexpr(
    _ADD_HIGH.replace("ONE", "0x3f803f80")
    .replace("SIXTEEN", "0x41804180")
    .replace("MAGIC", "0x43004300")
    .replace("TYPE", "bf16x2")
)
_ADD_HIGH_FP16 = tl.constexpr(
    _ADD_HIGH.replace("ONE", "0x3c003c00")
    .replace("SIXTEEN", "0x4c004c00")
    .replace("MAGIC", "0x64006400")
    .replace("TYPE", "f16x2")
)
CONSTANT_STEPS = tl.constexpr(NESTED // DEVICE_STEP)
"""Steps of `PackedBlocks` that share its constants."""
_STEP = tl.constexpr(DEVICE_STEP)
_BF16_MAGIC = tl.constexpr(0x4300)
_FP16_MAGIC = tl.constexpr(0x6400)
_SIGNS = tl.constexpr(-0x7FFF8000)  # 0x80008000


@triton.jit
def dequantize_kernel(
    words_ptr, groups_ptr, out_ptr, out_size, in_size,
    OUTS: tl.constexpr, INS: tl.constexpr, IS_ON_GPU: tl.constexpr,
):  # fmt: skip
    """The weight [O, I] of words and groups, as `product_kernel` has them. Grid: (tiles, groups).

    Numbers are those of `PackedWeight.dequantized`: the product of code and scale, rounded once.
    """
    group = tl.program_id(1)
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    is_out = outs < out_size
    ins, words = tl.arange(0, INS), tl.arange(0, INS // 8)
    first_row = group.to(tl.int64) * out_size
    scale = tl.load(groups_ptr + first_row + outs, is_out, other=0)
    places = outs[:, None] * (INS // 8) + words[None, :]
    packed = tl.load(words_ptr + first_row * (INS // 8) + places, is_out[:, None], other=0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    codes = unpacked(packed, scale & 15, dtype, OUTS, INS, IS_ON_GPU)
    codes = codes.permute(0, 2, 5, 4, 1, 3).reshape(OUTS, INS).to(tl.float32)
    weight = codes * (scale & -16).to(tl.float32, bitcast=True)[:, None]
    out_at = out_ptr + outs.to(tl.int64)[:, None] * in_size + group * INS + ins[None, :]
    tl.store(out_at, weight.to(dtype), is_out[:, None])


@triton.jit
def dequantize_blocks_kernel(
    weight_ptr,
    groups_ptr,
    high_ptr,
    constants_ptr,
    outputs_ptr,
    out_ptr,
    num_outs,
    out_size,
    in_size,
    OUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    IS_ON_GPU: tl.constexpr,
):
    """Weights [N, I] of `PackedBlocks`, as its `dequantized` has them. Grid: (tiles, steps).

    Args:
        weight_ptr, groups_ptr, high_ptr, constants_ptr: as of `product_kernel`.
        outputs_ptr: int64 [N], which outputs; None for all.
    """
    step = tl.program_id(1)
    places = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    is_out = places < num_outs
    outs = places
    if outputs_ptr is not None:
        outs = tl.load(outputs_ptr + places, is_out, other=0).to(tl.int32)
    rows = step.to(tl.int64) * out_size + outs
    packed, high, factors, constants = block_of(
        weight_ptr, groups_ptr, high_ptr, constants_ptr, rows,
        (step // CONSTANT_STEPS).to(tl.int64) * out_size + outs, is_out, BLOCK_BITS, HAS_OFFSETS,
    )  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    codes = block_codes(
        packed, high, dtype, OUTS, ZERO, BLOCK_BITS - 4, GROUP, False, IS_ON_GPU, True
    )
    out_at = out_ptr + places.to(tl.int64)[:, None] * in_size + step * _STEP
    for group in tl.static_range(_STEP // GROUP):
        scale, offset = block_levels(
            factors, constants, group, HAS_OFFSETS, constants_ptr is not None
        )
        weight = codes[group].to(tl.float32) * scale[:, None]
        if HAS_OFFSETS:
            weight += offset[:, None]
        ins = group * GROUP + tl.arange(0, GROUP)
        tl.store(out_at + ins[None, :], weight.to(dtype), is_out[:, None])


@triton.jit
def block_of(
    words_ptr,
    factors_ptr,
    high_ptr,
    constants_ptr,
    rows,
    constants_rows,
    is_out,
    BLOCK_BITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):
    """Words, high bits, factors and constants of `PackedBlocks` for a step of some outputs.

    Args:
        rows, constants_rows: places [OUTS] of the outputs among those of all steps.
        is_out: bool [OUTS], which are read; None for all.
    """
    is_row = None if is_out is None else is_out[:, None]
    places = rows[:, None] * 8 + tl.arange(0, 8)[None, :]
    words = tl.load(words_ptr + places, is_row)
    if HAS_OFFSETS and constants_ptr is None:
        factors = tl.load(factors_ptr + rows[:, None] * 2 + tl.arange(0, 2)[None, :], is_row)
    else:
        factors = tl.load(factors_ptr + rows, is_out)
    constants, high = factors, words  # which nothing reads where there are none
    if constants_ptr is not None:
        constants = tl.load(constants_ptr + constants_rows, is_out)
    if BLOCK_BITS > 4:
        HIGH_WORDS: tl.constexpr = 8 if BLOCK_BITS == 8 else 4
        places = rows[:, None] * HIGH_WORDS + tl.arange(0, HIGH_WORDS)[None, :]
        high = tl.load(high_ptr + places, is_row)
    return words, high, factors, constants


@triton.jit
def unpacked(
    words,
    zeros,
    dtype: tl.constexpr,
    OUTS: tl.constexpr,
    INS: tl.constexpr,
    IS_ON_GPU: tl.constexpr,
):
    """code - zero of words [OUTS, w]: [OUTS, q, b, p, s, h] in a dtype of 16 bits."""
    words = words.reshape(OUTS, 4, INS // 32)
    zeros = zeros[:, None, None]
    if IS_ON_GPU:
        words, offsets = tl.broadcast(words, _offsets(zeros, dtype))
        pair0, pair1, pair2, pair3 = _pairs(words, offsets, dtype)
        codes = _joined(pair0, pair1, pair2, pair3, dtype)
    else:
        codes = _codes(words, zeros, dtype)
    return codes


@triton.jit
def block_codes(
    words,
    high,
    dtype: tl.constexpr,
    OUTS: tl.constexpr,
    ZERO: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_RAISED: tl.constexpr,
    IS_ON_GPU: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """Codes less their zero of a step of `PackedBlocks`, by groups of inputs: [OUTS, GROUP] each.

    Args:
        words: int32 [OUTS, 8].
        high: [OUTS, 4], of four bits [OUTS, 8]; of no use where HIGH_BITS is 0.
        IS_RAISED: codes of at most five bits that count from 0 stay higher by `raised_by`, which
            saves their subtraction.
        IS_WIDE: as in `product_kernel`, decides the order of sixteen inputs.
    """
    words = words.reshape(OUTS, 4, 2)
    if HIGH_BITS == 4:
        high = high.reshape(OUTS, 4, 2)
    elif HIGH_BITS > 0:
        MASK: tl.constexpr = ((1 << HIGH_BITS) - 1) * 0x11111111
        if HIGH_BITS == 1:
            high = high.to(tl.int32) & 0xFFFF
            high = high | (high << 14)
        high = tl.join(high & MASK, (high >> HIGH_BITS) & MASK)
    zeros = tl.full((OUTS, 4, 2), ZERO & 15, tl.int32)
    if IS_ON_GPU:
        if IS_RAISED:
            pair0, pair1, pair2, pair3 = tl.inline_asm_elementwise(
                _RAISED_BF16 if dtype == tl.bfloat16 else _RAISED_FP16,
                "=&r,=&r,=&r,=&r,r",
                [words],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                is_pure=True,
                pack=1,
            )
        else:
            pair0, pair1, pair2, pair3 = _pairs(words, _offsets(zeros, dtype), dtype)
        if HIGH_BITS > 0:
            pair0, pair1, pair2, pair3 = tl.inline_asm_elementwise(
                _ADD_HIGH_BF16 if dtype == tl.bfloat16 else _ADD_HIGH_FP16,
                "=&r,=&r,=&r,=&r,r,r,r,r,r,r",
                [pair0, pair1, pair2, pair3, high, _high_offsets(high, ZERO >> 4, dtype)],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                is_pure=True,
                pack=1,
            )
        codes = _joined(pair0, pair1, pair2, pair3, dtype)
    else:
        codes = _codes(words, zeros, dtype)
        if HIGH_BITS > 0:
            of_high = _codes(high, tl.full((OUTS, 4, 2), ZERO >> 4, tl.int32), dtype)
            codes = (codes.to(tl.float32) + 16 * of_high.to(tl.float32)).to(dtype)
        if IS_RAISED:
            codes = (codes.to(tl.float32) + raised_by(dtype)).to(dtype)
    # [OUTS, q, b, p, s, h] by b, and by h where groups are of sixteen
    if GROUP == 32:
        codes = codes.permute(0, 5, 4, 1, 3, 2) if IS_WIDE else codes.permute(0, 5, 1, 4, 3, 2)
        first, second = codes.split()
        return first.reshape(OUTS, GROUP), second.reshape(OUTS, GROUP)
    else:
        codes = codes.permute(0, 4, 1, 3, 5, 2) if IS_WIDE else codes.permute(0, 1, 4, 3, 5, 2)
        first, second = codes.split()
        group0, group1 = first.split()
        group2, group3 = second.split()
        return (
            group0.reshape(OUTS, GROUP),
            group1.reshape(OUTS, GROUP),
            group2.reshape(OUTS, GROUP),
            group3.reshape(OUTS, GROUP),
        )


@triton.jit
def raised_by(dtype: tl.constexpr):
    """What unpacked codes are too high by, before their zero is subtracted."""
    return 128.0 if dtype == tl.bfloat16 else 1024.0


@triton.jit
def block_levels(
    factors, constants, group: tl.constexpr, HAS_OFFSETS: tl.constexpr, IS_NESTED: tl.constexpr
):
    """Scale and offset of a group of each output, float32 [OUTS]; an offset of 0 where none is.

    Args:
        factors: int32 [OUTS] or, of scales with offsets that are not nested, [OUTS, 2].
        constants: int32 [OUTS]; of no use if not nested.
    """
    offset = 0.0
    if IS_NESTED and HAS_OFFSETS:
        scale = _half(constants, 0) * ((factors >> (8 * group)) & 255).to(tl.float32)
        offset = -_half(constants, 1) * ((factors >> (16 + 8 * group)) & 255).to(tl.float32)
    elif IS_NESTED:
        scale = _half(constants, 0) * ((factors << (24 - 8 * group)) >> 24).to(tl.float32)
    elif HAS_OFFSETS:
        first, second = factors.split()
        scale = _half(second if group else first, 0)
        offset = _half(second if group else first, 1)
    else:
        scale = _half(factors, group)
    return scale, offset


@triton.jit
def _half(words, place: tl.constexpr):
    """The lower or the higher float16 of words, in float32."""
    return (words >> (16 * place)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _pairs(words, offsets, dtype: tl.constexpr):
    return tl.inline_asm_elementwise(
        _UNPACK_BF16 if dtype == tl.bfloat16 else _UNPACK_FP16,
        "=&r,=&r,=&r,=&r,r,r",
        [words, offsets],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _offsets(zeros, dtype: tl.constexpr):
    """-(magic + zero), twice."""
    if dtype == tl.bfloat16:
        offsets = ((zeros | _BF16_MAGIC) * 0x00010001) ^ _SIGNS
    else:
        offsets = ((zeros | _FP16_MAGIC) * 0x00010001) ^ _SIGNS
    return offsets


@triton.jit
def _high_offsets(like, ZERO: tl.constexpr, dtype: tl.constexpr):
    """-16 * (magic + zero), twice: the exponent is four more."""
    MAGIC: tl.constexpr = (
        _BF16_MAGIC + (4 << 7) if dtype == tl.bfloat16 else _FP16_MAGIC + (4 << 10)
    )
    return tl.full(like.shape, (MAGIC | ZERO) * 0x00010001, tl.int32) ^ _SIGNS


@triton.jit
def _joined(pair0, pair1, pair2, pair3, dtype: tl.constexpr):
    even = tl.join(halves(pair0, dtype), halves(pair1, dtype))
    odd = tl.join(halves(pair2, dtype), halves(pair3, dtype))
    return tl.join(even, odd)


@triton.jit
def halves(pairs, dtype: tl.constexpr):
    """The two values of 16 bits of each word, low half first, along a new dimension."""
    low = pairs.to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, (pairs >> 16).to(tl.int16).to(dtype, bitcast=True))


@triton.jit
def _codes(words, zeros, dtype: tl.constexpr):
    """As `_joined` of unpacked registers, by plain arithmetic."""
    even = tl.join(_pair(words, zeros, 0, dtype), _pair(words, zeros, 4, dtype))
    odd = tl.join(_pair(words, zeros, 8, dtype), _pair(words, zeros, 12, dtype))
    return tl.join(even, odd)


@triton.jit
def _pair(words, zeros, SHIFT: tl.constexpr, dtype: tl.constexpr):
    low = ((words >> SHIFT) & 15) - zeros
    high = ((words >> (SHIFT + 16)) & 15) - zeros
    return tl.join(low.to(tl.float32).to(dtype), high.to(tl.float32).to(dtype))
