"""Weights in the blocks of GGML's quantized types, kept as a file has them.

#   O = out features, I = in features, B = bytes of a row
#   N = blocks of one row
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES, NESTED, BlockType

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
        for part, rows_OB in zip(dense.split(step), self.rows.split(step), strict=True):
            part.copy_(BlockWeight(self.type, rows_OB).parts().values())
        return dense

    def parts(self) -> "BlockParts":
        """What the blocks hold, unpacked."""
        blocks_ONb = self.rows.unflatten(1, (-1, self.type.num_bytes))
        return (_nested_parts if self.type.size == NESTED else _parts)(self.type, blocks_ONb)


def in_8_bits(weight: Tensor) -> BlockWeight:
    """A matrix [O, I] in blocks of Q8_0, each scaled by its largest weight."""
    kind = BLOCK_TYPES["Q8_0"]
    step = max(1, _WEIGHTS_AT_ONCE // weight.shape[1])
    return BlockWeight(kind, torch.cat([_in_8_bits(rows, kind) for rows in weight.split(step)]))


def _in_8_bits(weight_OI: Tensor, kind: BlockType) -> Tensor:
    weight_ONi = weight_OI.float().unflatten(1, (-1, kind.size))
    scales_ON1 = (weight_ONi.abs().amax(2, keepdim=True) / (2 ** (kind.bits - 1) - 1)).half()
    inverse_ON1 = torch.where(scales_ON1 == 0, 0.0, 1 / scales_ON1.float())
    codes_ONi = (weight_ONi * inverse_ON1).round().clamp(-128, 127).to(torch.int8)
    return torch.cat([scales_ON1.view(torch.uint8), codes_ONi.view(torch.uint8)], dim=2).flatten(1)


@dataclass(frozen=True)
class BlockParts:
    """Weights [O, N, i] of N blocks a row, of which each holds groups g of inputs.

    Attributes:
        type: of the blocks.
        codes: uint8 [O, N, i], from 0 on; of a type of eight bits from 128, which stands for 0.
        scales: float16 [O, N].
        offsets: float16 [O, N]; None where the type has none.
        factors: of the scale of each group, uint8 or int8 [O, N, g]; None of a block with one
            scale.
        offset_factors: of the offset of each group, which is then subtracted, uint8 [O, N, g].
    """

    type: BlockType
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    factors: Tensor | None = None
    offset_factors: Tensor | None = None

    def values(self) -> Tensor:
        """Weights float32 [O, I]."""
        scales_ONg, offsets_ONg = self.scales.float()[..., None], None
        if self.factors is not None:
            scales_ONg = scales_ONg * self.factors
        if self.offsets is not None:
            offsets_ONg = self.offsets.float()[..., None]
            if self.offset_factors is not None:
                offsets_ONg = offsets_ONg * -self.offset_factors.float()
        codes_ONgi = self.codes.float().unflatten(2, (scales_ONg.shape[2], -1))
        found = (codes_ONgi - self.type.zero_code) * scales_ONg.unsqueeze(3)
        return (found if offsets_ONg is None else found + offsets_ONg.unsqueeze(3)).flatten(1)


def _parts(kind: BlockType, blocks_ONb: Tensor) -> BlockParts:
    scales, codes, offsets = _float16(blocks_ONb[..., :2]), blocks_ONb[..., 2:], None
    if kind.has_offsets:
        offsets, codes = _float16(codes[..., :2]), codes[..., 2:]
    if kind.bits == 8:
        codes = codes ^ 128  # of signed ones
    else:
        *bits, nibbles = codes.split([4, 16] if kind.bits == 5 else [16], dim=2)
        codes = _codes_of(nibbles, 16, 4)
        for octets in bits:
            # bit i is that of input i
            codes |= torch.stack([octets >> i & 1 for i in range(8)], dim=3).flatten(2) << 4
    return BlockParts(kind, codes, scales, offsets)


def _nested_parts(kind: BlockType, blocks_ONb: Tensor) -> BlockParts:
    num_codes = NESTED // 2, NESTED * (kind.bits - 4) // 8
    if not kind.has_offsets:
        nibbles, bits, factors, scales = blocks_ONb.split([*num_codes, kind.factor_bytes, 2], dim=2)
        codes = _codes_of(nibbles, 64, 4) | _codes_of(bits, 32, 2) << 4
        signed = factors.contiguous().view(torch.int8)
        return BlockParts(kind, codes, _float16(scales), factors=signed)
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
    return BlockParts(kind, codes, _float16(scales), _float16(offsets), of_scales, of_offsets)


def _float16(bytes_ONb: Tensor) -> Tensor:
    """[O, N] of [O, N, 2]."""
    return bytes_ONb.contiguous().view(torch.float16).squeeze(2)


def _codes_of(packed_ONb: Tensor, run: int, bits: int) -> Tensor:
    """Codes of a few bits: of each run of bytes first the lowest bits, then those above."""
    runs = packed_ONb.unflatten(2, (-1, run))
    parts = [runs >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=3).flatten(2)
