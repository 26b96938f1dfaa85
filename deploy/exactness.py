"""Whether two greedy outputs differ for a reason: rounding, or a fault."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from polybasic.deploy.verifier import Verifier

BLOCK_ROWS = (4, 8, 16)
"""Row counts in which an answer is computed again to measure its rounding."""

OtherWay = Callable[[list[int]], Tensor]
"""Token ids -> float32 logits [V] behind them, computed in some other way."""


@dataclass
class Agreement:
    """Outputs of a system beside the target's, token for token."""

    prompts: int = 0
    identical: int = 0
    near_ties: int = 0

    def count(
        self,
        verifier: Verifier,
        prompt: list[int],
        expected: list[int],
        found: list[int],
        other_way: OtherWay | None = None,
    ) -> None:
        """Compare one output; `verifier` computes the logits where they part.

        Args:
            other_way: how the system computes logits, where it is not the verifier's way.
        """
        self.prompts += 1
        if found == expected:
            self.identical += 1
        elif is_near_tie(verifier, prompt, expected, found, other_way):
            self.near_ties += 1


def is_near_tie(
    verifier: Verifier,
    prompt: list[int],
    expected: list[int],
    found: list[int],
    other_way: OtherWay | None = None,
) -> bool:
    """Whether two outputs part at two tokens that the target's rounding cannot tell apart.

    The candidates' logits must differ by less than the measured rounding of such a difference:
    the largest change that the difference of any two logits shows at this position between the
    ways of computing it, a token at a time and in blocks of several rows.
    """
    common = 0
    while common < min(len(expected), len(found)) and expected[common] == found[common]:
        common += 1
    if common == min(len(expected), len(found)):
        return False
    answer = expected[:common]
    one_by_one = position_logits(verifier, prompt, answer, rows=1)
    ways = [position_logits(verifier, prompt, answer, rows) for rows in BLOCK_ROWS]
    if other_way is not None:
        ways.append(other_way(prompt + answer))
    rounding = max(spread(way - one_by_one) for way in ways)
    gap = abs(float(one_by_one[expected[common]] - one_by_one[found[common]]))
    return gap < rounding


def spread(shifts: Tensor) -> float:
    """By how much the difference of any two logits changes when they shift by `shifts` [V]."""
    return float(shifts.max() - shifts.min())


@torch.inference_mode()
def position_logits(verifier: Verifier, prompt: list[int], answer: list[int], rows: int) -> Tensor:
    """Float32 logits [V] behind prompt and answer, whose tokens are read `rows` at a time.

    As when answers are generated, the prompt is read in one pass but for its last token.
    """
    tokens = prompt + answer
    verifier.cache.truncate(0)
    ends = [len(prompt) - 1, *range(len(prompt) - 1 + rows, len(tokens), rows), len(tokens)]
    for end in ends:
        if end > verifier.cache.length:
            states = verifier.read(tokens[verifier.cache.length : end])
            verifier.cache.keep(range(len(states)))
    return verifier.logits(states[-1:])[0].float()
