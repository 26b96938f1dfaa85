"""GGML's types of weights that are multiplied as they are stored. Neither torch nor gguf in here.

A checkpoint holds such a weight under its name and the type's, `lm_head.weight.Q8_0`, as the bytes
of its rows: uint8 [O, B].

Source: ggml-org/ggml, `src/ggml-common.h`.
"""

from dataclasses import dataclass

BLOCK = 32
"""Inputs of a weight that share a scale."""


@dataclass(frozen=True)
class BlockType:
    """What a block of 32 weights holds: a scale in float16, an offset in float16 or none, codes.

    Attributes:
        name: GGML's.
        bits: of a code; those of eight are signed.
        has_offsets: whether an offset is added to the weights.
        zero: the code of a weight of zero, where none is.
    """

    name: str
    bits: int
    has_offsets: bool = False
    zero: int = 0

    @property
    def num_bytes(self) -> int:
        """Of a block."""
        return 2 * (1 + self.has_offsets) + BLOCK * self.bits // 8


BLOCK_TYPES = {
    one.name: one
    for one in (
        BlockType("Q4_0", 4, zero=8),
        BlockType("Q4_1", 4, has_offsets=True),
        BlockType("Q8_0", 8),
    )
}


def typed_name(name: str) -> tuple[str, BlockType | None]:
    """A stored tensor's own name, and the type of its blocks; None of one that is not in blocks."""
    stem, _, suffix = name.rpartition(".")
    return (stem, BLOCK_TYPES[suffix]) if suffix in BLOCK_TYPES else (name, None)
