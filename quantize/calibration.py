"""Calibration samples of one length, cut from token-id rows of any length."""

import random
from collections.abc import Sequence

from polybasic.chain.base.errors import UserError


def calibration_samples(
    encoded: Sequence[Sequence[int]], num_samples: int, num_tokens: int, seed: int
) -> list[list[int]]:
    """Choose `num_samples` samples of exactly `num_tokens` token ids each.

    Rows are shuffled and joined. Of each row only the first `num_tokens` are taken at first, and
    what follows them only after all other rows, so that long rows do not crowd out the rest.

    Args:
        encoded: token-id rows, one for a conversation; empty ones count for nothing.
        num_samples: samples to return.
        num_tokens: length of each.
        seed: of the order; the same arguments give the same samples.

    Raises:
        UserError: the rows hold fewer than `num_samples` x `num_tokens` token ids.
    """
    needed = num_samples * num_tokens
    available = sum(map(len, encoded))
    if available < needed:
        raise UserError(
            "too little calibration data",
            f"{available} tokens in {len(encoded)} conversations, {needed} needed "
            f"({num_samples} samples of {num_tokens})",
            "give more conversations or lower quantize.num_calibration_samples",
        )
    shuffled = list(encoded)
    random.Random(seed).shuffle(shuffled)
    joined: list[int] = []
    start = 0
    while len(joined) < needed:
        for row in shuffled:
            joined.extend(row[start : start + num_tokens])
        start += num_tokens
    return [joined[first : first + num_tokens] for first in range(0, needed, num_tokens)]
