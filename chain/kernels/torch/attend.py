"""How the rows of a pass attend to the cache: positions, ancestors, windows.

#   R = rows (tokens of one pass), S = rows in the cache, T = S + R
#   G = query heads that read one key/value head, H = head size
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.formats.config import DecoderConfig, LayerKind
from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.torch.rotary import RotaryTable, Rotation

BLOCK_ROWS = 512
"""Rows of a block of a pass that needs a mask, whose size is rows by columns."""
NO_ROWS = range(0)


@dataclass
class View:
    """How the layers of one kind attend to the cache.

    Attributes:
        rotation: cosines and sines of the rows' positions, each [R, 1, H].
        mask: [R * G, sinks and T - first] added to the scores (0 or -inf), each row repeated for
            its G query heads; None if every row sees all of these columns.
        first: first row of the cache that is seen, apart from the sinks.
        sinks: leading rows of the cache that are seen in addition to those from `first` on.
        is_prompt: the cache was empty and is read from left to right. The mask is then [R, T], or
            None for a causal one.
    """

    rotation: Rotation
    mask: Tensor | None = None
    first: int = 0
    sinks: range = NO_ROWS
    is_prompt: bool = False

    def of(self, cached: Tensor, end: int, dim: int) -> Tensor:
        """The visible part of the first `end` rows of a cache, which lie along dimension `dim`."""
        latest = cached.narrow(dim, self.first, end - self.first)
        if not self.sinks:
            return latest
        sinks = cached.narrow(dim, self.sinks.start, len(self.sinks))
        return torch.cat([sinks, latest], dim)


class Attending(Protocol):
    """A model that attends to a cache: a `Decoder` or an `EagleHead`."""

    config: DecoderConfig
    rotary: RotaryTable


@dataclass(frozen=True)
class Attend:
    """How the rows of one pass attend to the cache.

    Attributes:
        start: first row of the cache that the pass writes.
        num_rows: R.
        prefix: leading rows of the cache, each at the position of its index, which all rows of the
            pass see, except what a window hides.
        paths: for each row of the pass, the rows of the cache after the prefix that it sees, by
            position, itself last; None if the rows are consecutive tokens after the prefix, which
            is then `start`.
        prepared: precomputed views for `views_of`.
        window: hides the middle of a long context from all rows; None hides nothing. Layers with a
            narrower window of their own keep it.
    """

    start: int
    num_rows: int
    prefix: int
    paths: Sequence[Sequence[int]] | None = None
    prepared: list[View] | None = None
    window: Window | None = None

    def positions(self) -> list[int]:
        """The position of each row."""
        if self.paths is None:
            return list(range(self.start, self.start + self.num_rows))
        return [self.prefix + len(path) - 1 for path in self.paths]

    def views_of(self, model: Attending) -> list[View]:
        """How each kind of the model's layers attends to the cache."""
        if self.prepared is not None:
            return self.prepared
        return _tree_views(model, self) if self.paths is not None else _causal_views(model, self)


def attend_causally(start: int, rows: int, window: Window | None = None) -> Attend:
    """`rows` consecutive tokens after `start` cached ones."""
    return Attend(start, rows, prefix=start, window=window)


def attend_in_blocks(
    model: Attending, start: int, rows: int, window: Window | None = None
) -> list[Attend]:
    """As `attend_causally`, in several passes if one would need too large a mask."""
    whole = attend_causally(start, rows, window)
    if rows <= BLOCK_ROWS or _is_whole_prompt(model, whole):
        return [whole]
    firsts = range(start, start + rows, BLOCK_ROWS)
    return [
        attend_causally(first, min(BLOCK_ROWS, start + rows - first), window) for first in firsts
    ]


def attend_to_ancestors(start: int, parents: Sequence[int], window: Window | None = None) -> Attend:
    """Rows of a tree after `start` cached tokens, all of which they see except for the window.

    Args:
        parents: of each row, an earlier row, or -1 for none.
    """
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        above = paths[parent] if parent >= 0 else []
        paths.append([*above, start + row])
    return Attend(start, len(paths), prefix=start, paths=paths, window=window)


def seen_from(position: int, kind: LayerKind, window: Window | None) -> tuple[range, int]:
    """What a token sees: leading positions, and all from a later one up to its own.

    Positions are those of the whole text even with a window, because the cache holds keys as they
    were rotated when written, for all models that share it.

    Returns:
        Leading positions, none if there is no gap after them, and the later position.
    """
    if window is None or not _is_narrower(window, kind):
        return NO_ROWS, kind.first_seen(position)
    latest = max(0, position + 1 - window.tokens)
    if latest <= window.sinks:
        return NO_ROWS, 0
    return range(window.sinks), latest


def _is_narrower(window: Window, kind: LayerKind) -> bool:
    """Whether the window, with its sinks, replaces the kind's own."""
    return kind.window is None or window.tokens < kind.window


def _is_whole_prompt(model: Attending, attend: Attend) -> bool:
    """Whether each row of an empty cache sees all rows before it, as fused kernels assume."""
    last = attend.num_rows - 1
    return (
        attend.start == 0
        and model.config.attention_softcap is None
        and all(seen_from(last, kind, attend.window)[1] == 0 for kind in model.config.kinds)
    )


def _causal_views(model: Attending, attend: Attend) -> list[View]:
    start, rows = attend.start, attend.num_rows
    kinds, rotations = model.config.kinds, model.rotary.between(start, start + rows)
    if rows == 1:
        seen = [seen_from(start, kind, attend.window) for kind in kinds]
        return [
            View(rotation, first=first, sinks=sinks)
            for (sinks, first), rotation in zip(seen, rotations, strict=True)
        ]
    if _is_whole_prompt(model, attend):
        return [View(rotation, is_prompt=True) for rotation in rotations]
    cos = rotations[0][0]
    positions = torch.arange(start, start + rows, device=cos.device)
    future = cos.new_full((rows, rows), float("-inf")).triu_(1)
    is_prompt = start == 0 and model.config.attention_softcap is None
    return _views(model, attend, rotations, positions, future, is_prompt)


def _tree_views(model: Attending, attend: Attend) -> list[View]:
    assert attend.paths is not None
    assert attend.start == attend.prefix, "rows of earlier passes are seen through prepared views"
    rows, start = attend.num_rows, attend.start
    visible = torch.zeros(rows, rows, dtype=torch.bool)
    for row, path in enumerate(attend.paths):
        visible[row, [seen - start for seen in path]] = True
    mask = torch.zeros(rows, rows).masked_fill_(~visible, float("-inf"))
    positions = torch.tensor(attend.positions())
    rotations = model.rotary.at(positions)
    cos = rotations[0][0]
    among_rows = mask.to(cos.device, cos.dtype)
    return _views(model, attend, rotations, positions.to(cos.device), among_rows)


def _views(
    model: Attending,
    attend: Attend,
    rotations: list[Rotation],
    positions: Tensor,
    among_rows: Tensor,
    is_prompt: bool = False,
) -> list[View]:
    start, window = attend.start, attend.window
    groups = 1 if is_prompt else model.config.query_groups
    views = []
    for kind, rotation in zip(model.config.kinds, rotations, strict=True):
        sinks, first = seen_from(start, kind, window)
        # among these rows everything is visible, except for the window
        mask = F.pad(among_rows, (len(sinks) + start - first, 0))
        if seen_from(start + attend.num_rows - 1, kind, window)[1] > 0:
            leading = torch.arange(sinks.start, sinks.stop, device=positions.device)
            cached = torch.arange(first, start, device=positions.device)
            columns = torch.cat([leading, cached, positions])
            hidden = _hidden(columns, positions[:, None], kind, window)
            mask = mask.masked_fill(hidden, float("-inf"))
        if groups > 1:
            mask = mask.repeat_interleave(groups, 0)
        views.append(View(rotation, mask, first, sinks, is_prompt))
    return views


def _hidden(columns: Tensor, positions: Tensor, kind: LayerKind, window: Window | None) -> Tensor:
    """Which of the `columns` are hidden from rows at `positions` [R, 1], both by position."""
    if window is not None and _is_narrower(window, kind):
        return (columns <= positions - window.tokens) & (columns >= window.sinks)
    assert kind.window is not None
    return columns <= positions - kind.window
