"""How the rows of a sequence attend to its cache, in tensors.

A captured pass runs over other rows when the numbers in these tensors change while their shapes
stay the same: the host never reads them. Where the host knows the numbers, passes read less of the
cache.

#   R = rows (tokens of one pass), P = provisional rows of the cache, those of the pass included
#   C = rows of the cache that a pass reads, G = query heads that read one key/value head
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.decoder_config import LayerKind
from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.rotary import Rotation
from polybasic.chain.kernels.rows import Rows, narrower_window, seen_from


@dataclass(frozen=True)
class DeviceRows:
    """How the rows of one sequence attend to its cache.

    The cache holds committed rows, each at the position of its index, followed by provisional rows.
    The pass writes the provisional rows `first` to P - 1, that is, the cache's rows from
    `prefix + first` on.

    Attributes:
        prefix: int64 [], committed rows of the cache; all rows of the pass see them, except what
            a window hides.
        positions: int64 [R], of the rows.
        columns: int64 [P], positions of the provisional rows; the last R are `positions`.
        visible: bool [R, P], which provisional rows a row sees, itself included; None if the rows
            are consecutive tokens after the prefix.
        window: hides the middle of a long context; None hides nothing.
        known_prefix: the number in `prefix`, if the host knows it.
    """

    prefix: Tensor
    positions: Tensor
    columns: Tensor
    visible: Tensor | None = None
    window: Window | None = None
    known_prefix: int | None = None

    @classmethod
    def of(cls, rows: Rows, device: torch.device) -> "DeviceRows":
        """Rows that the host knows."""
        start, num_rows = rows.start, rows.num_rows
        prefix = torch.tensor(start, device=device)
        if rows.paths is None:
            positions = torch.arange(start, rows.end, device=device)
            return cls(prefix, positions, positions, None, rows.window, start)
        positions = torch.tensor([start + len(path) - 1 for path in rows.paths], device=device)
        visible = torch.zeros(num_rows, num_rows, dtype=torch.bool)
        for row, path in enumerate(rows.paths):
            visible[row, [seen - start for seen in path]] = True
        return cls(prefix, positions, positions, visible.to(device), rows.window, start)

    @cached_property
    def num_rows(self) -> int:
        """R."""
        return len(self.positions)

    @cached_property
    def first(self) -> int:
        """Number of provisional rows of the cache before those of the pass."""
        return len(self.columns) - len(self.positions)

    @cached_property
    def among(self) -> Tensor:
        """`visible`, also of consecutive tokens."""
        if self.visible is not None:
            return self.visible
        num_rows = self.num_rows
        return torch.ones(num_rows, num_rows, dtype=torch.bool, device=self.prefix.device).tril()

    def span_of(self, kind: LayerKind) -> "Span":
        """What rows see of the cache in layers of one kind."""
        tokens, sinks = narrower_window(kind, self.window)
        return Span(self, kind, tokens or 0, sinks)


@dataclass(frozen=True)
class Span:
    """What rows see in layers of one kind.

    Attributes:
        tokens: committed rows at position - tokens and before are hidden, except the sinks; 0
            hides none.
        sinks: leading committed rows that are always seen.
    """

    rows: DeviceRows
    kind: LayerKind
    tokens: int
    sinks: int
    _masks: list[Tensor] = field(default_factory=list, repr=False, compare=False)
    _rotations: list[Rotation] = field(default_factory=list, repr=False, compare=False)

    @cached_property
    def visible(self) -> Tensor:
        """bool [R, P], as `DeviceRows.visible`, without what the window hides."""
        rows = self.rows
        if not self.tokens:
            return rows.among
        is_hidden = rows.columns <= rows.positions[:, None] - self.tokens
        is_hidden &= rows.columns >= self.sinks
        return rows.among & ~is_hidden

    @cached_property
    def is_whole_prompt(self) -> bool:
        """Whether the cache is empty and each row sees all rows before it."""
        rows = self.rows
        if rows.known_prefix != 0 or rows.visible is not None or rows.first:
            return False
        return not self.tokens or rows.num_rows <= self.tokens + self.sinks

    @cached_property
    def sees_all(self) -> bool:
        """Whether each row sees all that `of` returns: true of a single row."""
        return self.rows.known_prefix is not None and len(self.rows.columns) == 1

    def of(self, cache: Tensor) -> Tensor:
        """The rows [2K, C, H] of a cache [2K, capacity, H] that some row of the pass may see."""
        rows = self.rows
        if rows.known_prefix is None:
            return cache
        leading, latest = self._committed
        found = cache[:, latest : rows.known_prefix + rows.first + rows.num_rows]
        return torch.cat([cache[:, : leading.stop], found], 1) if leading else found

    def seen(self, capacity: int) -> Tensor:
        """Which of the rows that `of` returns each row sees, bool [R, C]."""
        rows, device = self.rows, self.rows.prefix.device
        if rows.known_prefix is not None:
            leading, latest = self._committed
            places = torch.arange(latest, rows.known_prefix, device=device)
            if leading:
                places = torch.cat([torch.arange(leading.stop, device=device), places])
            return torch.cat([self._sees_committed(places), self.visible], 1)
        places = torch.arange(capacity, device=device)
        provisional = places - rows.prefix
        num_provisional = len(rows.columns)
        among = self.visible[:, provisional.clamp(0, num_provisional - 1)]
        is_provisional = (provisional >= 0) & (provisional < num_provisional)
        is_committed = self._sees_committed(places) & (places < rows.prefix)
        return is_committed | (among & is_provisional)

    def mask(self, capacity: int, query_groups: int, dtype: torch.dtype) -> Tensor:
        """`seen` as numbers [R * G, C] to add to scores, each row repeated for its query heads.

        Made once for all layers of a pass.
        """
        if self._masks:
            return self._masks[0]
        rows, committed = self.rows, 0
        if rows.known_prefix is not None and not self.tokens:
            # all committed rows are seen, and only the others are looked at
            seen, committed = self.visible, rows.known_prefix
        else:
            seen = self.seen(capacity)
        hidden = ~seen.repeat_interleave(query_groups, 0)
        num_rows, num_columns = hidden.shape
        mask = torch.zeros(num_rows, committed + num_columns, dtype=dtype, device=hidden.device)
        mask[:, committed:].masked_fill_(hidden, float("-inf"))
        self._masks.append(mask)
        return self._masks[0]

    def rotation(self, tables: Rotation) -> Rotation:
        """Cosines and sines of the rows' positions, each [R, 1, H]; looked up once for all layers.

        Args:
            tables: of all positions, each [positions, 1, H].
        """
        if not self._rotations:
            cos, sin = (table.index_select(0, self.rows.positions) for table in tables)
            self._rotations.append((cos, sin))
        return self._rotations[0]

    @cached_property
    def _committed(self) -> tuple[range, int]:
        """Committed rows that some row of the pass sees, where the prefix is known."""
        assert self.rows.known_prefix is not None
        return seen_from(self.rows.known_prefix, self.kind, self.rows.window)

    def _sees_committed(self, places: Tensor) -> Tensor:
        """Which of the committed rows at `places` [C] each row sees, bool [R, C]."""
        if not self.tokens:
            return torch.ones_like(places, dtype=torch.bool).expand(self.rows.num_rows, -1)
        is_latest = places > self.rows.positions[:, None] - self.tokens
        return is_latest | (places < self.sinks)


def device_consecutive_rows(
    prefix: Tensor, num_rows: int, window: Window | None = None
) -> DeviceRows:
    """`num_rows` consecutive tokens after `prefix` (int64 []) committed ones."""
    positions = prefix + torch.arange(num_rows, device=prefix.device)
    return DeviceRows(prefix, positions, positions, None, window)


def device_tree_rows(
    prefix: Tensor, depths: Tensor, ancestors: Tensor, window: Window | None = None
) -> DeviceRows:
    """Rows of a tree after `prefix` committed tokens.

    Args:
        depths: int64 [R], distance of each row from the root.
        ancestors: bool [R, R], which rows are on the path to each, itself included.
    """
    positions = prefix + depths
    return DeviceRows(prefix, positions, positions, ancestors, window)
