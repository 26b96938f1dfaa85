"""Keys and values of one sequence, allocated once."""

from collections.abc import Sequence

import torch

from polybasic.chain.config import DecoderConfig
from polybasic.chain.native.library import kernels_for


class KeyValueCache:
    """A fixed number of rows a layer; `length` of them are committed.

    A pass writes its rows behind the committed ones. `keep` then commits some of them, in the
    order given, and forgets the others: rejected rows cost nothing but the shortening.

    Args:
        num_layers: of the decoder, or 1 for a draft head.
        capacity: rows, committed and provisional together.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_layers: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (2 * config.num_kv_heads, capacity, config.head_dim)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.capacity, self.length = capacity, 0

    def keep(self, rows: Sequence[int]) -> None:
        """Commit provisional rows, given as offsets from `length` in ascending order."""
        moved = [(row, place) for place, row in enumerate(rows) if row != place]
        if moved:
            sources = [self.length + row for row, _ in moved]
            self._move(sources, self.length + moved[0][1])
        self.length += len(rows)

    def _move(self, sources: list[int], first: int) -> None:
        """Put rows, in ascending order, one after the other from `first` on."""
        kernels = kernels_for(self.layers[0].device, self.layers[0].dtype)
        if kernels is not None:
            kernels.move_rows(self.layers, sources, first)
            return
        source = torch.tensor(sources, device=self.layers[0].device)
        for layer in self.layers:
            layer[:, first : first + len(sources)] = layer[:, source]

    def truncate(self, length: int) -> None:
        """Forget all rows from `length` on."""
        assert 0 <= length <= self.length, f"truncate to {length} of {self.length} rows"
        self.length = length
