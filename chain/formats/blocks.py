"""Weights in the blocks of GGML's quantized types, kept as a file has them.

#   O = out features, I = in features, B = bytes of a row
#   N = blocks of one row, G = its groups of 32 inputs
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from polybasic.chain.formats.block_types import GROUP, NESTED, BlockType

_WEIGHTS_AT_ONCE = 1 << 22
"""That are in float32 at a time."""


@dataclass(frozen=True)
class BlockWeight:
    """One linear's weight: w[o, i] = (codes[o, i] - zero) * scale + offset.

    Attributes:
        type: which says what the codes mean.
        codes: [O, I], uint8, or int8 of eight bits.
        scales: float16 [O, N].
        offsets: the same; None where the type has none.
        factors: of a nested type, by which a group's scale is multiplied, and its offset, uint8
            [O, G, 2]; or the scales of its first and last sixteen inputs, int8. None of others.
    """

    type: BlockType
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    factors: Tensor | None = None

    @classmethod
    def unpack(cls, kind: BlockType, rows_OB: Tensor) -> "BlockWeight":
        """Read rows as a file has them, uint8 [O, B]."""
        blocks_ONb = rows_OB.unflatten(1, (-1, kind.num_bytes))
        if kind.size == NESTED:
            return _unpack_nested(kind, blocks_ONb)
        scales, offsets, codes = _float16(blocks_ONb[..., :2]), None, blocks_ONb[..., 2:]
        if kind.has_offsets:
            offsets, codes = _float16(codes[..., :2]), codes[..., 2:]
        if kind.bits == 8:
            codes = codes.contiguous().view(torch.int8)
        else:
            *bits, nibbles = codes.split([4, 16] if kind.bits == 5 else [16], dim=2)
            # the low halves are those of the first sixteen inputs
            codes = torch.cat([nibbles & 15, nibbles >> 4], dim=2)
            for one in bits:
                # bit i is that of input i
                codes |= torch.stack([one >> i & 1 for i in range(8)], dim=3).flatten(2) << 4
        return cls(kind, codes.flatten(1), scales, offsets)

    def row_slices(self, step: int) -> Iterator["BlockWeight"]:
        """The same weight, some outputs at a time."""
        for begin in range(0, len(self.codes), step):
            rows = slice(begin, begin + step)
            offsets = None if self.offsets is None else self.offsets[rows]
            factors = None if self.factors is None else self.factors[rows]
            yield BlockWeight(self.type, self.codes[rows], self.scales[rows], offsets, factors)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [O, I]: llama.cpp's in float32, and others rounded from that."""
        dense = torch.empty(self.codes.shape, dtype=dtype)
        step = max(1, _WEIGHTS_AT_ONCE // dense.shape[1])
        for part, of_part in zip(dense.split(step), self.row_slices(step), strict=True):
            part.copy_(of_part._values())
        return dense

    def _values(self) -> Tensor:
        scales = self.scales.float()
        offsets = torch.zeros_like(scales) if self.offsets is None else self.offsets.float()
        if self.factors is not None:
            scales, offsets = (
                each.repeat_interleave(NESTED // GROUP, dim=1) for each in (scales, offsets)
            )
            if self.offsets is None:
                scales = (scales.unsqueeze(2) * self.factors).flatten(1)
                offsets = offsets.repeat_interleave(2, dim=1)
            else:
                scales, offsets = scales * self.factors[..., 0], offsets * self.factors[..., 1]
        codes_OGi = self.codes.float().unflatten(1, (scales.shape[1], -1)) - self.type.zero
        return (codes_OGi * scales.unsqueeze(2) + offsets.unsqueeze(2)).flatten(1)


def _float16(bytes_ONb: Tensor) -> Tensor:
    """[O, N] of [O, N, 2]."""
    return bytes_ONb.contiguous().view(torch.float16).squeeze(2)


def _unpack_nested(kind: BlockType, blocks_ONb: Tensor) -> BlockWeight:
    num_codes = NESTED // 2, NESTED * (kind.bits - 4) // 8
    if not kind.has_offsets:
        nibbles, bits, factors, scales = blocks_ONb.split([*num_codes, kind.factor_bytes, 2], dim=2)
        codes = _codes_of(nibbles, 64, 4) | _codes_of(bits, 32, 2) << 4
        factors = factors.contiguous().view(torch.int8).unflatten(2, (-1, 2)).flatten(1, 2)
        return BlockWeight(kind, codes.flatten(1), _float16(scales), None, factors)
    scales, offsets, packed, bits, nibbles = blocks_ONb.split(
        [2, 2, kind.factor_bytes, *reversed(num_codes)], dim=2
    )
    codes = _codes_of(nibbles, 32, 4)
    if kind.bits == 5:
        codes |= _codes_of(bits, 32, 1) << 4
    # six bits each: of the first four groups, of their offsets, and of the last four groups the
    # low halves, whose high bits lie above those of the others
    first, second, third = packed.split(4, dim=2)
    of_scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=2)
    of_offsets = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=2)
    factors = torch.stack([of_scales, of_offsets], dim=3).flatten(1, 2)
    # they are subtracted, which is to add what has the other sign
    return BlockWeight(kind, codes.flatten(1), _float16(scales), -_float16(offsets), factors)


def _codes_of(packed_ONb: Tensor, run: int, bits: int) -> Tensor:
    """Codes of a few bits: of each run of bytes first the lowest bits, then those above."""
    runs = packed_ONb.unflatten(2, (-1, run))
    parts = [runs >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=3).flatten(2)
