"""How `polybasic.chain.kernels.cuda.attention` divides its work: by shapes and GPU alone.

#   K = key/value heads, G = query heads that read one of them, H = head size
#   M = queries that one program serves, N = columns (rows of the cache) read at once
"""

from dataclasses import dataclass
from typing import Any

import torch

MIN_DOT = 16
"""Rows and columns of the smallest matrix product."""
NUM_WARPS = 8
MIN_COLUMNS = 384
"""Columns below which a part of its own does not pay."""
GRAIN = 16
"""The columns of a part are a multiple of this."""
MAX_PARTS = 64
MAX_COMBINED_BYTES = 1 << 17
"""Partial results that one program combines; beyond that, a second kernel does it."""

MAX_TICKETS = 4096
"""Key/value heads times tiles of queries; in practice a few dozen."""

_MAX_TILE = 64
"""Of 128 queries a program has more sums than its threads have registers, even for heads of 64."""
_MAX_STAGES = 3
_MAX_NEW_ROWS = 32
_HOPPER = 9
_NUMBER_BYTES = 2  # float32 occurs only in the interpreter
_SUM_BYTES = 1024


@dataclass(frozen=True)
class Gpu:
    """What the division depends on.

    Attributes:
        num_processors: streaming multiprocessors.
        shared_bytes: shared memory that one program may use.
        is_hopper: compute capability 9, whose matrix units read both factors from shared memory.
    """

    num_processors: int
    shared_bytes: int
    is_hopper: bool

    @classmethod
    def of(cls, device: torch.device) -> "Gpu":
        """The GPU of a device; for a CPU, where kernels are interpreted, an H200."""
        if device.type != "cuda":
            return cls(132, 227 * 1024, True)
        found: Any = torch.cuda.get_device_properties(device)
        shared_bytes = found.shared_memory_per_block_optin
        return cls(found.multi_processor_count, shared_bytes, found.major == _HOPPER)


@dataclass(frozen=True)
class AttentionLayer:
    """What the division depends on in a layer: K, G, H, and rows of the cache."""

    num_kv_heads: int
    query_groups: int
    head_dim: int
    capacity: int

    @property
    def padded_dim(self) -> int:
        """H as kernels hold it: the next power of 2 that matrix products accept."""
        return max(MIN_DOT, _power_of_2(self.head_dim))


@dataclass(frozen=True)
class AttentionPlan:
    """A division of one layer's attention.

    Attributes:
        tile: M, a power of 2.
        num_tiles: of a head's queries.
        num_columns: N.
        new_rows: rows of the pass whose keys are rotated at once.
        new_chunks: how many such groups of rows there are.
        parts: maximum number of parts of one head's cache.
        stages: blocks of columns in flight and in use.
        combines: the last program of a head combines the results; else a second kernel does.
        num_sequences: S, that attend in one launch.
    """

    layer: AttentionLayer
    tile: int
    num_tiles: int
    num_columns: int
    new_rows: int
    new_chunks: int
    parts: int
    stages: int
    combines: bool
    num_sequences: int = 1

    @classmethod
    def of(
        cls, gpu: Gpu, layer: AttentionLayer, num_rows: int, num_sequences: int = 1
    ) -> "AttentionPlan":
        """The division for a pass over `num_rows` rows of each of so many sequences."""
        num_queries, padded = num_rows * layer.query_groups, layer.padded_dim
        tile = min(_MAX_TILE, max(MIN_DOT, _power_of_2(num_queries)))
        num_columns = 128 if padded <= 128 else 64
        stages = _MAX_STAGES
        while _shared(gpu, padded, tile, num_columns, stages) > gpu.shared_bytes:
            if num_columns > 64:
                num_columns = 64
            elif stages > 2:
                stages -= 1
            else:
                assert tile > MIN_DOT, f"heads of {layer.head_dim} in {gpu.shared_bytes} bytes"
                tile //= 2
        num_tiles = -(-num_queries // tile)
        useful = -(-(layer.capacity + num_columns) // MIN_COLUMNS)
        parts = gpu.num_processors // (num_sequences * layer.num_kv_heads * num_tiles)
        parts = max(1, min(parts, useful, MAX_PARTS))
        combined_bytes = 4 * parts * min(tile, num_queries) * layer.head_dim
        new_rows = max(MIN_DOT, min(_MAX_NEW_ROWS, _power_of_2(num_rows)))
        return cls(
            layer=layer,
            tile=tile,
            num_tiles=num_tiles,
            num_columns=num_columns,
            new_rows=new_rows,
            new_chunks=-(-_power_of_2(num_rows) // new_rows),
            parts=parts,
            stages=stages,
            combines=combined_bytes <= MAX_COMBINED_BYTES,
            num_sequences=num_sequences,
        )

    @property
    def num_units(self) -> int:
        """Number of programs for one part."""
        return self.num_sequences * self.layer.num_kv_heads * self.num_tiles

    @property
    def num_partial(self) -> int:
        """Size of the parts' results that are to be combined."""
        return self.num_units * self.parts * self.tile * (self.layer.head_dim + 2)

    def shared_bytes(self, gpu: Gpu) -> int:
        """Upper bound of the shared memory of a program."""
        return _shared(gpu, self.layer.padded_dim, self.tile, self.num_columns, self.stages)

    def shape(self) -> dict[str, int]:
        """Constants of both kernels."""
        return {
            "K": self.layer.num_kv_heads,
            "G": self.layer.query_groups,
            "H": self.layer.head_dim,
            "HP": self.layer.padded_dim,
            "M": self.tile,
            "PARTS": self.parts,
            "POWER": _power_of_2(self.parts),
        }

    def constants(self) -> dict[str, int]:
        """Further constants of the first kernel."""
        registers_a_part = self.tile * self.layer.padded_dim // (32 * NUM_WARPS)
        return {
            "N": self.num_columns,
            "NEW": self.new_rows,
            "CHUNKS": self.new_chunks,
            "GRAIN": GRAIN,
            "LEAST": MIN_COLUMNS,
            "STAGES": self.stages,
            "COMBINES": self.combines,
            "AHEAD": max(1, min(4, 128 // registers_a_part)),
        }


def _shared(gpu: Gpu, padded_dim: int, tile: int, num_columns: int, stages: int) -> int:
    """Bytes of a program: blocks of keys and values, queries, weights of a block, and sums."""
    buffers = stages if gpu.is_hopper else stages - 1
    blocks = 2 * buffers * num_columns * padded_dim
    return _NUMBER_BYTES * (blocks + tile * (padded_dim + num_columns)) + _SUM_BYTES


def _power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least `number`."""
    return 1 << (number - 1).bit_length()
