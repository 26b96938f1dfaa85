"""Drafts by models that are two functions, as the executors expand theirs."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from polybasic.chain.kernels.drafts import Candidates
from polybasic.chain.kernels.torch.expansion import Level, expand, expansion
from polybasic.chain.kernels.torch.operations import Operations
from polybasic.chain.kernels.torch.rows import DeviceRows

Forward = Callable[[Tensor, Tensor, DeviceRows], Tensor]
"""Tokens [K], the states [K, D] of their parents, and how they attend to the cache -> the tokens'
own states [K, D]."""


def expanded(
    forward: Forward,
    logits: Callable[[Tensor, int], Tensor],
    operations: Operations,
    state: Tensor,
    *given: Any,
    **named: Any,
) -> Candidates:
    """All candidates after a state.

    Args:
        logits: states and their level, from 0 -> logits [rows, V].
        given, named: what `expansion` takes after the state.
    """

    def run(levels: Sequence[Level]) -> list[tuple[Tensor, Tensor]]:
        [level] = levels
        states = forward(level.tokens, level.states, level.rows)
        return [(states, logits(states, level.number + 1))]

    work = expansion(logits(state, 0), operations, state, *given, **named)
    return expand([work], run)[0]
