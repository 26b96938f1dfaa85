"""Whether two greedy outputs differ for a reason: rounding, or a fault."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polybasic.deploy.verifier import Verifier

BLOCK_ROWS = (4, 8, 16)
"""Row counts in which a position is computed again to measure its rounding."""


@dataclass
class Agreement:
    """Outputs of a system beside the target's, token for token."""

    prompts: int = 0
    identical: int = 0
    near_ties: int = 0

    def count(
        self, verifier: Verifier, prompt: list[int], expected: list[int], found: list[int]
    ) -> None:
        """Compare one output; `verifier` computes the logits where they part."""
        self.prompts += 1
        if found == expected:
            self.identical += 1
        elif is_near_tie(verifier, prompt, expected, found):
            self.near_ties += 1


def is_near_tie(
    verifier: Verifier, prompt: list[int], expected: list[int], found: list[int]
) -> bool:
    """Whether two outputs part at two tokens that the target's rounding cannot tell apart.

    Both candidates' logits must differ by less than the largest difference that any logit shows
    at this position when it is computed a token at a time and in blocks of several rows, which is
    how the two outputs came about.
    """
    common = 0
    while common < min(len(expected), len(found)) and expected[common] == found[common]:
        common += 1
    if common == min(len(expected), len(found)):
        return False
    prefix = prompt + expected[:common]
    one_by_one, in_blocks = position_logits(verifier, prefix)
    rounding = max(float((block - one_by_one).abs().max()) for block in in_blocks)
    gap = abs(float(one_by_one[expected[common]] - one_by_one[found[common]]))
    return gap < rounding


@torch.inference_mode()
def position_logits(verifier: Verifier, prefix: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Float32 logits [V] behind `prefix`: its end read token by token, and read in blocks."""
    num_last = min(max(BLOCK_ROWS), len(prefix))
    one_by_one = _last_logits(verifier, prefix, [1] * num_last)
    in_blocks = [_last_logits(verifier, prefix, [min(rows, len(prefix))]) for rows in BLOCK_ROWS]
    return one_by_one, in_blocks


def _last_logits(verifier: Verifier, prefix: list[int], pass_rows: list[int]) -> Tensor:
    """Logits behind `prefix`, whose last rows are read in passes of these sizes."""
    verifier.cache.truncate(0)
    first = len(prefix) - sum(pass_rows)
    for rows in [first, *pass_rows] if first else pass_rows:
        begin = verifier.cache.length
        states = verifier.read(prefix[begin : begin + rows])
        verifier.cache.keep(range(rows))
    return verifier.logits(states[-1:])[0].float()
