"""How the rows of one pass look at the cache: positions, ancestors, windows.

#   R = rows (tokens of one pass), S = rows in the cache, T = S + R
#   G = query heads that read one key/value head, H = head size
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.config import DecoderConfig
from polybasic.chain.rotary import RotaryTable, Rotation


@dataclass
class View:
    """How the layers of one kind look at the cache.

    Attributes:
        rotation: cosines and sines of the rows' positions, each [R, 1, H].
        mask: [R * G, T - first] added to the scores (0 or -inf), each row repeated for its G query
            heads; None where every row sees all of these columns.
        first: first row of the cache that is seen.
        is_prompt: an empty cache, read from left to right. The mask is then [R, T], None for all
            that came before.
    """

    rotation: Rotation
    mask: Tensor | None = None
    first: int = 0
    is_prompt: bool = False


class Attending(Protocol):
    """What looks at a cache: a `Decoder` or an `EagleHead`."""

    config: DecoderConfig
    rotary: RotaryTable


@dataclass(frozen=True)
class Attend:
    """How the rows of one pass look at the cache.

    Attributes:
        start: first row of the cache that the pass writes.
        num_rows: R.
        prefix: leading rows of the cache that all rows of the pass see, each at the position of
            its number, but for what a window hides.
        paths: for each row of the pass, the rows of the cache behind the prefix that it sees, by
            position, itself last; None where the rows are consecutive tokens behind the prefix,
            which is then `start`.
        prepared: views that were made ahead, for `views_of`.
    """

    start: int
    num_rows: int
    prefix: int
    paths: Sequence[Sequence[int]] | None = None
    prepared: list[View] | None = None

    def positions(self) -> list[int]:
        """The position of each row."""
        if self.paths is None:
            return list(range(self.start, self.start + self.num_rows))
        return [self.prefix + len(path) - 1 for path in self.paths]

    def views_of(self, model: Attending) -> list[View]:
        """How each kind of the model's layers looks at the cache."""
        if self.prepared is not None:
            return self.prepared
        return _tree_views(model, self) if self.paths is not None else _causal_views(model, self)


def attend_causally(start: int, rows: int) -> Attend:
    """`rows` consecutive tokens behind `start` cached ones."""
    return Attend(start, rows, prefix=start)


def attend_to_ancestors(start: int, parents: Sequence[int]) -> Attend:
    """Rows of a tree behind `start` cached tokens, all of which they see.

    Args:
        parents: of each row, the row that it hangs below, before it; -1 for none.
    """
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        above = paths[parent] if parent >= 0 else []
        paths.append([*above, start + row])
    return Attend(start, len(paths), prefix=start, paths=paths)


def _causal_views(model: Attending, attend: Attend) -> list[View]:
    start, rows = attend.start, attend.num_rows
    kinds, rotations = model.config.kinds, model.rotary.between(start, start + rows)
    if rows == 1:
        return [
            View(rotation, first=kind.first_seen(start))
            for kind, rotation in zip(kinds, rotations, strict=True)
        ]
    is_prompt = start == 0 and model.config.attention_softcap is None
    if is_prompt and all(kind.window is None or rows <= kind.window for kind in kinds):
        return [View(rotation, is_prompt=True) for rotation in rotations]
    cos = rotations[0][0]
    positions = torch.arange(start, start + rows, device=cos.device)
    future = cos.new_full((rows, rows), float("-inf")).triu_(1)
    return _views(model, start, rotations, positions, future, is_prompt)


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
    return _views(model, start, rotations, positions.to(cos.device), among_rows)


def _views(
    model: Attending,
    start: int,
    rotations: list[Rotation],
    positions: Tensor,
    among_rows: Tensor,
    is_prompt: bool = False,
) -> list[View]:
    groups = 1 if is_prompt else model.config.query_groups
    views = []
    for kind, rotation in zip(model.config.kinds, rotations, strict=True):
        first = kind.first_seen(start)
        # the rows among which all is visible, but for the window
        mask = F.pad(among_rows, (start - first, 0))
        if kind.window is not None and start + len(positions) > kind.window:
            cached = torch.arange(first, start, device=positions.device)
            columns = torch.cat([cached, positions])
            mask = mask.masked_fill(columns <= positions[:, None] - kind.window, float("-inf"))
        if groups > 1:
            mask = mask.repeat_interleave(groups, 0)
        views.append(View(rotation, mask, first, is_prompt))
    return views
