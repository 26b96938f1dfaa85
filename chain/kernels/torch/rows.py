"""How the rows of a pass attend to the cache, in tensors that the host never reads.

The counterpart of `polybasic.chain.kernels.torch.attend`: a captured pass runs over other rows when
the numbers in these tensors change while their shapes stay the same.

#   R = rows (tokens of one pass), P = provisional rows of the cache, those of the pass included
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polybasic.chain.formats.config import LayerKind
from polybasic.chain.formats.plan import Window


@dataclass(frozen=True)
class DeviceRows:
    """How the rows of one pass attend to the cache.

    The cache holds committed rows, each at the position of its index, followed by provisional rows.
    The pass writes the provisional rows `first` to P - 1, that is, the cache's rows from
    `prefix + first` on.

    Attributes:
        prefix: int64 [], committed rows of the cache; all rows of the pass see them, except what
            a window hides.
        positions: int64 [R], of the rows.
        columns: int64 [P], positions of the provisional rows; the last R are `positions`.
        visible: bool [R, P], which provisional rows a row sees, itself included.
        window: hides the middle of a long context; None hides nothing.
    """

    prefix: Tensor
    positions: Tensor
    columns: Tensor
    visible: Tensor
    window: Window | None = None

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.positions)

    @property
    def first(self) -> int:
        """Number of provisional rows of the cache before those of the pass."""
        return len(self.columns) - len(self.positions)

    def span_of(self, kind: LayerKind) -> "Span":
        """What rows see of the cache in layers of one kind."""
        tokens, sinks = kind.window, 0
        if self.window is not None and (tokens is None or self.window.tokens < tokens):
            tokens, sinks = self.window.tokens, self.window.sinks
        if tokens is None:
            return Span(0, 0, self.visible)
        is_hidden = self.columns <= self.positions[:, None] - tokens
        is_hidden &= self.columns >= sinks
        return Span(tokens, sinks, self.visible & ~is_hidden)


@dataclass(frozen=True)
class Span:
    """What rows see in layers of one kind.

    Attributes:
        tokens: committed rows at position - tokens and before are hidden, except the sinks; 0
            hides none.
        sinks: leading committed rows that are always seen.
        visible: bool [R, P], as `DeviceRows.visible`, without what the window hides.
    """

    tokens: int
    sinks: int
    visible: Tensor


def causal_rows(prefix: Tensor, num_rows: int, window: Window | None = None) -> DeviceRows:
    """`num_rows` consecutive tokens after `prefix` (int64 []) committed ones."""
    positions = prefix + torch.arange(num_rows, device=prefix.device)
    visible = torch.ones(num_rows, num_rows, dtype=torch.bool, device=prefix.device).tril()
    return DeviceRows(prefix, positions, positions, visible, window)


def tree_rows(
    prefix: Tensor, depths: Tensor, ancestors: Tensor, window: Window | None = None
) -> DeviceRows:
    """Rows of a tree after `prefix` committed tokens.

    Args:
        depths: int64 [R], distance of each row from the root.
        ancestors: bool [R, R], which rows are on the path to each, itself included.
    """
    positions = prefix + depths
    return DeviceRows(prefix, positions, positions, ancestors, window)
