"""What many sequences draw from: found together, so that a device is waited for once a pass.

#   R = rows (tokens of one pass), V = vocabulary
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polybasic.deploy.runtime.rounds.noise import noise_together
from polybasic.deploy.runtime.rounds.sampling import (
    GreedyRows,
    GreedySampler,
    Sampler,
    most_probable,
    probabilities_of,
)
from polybasic.deploy.runtime.rounds.warping import Prefixes, Warping

_MOST_WARPED = 1 << 24
"""Logits that are warped at once, since top-p takes fifty bytes for each."""


class Draws(NamedTuple):
    """Who draws from the logits of a pass, and the tokens before each draw."""

    sampler: Sampler
    prefixes: Prefixes

    def distributions(self, logits: Any) -> Callable[[], Any]:
        """Gives the sampler's distributions of logits [R, V], or raises what finding them does."""
        return partial(self.sampler.distributions, logits, self.prefixes)


def distributions_together(
    draws: Sequence[Draws | None], logits: Sequence[Any]
) -> list[Callable[[], Any] | None]:
    """As `Draws.distributions` of each one's logits; where nobody draws, None.

    Where a device is waited for, greedy samplers find their tokens at once, and so do coupled ones
    of equal warpings, as far as they have neither penalties nor grammars.
    """
    found = [draw and draw.distributions(rows) for draw, rows in zip(draws, logits, strict=True)]
    groups = defaultdict[tuple[Warping | None, int], list[int]](list)
    num_warped = 0
    for place, (draw, rows) in enumerate(zip(draws, logits, strict=True)):
        if draw and is_waited_for(rows.device) and isinstance(draw.sampler, GreedySampler):
            sampling = draw.sampler.sampling
            if draw.sampler.reads_prefixes:
                continue
            if sampling.is_greedy:
                groups[None, 0].append(place)
            else:
                num_warped += rows.numel()
                groups[Warping.of(sampling), num_warped // _MOST_WARPED].append(place)
    for (warping, _), places in groups.items():
        parts = [logits[place] for place in places]
        scores = torch.cat(parts)
        if warping is not None:
            scores = _with_noise(warping, [draws[place] for place in places], scores)
            parts = scores.split([len(part) for part in parts])
        tokens = iter(most_probable(scores))
        for place, rows in zip(places, parts, strict=True):
            drawn = list(islice(tokens, len(rows)))
            found[place] = partial(GreedyRows, drawn, partial(probabilities_of, rows))
    return found


def _with_noise(warping: Warping, draws: list[Any], logits: Tensor) -> Tensor:
    """The scores [R, V] of coupled samplers, see `CoupledSampler.distributions`."""
    rows = [draw.sampler for draw in draws for _ in draw.prefixes.suffixes]
    values = [Warping.values_of(sampler.sampling) for sampler in rows]
    scores = warping.truncated(logits, torch.tensor(values, device=logits.device))
    positions = [position for draw in draws for position in draw.prefixes.positions]
    return noise_together([sampler.noise for sampler in rows], positions).add_(scores)


def is_waited_for(device: torch.device) -> bool:
    """Whether the host waits when it reads what the device has computed."""
    return device.type != "cpu"
