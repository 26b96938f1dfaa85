"""Weights in the blocks of GGML's quantized types, kept as a file has them.

#   O = out features, I = in features, B = bytes of a row, G = blocks of one row (I / 32)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polybasic.chain.formats.block_types import BLOCK, BlockType

_WEIGHTS_AT_ONCE = 1 << 22
"""That are in float32 at a time."""


@dataclass(frozen=True)
class BlockWeight:
    """One linear's weight: w[o, i] = (codes[o, i] - zero) * scales[o, g], plus offsets[o, g].

    Attributes:
        type: which says what the codes mean.
        codes: [O, I], uint8 below 16 of four bits, int8 of eight.
        scales: float16 [O, G].
        offsets: the same; None where the type has none.
    """

    type: BlockType
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None

    @classmethod
    def unpack(cls, kind: BlockType, rows_OB: Tensor) -> "BlockWeight":
        """Read rows as a file has them, uint8 [O, B]."""
        blocks_OGb = rows_OB.unflatten(1, (-1, kind.num_bytes))
        scales = blocks_OGb[..., :2].contiguous().view(torch.float16).squeeze(2)
        offsets = None
        if kind.has_offsets:
            offsets = blocks_OGb[..., 2:4].contiguous().view(torch.float16).squeeze(2)
        codes = blocks_OGb[..., 4 if kind.has_offsets else 2 :]
        if kind.bits == 4:
            # the low halves are those of the first sixteen inputs
            codes = torch.cat([codes & 15, codes >> 4], dim=2)
        else:
            codes = codes.contiguous().view(torch.int8)
        return cls(kind, codes.flatten(1), scales, offsets)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [O, I]: llama.cpp's in float32, and others rounded from that."""
        dense = torch.empty(self.codes.shape, dtype=dtype)
        offsets = self.scales.new_zeros(self.scales.shape) if self.offsets is None else self.offsets
        for begin in range(0, len(dense), step := max(1, _WEIGHTS_AT_ONCE // dense.shape[1])):
            rows = slice(begin, begin + step)
            codes_OGi = self.codes[rows].float().unflatten(1, (-1, BLOCK)) - self.type.zero
            scaled = codes_OGi * self.scales[rows].float().unsqueeze(2)
            dense[rows] = (scaled + offsets[rows].float().unsqueeze(2)).flatten(1)
        return dense
