"""4-bit weights in the layout that device kernels read.

#   I = in features, O = out features, G = groups of inputs
#   w = words of a group: 32 inputs b, of which each of four threads q reads pairs p, j times
"""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.awq import QuantizedWeight

CODES_PER_WORD = 8
GROUP_MULTIPLE = 32
"""The number of inputs of a group is a multiple of this."""

_CODES_AT_ONCE = 1 << 24
_ZERO_MASK = 15


@dataclass(frozen=True)
class PackedWeight:
    """A 4-bit weight, laid out once: weight[o, i] = (code[o, i] - zero[o, g]) * scale[o, g].

    Of every 16 inputs of a row, tensor cores need from each thread two neighbours and the two that
    are 8 places further on. A word holds what one thread needs of 32 inputs, and the words that it
    needs of one group are adjacent: codes go from memory into the product without being moved
    between threads.

    Attributes:
        words: int32 [G, O, n / 8] for groups of n inputs. Word q * n / 32 + b of a group holds the
            inputs 32 b + 8 j + 2 q + p of it, for j from 0 to 3 and p of 0 and 1, in the four bits
            from 16 p + 4 j on.
        groups: int32 [G, O]: the scale's bits as float32, the lowest of which hold the zero; they
            are unused in a scale of 16 bits.
    """

    words: Tensor
    groups: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return self.words.shape[1], len(self.words) * self.group_size

    @property
    def group_size(self) -> int:
        """Inputs that share a scale and a zero."""
        return CODES_PER_WORD * self.words.shape[2]

    @property
    def num_bytes(self) -> int:
        """Of both tensors."""
        return self.words.nbytes + self.groups.nbytes

    @classmethod
    def pack(cls, weight: QuantizedWeight, device: torch.device) -> "PackedWeight":
        """Lay out a weight on a device; its groups hold a multiple of `GROUP_MULTIPLE` inputs."""
        (out_size, in_size), group_size = weight.codes.shape, weight.group_size
        assert group_size % GROUP_MULTIPLE == 0, f"groups of {group_size}"
        shape_GOw = (in_size // group_size, out_size, group_size // CODES_PER_WORD)
        words = torch.zeros(shape_GOw, dtype=torch.int32, device=device)
        num_rows = max(1, _CODES_AT_ONCE // in_size)
        for first in range(0, out_size, num_rows):
            rows = slice(first, first + num_rows)
            words[:, rows] = words_of(weight.codes[rows].to(device), group_size)
        scales, zeros = (part.to(device).t() for part in (weight.scales, weight.zeros))
        groups = scales.float().contiguous().view(torch.int32) | zeros.int()
        return cls(words, groups)

    @property
    def scales(self) -> Tensor:
        """float32 [G, O]."""
        return (self.groups & ~_ZERO_MASK).view(torch.float32)

    @property
    def zeros(self) -> Tensor:
        """int32 [G, O]."""
        return self.groups & _ZERO_MASK

    def of_outputs(self, outputs: Tensor) -> "PackedWeight":
        """Of these outputs, int64 [R], alone."""
        return PackedWeight(*(part.index_select(1, outputs) for part in (self.words, self.groups)))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [O, I] in `dtype`, made some rows at a time."""
        out_size, in_size = self.shape
        weight = torch.empty(self.shape, dtype=dtype, device=self.words.device)
        num_rows = max(1, _CODES_AT_ONCE // in_size)
        for first in range(0, out_size, num_rows):
            rows = slice(first, first + num_rows)
            weight[rows] = self._rows_in_float32(rows)
        return weight

    def _rows_in_float32(self, rows: slice) -> Tensor:
        codes_OGi = codes_of(self.words[:, rows])
        scales, zeros = self.scales[:, rows].t(), self.zeros[:, rows].t()
        return ((codes_OGi - zeros[..., None]) * scales[..., None]).flatten(1)


def words_of(codes_OI: Tensor, group_size: int) -> Tensor:
    """The words [G, O, n / 8] of `PackedWeight` for groups of n inputs, of codes in four bits."""
    codes_IO = codes_OI.t().int()
    codes_GbjqpO = codes_IO.view(len(codes_IO) // group_size, -1, 4, 4, 2, codes_IO.shape[1])
    words = torch.zeros_like(codes_GbjqpO[:, :, 0, :, 0])
    for pair, second in product(range(4), range(2)):
        words |= codes_GbjqpO[:, :, pair, :, second] << (4 * pair + 16 * second)
    return words.permute(0, 3, 2, 1).flatten(2)


def codes_of(words_GOw: Tensor) -> Tensor:
    """The codes int32 [O, G, n] that `words_of` packs."""
    words_GOqb = words_GOw.unflatten(2, (4, -1))
    nibbles = [
        (words_GOqb >> (4 * pair + 16 * second)) & 15
        for pair, second in product(range(4), range(2))
    ]
    codes_GOqbjp = torch.stack(nibbles, -1).unflatten(-1, (4, 2))
    return codes_GOqbjp.permute(1, 0, 3, 4, 2, 5).flatten(2)
