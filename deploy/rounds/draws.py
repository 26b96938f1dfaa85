"""What many sequences draw from: found together, so that a device is waited for once a pass.

#   R = rows (tokens of one pass), V = vocabulary
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch

from polybasic.deploy.rounds.sampling import GreedyRows, Sampler, most_probable
from polybasic.deploy.rounds.warping import Prefixes


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

    A device that is waited for finds at once the most probable tokens of all samplers that draw
    these and have no penalty.
    """
    found = [one and one.distributions(rows) for one, rows in zip(draws, logits, strict=True)]
    plain = {
        place: rows
        for place, (one, rows) in enumerate(zip(draws, logits, strict=True))
        if one and is_waited_for(rows.device) and not one.sampler.sampling.in_effect
    }
    if plain:
        tokens = iter(most_probable(torch.cat(list(plain.values()))))
        for place, rows in plain.items():
            found[place] = partial(GreedyRows, list(islice(tokens, len(rows))), rows)
    return found


def is_waited_for(device: torch.device) -> bool:
    """Whether the host waits when it reads what the device has computed."""
    return device.type != "cpu"
