"""Weights in GGML's blocks, in the layout that device kernels read.

#   I = in features, O = out features, S = steps of 64 inputs
#   w = words of a step: 2 of each of four threads q; see `PackedWeight`
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.block_types import DEVICE_STEP, NESTED, BlockType
from polybasic.chain.formats.checkpoints.blocks import BlockParts, BlockWeight
from polybasic.chain.kernels.torch.packed_weight import codes_of, words_of

_WEIGHTS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class PackedBlocks:
    """A weight whose codes lie as `PackedWeight` has them, and whose scales as its file does.

    Bytes are those of the file, and at most a thirtieth more where integers of six bits get eight.

    Attributes:
        type: of the blocks.
        words: int32 [S, O, 8], of the codes' lowest four bits.
        high: of the bits above these: None where there are none, and of four words as the others.
            Of two bits, int32 [S, O, 4], a thread's two words, which are zero elsewhere, lie in
            one, the second two places higher. Of one bit, int16 [S, O, 4], so do the halves of
            such a word, one place higher for the second word, and two for the upper half.
        factors: int32 [S, O] or [S, O, 2]: two scales in float16; a scale and an offset in float16
            of each 32 inputs; or integers of eight bits, the scales' and then the offsets'.
        constants: int32 [S / 4, O], by which these integers are multiplied: of the scales in the
            low half, of the offsets, which are subtracted, in the high one; None for no integers.
    """

    type: BlockType
    words: Tensor
    high: Tensor | None
    factors: Tensor
    constants: Tensor | None

    @classmethod
    def takes(cls, weight: BlockWeight) -> bool:
        """Whether its rows are whole steps."""
        return weight.shape[1] % DEVICE_STEP == 0

    @classmethod
    def pack(cls, weight: BlockWeight, device: torch.device) -> "PackedBlocks":
        """Lay out a weight on a device, some rows at a time."""
        rows = weight.rows.split(max(1, _WEIGHTS_AT_ONCE // weight.shape[1]))
        packed = [cls._packed(BlockWeight(weight.type, part.to(device)).parts()) for part in rows]
        return cls(
            weight.type,
            torch.cat([blocks.words for blocks in packed], 1),
            _joined([blocks.high for blocks in packed]),
            torch.cat([blocks.factors for blocks in packed], 1),
            _joined([blocks.constants for blocks in packed]),
        )

    @classmethod
    def _packed(cls, parts: BlockParts) -> "PackedBlocks":
        kind, codes_OI = parts.type, parts.codes.flatten(1)
        words, high, constants = words_of(codes_OI & 15, DEVICE_STEP), None, None
        if kind.bits > 4:
            high = _high_words(words_of(codes_OI >> 4, DEVICE_STEP), kind.bits - 4)
        if parts.factors is None:
            levels = [level for level in (parts.scales, parts.offsets) if level is not None]
            factors_OSf = _words(torch.stack(levels, 2).flatten(1))
            factors_OSf = factors_OSf.unflatten(1, (-1, len(levels)))
        else:
            pairs = [parts.factors.unflatten(2, (NESTED // DEVICE_STEP, -1))]
            if parts.offset_factors is not None:
                pairs.append(parts.offset_factors.unflatten(2, (NESTED // DEVICE_STEP, -1)))
            factors_OSf = _words(torch.cat(pairs, 3).flatten(1))[..., None]
            offsets = torch.zeros_like(parts.scales) if parts.offsets is None else parts.offsets
            constants = _words(torch.stack([parts.scales, offsets], 2).flatten(1)).t().contiguous()
        factors = factors_OSf.transpose(0, 1).contiguous()
        return cls(kind, words, high, factors, constants)

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return self.words.shape[1], DEVICE_STEP * len(self.words)

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        tensors = (self.words, self.high, self.factors, self.constants)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return 16 if self.type.size == NESTED and not self.type.has_offsets else 32

    def of_outputs(self, outputs: Tensor) -> "PackedBlocks":
        """Of these outputs, int64 [R], alone."""
        return self.mapped(lambda tensor: tensor.index_select(1, outputs))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "PackedBlocks":
        """With each tensor changed."""
        return PackedBlocks(
            self.type,
            change(self.words),
            None if self.high is None else change(self.high),
            change(self.factors),
            None if self.constants is None else change(self.constants),
        )

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [O, I] in `dtype`, made some rows at a time."""
        out_size, in_size = self.shape
        weight = torch.empty(self.shape, dtype=dtype, device=self.words.device)
        outputs = torch.arange(out_size, device=weight.device)
        for rows in outputs.split(max(1, _WEIGHTS_AT_ONCE // in_size)):
            weight[rows] = self.of_outputs(rows)._parts().values().to(dtype)
        return weight

    def _parts(self) -> BlockParts:
        kind, codes_OSi = self.type, codes_of(self.words)
        if self.high is not None:
            high = _words_of_high(self.high, kind.bits - 4)
            codes_OSi |= codes_of(high) << 4
        codes = codes_OSi.flatten(1).unflatten(1, (-1, kind.size))
        factors_OSf = self.factors.transpose(0, 1).contiguous()
        if self.constants is None:
            levels = factors_OSf.flatten().view(torch.float16)
            levels = levels.view(len(codes), -1, 1 + kind.has_offsets)
            return BlockParts(kind, codes, *levels.unbind(2))
        pairs_ON2 = self.constants.t().flatten().view(torch.float16).view(len(codes), -1, 2)
        scales, offsets = pairs_ON2.unbind(2)
        integers = factors_OSf.flatten().view(torch.uint8 if kind.has_offsets else torch.int8)
        groups = integers.view(len(codes), -1, NESTED // DEVICE_STEP, 4)
        if not kind.has_offsets:
            return BlockParts(kind, codes, scales, None, groups.flatten(2))
        of_scales, of_offsets = (half.flatten(2) for half in groups.chunk(2, 3))
        return BlockParts(kind, codes, scales, offsets, of_scales, of_offsets)


def _high_words(words_SOw: Tensor, num_bits: int) -> Tensor:
    """Words whose every four bits hold so many, joined as `PackedBlocks.high`."""
    if num_bits == 4:
        return words_SOw
    first, second = words_SOw.unflatten(2, (4, 2)).unbind(3)
    joined_SOq = first | second << num_bits
    return joined_SOq if num_bits == 2 else (joined_SOq | joined_SOq >> 14).to(torch.int16)


def _words_of_high(high: Tensor, num_bits: int) -> Tensor:
    """What `_high_words` joined."""
    if num_bits == 4:
        return high
    if num_bits == 1:
        high = high.int() & 0xFFFF
        high = high | high << 14
    mask = 0x11111111 * ((1 << num_bits) - 1)
    return torch.stack([high & mask, high >> num_bits & mask], 3).flatten(2)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Tensors of the same type of blocks, which all have one or none has."""
    found = [part for part in parts if part is not None]
    return torch.cat(found, 1) if found else None


def _words(numbers: Tensor) -> Tensor:
    """int32, of as many adjacent numbers of a row as it holds."""
    return numbers.contiguous().view(torch.int32)
