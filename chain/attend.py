"""How the rows of one pass look at the cache: positions, masks, windows.

#   R = rows (tokens of one pass), S = rows in the cache, T = S + R
#   G = query heads that read one key/value head, H = head size
"""

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


@dataclass
class Attend:
    """How one pass looks at the cache.

    Attributes:
        start: rows already in the cache; the pass writes behind them.
        views: one for each of the model's kinds of layers.
    """

    start: int
    views: list[View]


class Attending(Protocol):
    """What `Attend` is made for: a `Decoder` or an `EagleHead`."""

    config: DecoderConfig
    rotary: RotaryTable


def attend_causally(model: Attending, start: int, rows: int) -> Attend:
    """`rows` consecutive tokens behind `start` cached ones."""
    kinds, rotations = model.config.kinds, model.rotary.between(start, start + rows)
    if rows == 1:
        views = [
            View(rotation, first=kind.first_seen(start))
            for kind, rotation in zip(kinds, rotations, strict=True)
        ]
        return Attend(start, views)
    is_prompt = start == 0 and model.config.attention_softcap is None
    if is_prompt and all(kind.window is None or rows <= kind.window for kind in kinds):
        return Attend(0, [View(rotation, is_prompt=True) for rotation in rotations])
    cos = rotations[0][0]
    positions = torch.arange(start, start + rows, device=cos.device)
    future = cos.new_full((rows, rows), float("-inf")).triu_(1)
    return Attend(start, _views(model, start, rotations, positions, future, is_prompt))


def attend_to_ancestors(
    model: Attending, start: int, positions: Tensor, among_rows: Tensor
) -> Attend:
    """Rows of a tree behind `start` cached tokens, of which they see what their windows reach.

    Args:
        positions: int64 [R], none before `start`.
        among_rows: [R, R], 0 where a row sees another (its ancestors and itself), else -inf.
    """
    rotations = model.rotary.at(positions)
    return Attend(start, _views(model, start, rotations, positions, among_rows))


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
