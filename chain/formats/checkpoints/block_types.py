"""GGML's types of weights that are multiplied as they are stored. Neither torch nor gguf in here.

A checkpoint holds such a weight under its name and the type's, `lm_head.weight.Q8_0`, as the bytes
of its rows: uint8 [O, B].

Source: ggml-org/ggml, `src/ggml-common.h`.
"""

from dataclasses import dataclass

GROUP = 32
"""Inputs of a row that are rounded together, whatever the type of the weights."""
NESTED = 256
"""Inputs of a block whose scales have two levels."""
DEVICE_STEP = 64
"""Inputs of a row that a GPU's kernels multiply at once: they take rows of whole steps."""


@dataclass(frozen=True)
class BlockType:
    """What a block of weights holds: a scale in float16, an offset in float16 or none, codes.

    Blocks of `NESTED` inputs hold integers, too, by which scale and offset are multiplied for each
    32 inputs; where there is no offset, by which the scale is, for each sixteen.

    Attributes:
        name: GGML's.
        bits: of a code; those of eight are signed.
        has_offsets: whether an offset is added to the weights, or subtracted where it is nested.
        zero: the code of a weight of zero, where none is.
        size: inputs of a block.
        factor_bytes: of a block's integers.
    """

    name: str
    bits: int
    has_offsets: bool = False
    zero: int = 0
    size: int = GROUP
    factor_bytes: int = 0

    @property
    def constants(self) -> slice:
        """A block's bytes that are scale and offset: the first, of Q6_K the last."""
        is_last = self.size == NESTED and not self.has_offsets
        return slice(-2, None) if is_last else slice(2 * (1 + self.has_offsets))

    @property
    def zero_code(self) -> int:
        """Of a weight of zero before the offset, where codes count from 0, those of eight bits
        too."""
        return 128 if self.bits == 8 else self.zero

    @property
    def num_bytes(self) -> int:
        """Of a block."""
        return 2 * (1 + self.has_offsets) + self.factor_bytes + self.size * self.bits // 8


BLOCK_TYPES = {
    block_type.name: block_type
    for block_type in (
        BlockType("Q4_0", 4, zero=8),
        BlockType("Q4_1", 4, has_offsets=True),
        BlockType("Q5_0", 5, zero=16),
        BlockType("Q5_1", 5, has_offsets=True),
        BlockType("Q8_0", 8),
        BlockType("Q4_K", 4, has_offsets=True, size=NESTED, factor_bytes=12),
        BlockType("Q5_K", 5, has_offsets=True, size=NESTED, factor_bytes=12),
        BlockType("Q6_K", 6, zero=32, size=NESTED, factor_bytes=16),
    )
}


def typed_name(name: str) -> tuple[str, BlockType | None]:
    """A stored tensor's own name, and the type of its blocks; None of one that is not in blocks."""
    stem, _, suffix = name.rpartition(".")
    return (stem, BLOCK_TYPES[suffix]) if suffix in BLOCK_TYPES else (name, None)
