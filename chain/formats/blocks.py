"""Weights in the blocks of GGML's quantized types, kept as a file has them.

#   O = out features, I = in features, B = bytes of a row
#   N = blocks of one row
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polybasic.chain.formats.block_types import NESTED, BlockType

_WEIGHTS_AT_ONCE = 1 << 22
"""That are in float32 at a time."""


@dataclass(frozen=True)
class BlockWeight:
    """One linear's weight.

    Attributes:
        type: of its blocks.
        rows: as a file has them, uint8 [O, B].
    """

    type: BlockType
    rows: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """[O, I]."""
        num_rows, row_bytes = self.rows.shape
        return num_rows, row_bytes // self.type.num_bytes * self.type.size

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [O, I]: llama.cpp's in float32, and others rounded from that."""
        dense = torch.empty(self.shape, dtype=dtype)
        step = max(1, _WEIGHTS_AT_ONCE // dense.shape[1])
        values_of = _nested_values if self.type.size == NESTED else _values
        for part, rows_OB in zip(dense.split(step), self.rows.split(step), strict=True):
            part.copy_(values_of(self.type, rows_OB.unflatten(1, (-1, self.type.num_bytes))))
        return dense


def _values(kind: BlockType, blocks_ONb: Tensor) -> Tensor:
    scales, codes = _float16(blocks_ONb[..., :2]), blocks_ONb[..., 2:]
    offsets = torch.zeros_like(scales)
    if kind.has_offsets:
        offsets, codes = _float16(codes[..., :2]), codes[..., 2:]
    if kind.bits == 8:
        codes = codes.contiguous().view(torch.int8)
    else:
        *bits, nibbles = codes.split([4, 16] if kind.bits == 5 else [16], dim=2)
        codes = _codes_of(nibbles, 16, 4)
        for one in bits:
            # bit i is that of input i
            codes |= torch.stack([one >> i & 1 for i in range(8)], dim=3).flatten(2) << 4
    return _scaled(codes, kind.zero, scales, offsets)


def _nested_values(kind: BlockType, blocks_ONb: Tensor) -> Tensor:
    num_codes = NESTED // 2, NESTED * (kind.bits - 4) // 8
    if not kind.has_offsets:
        nibbles, bits, factors, scales = blocks_ONb.split([*num_codes, kind.factor_bytes, 2], dim=2)
        codes = _codes_of(nibbles, 64, 4) | _codes_of(bits, 32, 2) << 4
        of_halves = _float16(scales) * factors.contiguous().view(torch.int8)
        return _scaled(codes, kind.zero, of_halves, torch.zeros_like(of_halves))
    scales, offsets, factors, bits, nibbles = blocks_ONb.split(
        [2, 2, kind.factor_bytes, *reversed(num_codes)], dim=2
    )
    codes = _codes_of(nibbles, 32, 4)
    if kind.bits == 5:
        codes |= _codes_of(bits, 32, 1) << 4
    # six bits each: of the first four groups, of their offsets, and of the last four groups the
    # low halves, whose high bits lie above those of the others
    first, second, third = factors.split(4, dim=2)
    of_scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=2)
    of_offsets = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=2)
    # offsets are subtracted
    return _scaled(codes, 0, _float16(scales) * of_scales, _float16(offsets) * -of_offsets.float())


def _float16(bytes_ONb: Tensor) -> Tensor:
    """float32 [O, N, 1] of [O, N, 2]."""
    return bytes_ONb.contiguous().view(torch.float16).float()


def _codes_of(packed_ONb: Tensor, run: int, bits: int) -> Tensor:
    """Codes of a few bits: of each run of bytes first the lowest bits, then those above."""
    runs = packed_ONb.unflatten(2, (-1, run))
    parts = [runs >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=3).flatten(2)


def _scaled(codes_ONi: Tensor, zero: int, scales_ONg: Tensor, offsets_ONg: Tensor) -> Tensor:
    """Values [O, I]: of each block some groups g with a scale and an offset."""
    codes_ONgi = codes_ONi.float().unflatten(2, (scales_ONg.shape[2], -1)) - zero
    return (codes_ONgi * scales_ONg.unsqueeze(3) + offsets_ONg.unsqueeze(3)).flatten(1)
