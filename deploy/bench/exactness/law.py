"""Whether sampled answers were drawn from the target's distribution.

Each token of an answer is placed in the distribution that the target gives for it, after the tokens
before it: with the vocabulary in order of falling probability, at a random point of the token's own
part of the line from 0 to 1 (the randomized probability integral transform). Whatever the contexts
are, the places of draws from the target are independent and uniform. Pearson's chi-square compares
them with equal counts in 20 cells.

At a significance of 1e-4, wrong places are found with a probability of 0.99 if their total
variation distance from uniform ones is at least 0.055 and there are 6,000 tokens, 0.03 and 20,000,
or 0.0175 and 60,000 (`tests/deploy/bench/test_law_check.py`). What is not seen: wrong draws whose
places even out over the contexts, and those that exchange tokens of the same probability.

#   T = tokens of an answer, V = vocabulary
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from polybasic.deploy.bench.bootstrap import Array
from polybasic.deploy.bench.exactness.rereading import ReadPattern, answer_logits
from polybasic.deploy.bench.schema import LawCheck
from polybasic.deploy.runtime.rounds.verifier import Verifier
from polybasic.deploy.runtime.rounds.warping import Prefixes, Sampling, warp

NUM_CELLS = 20
LEAST_TOKENS = 5 * NUM_CELLS
"""Below, counts of cells are too small for a chi-square."""
_PATTERN = ReadPattern(64)
"""How answers are read: rounding moves a place by little, so that large passes serve."""


def check_law(
    verifier: Verifier,
    sampling: Sampling,
    answers: Iterable[tuple[list[int], list[int]]],
    seed: int = 0,
) -> LawCheck | None:
    """Test draws of any system against the target.

    Args:
        verifier: the target.
        sampling: with which the answers were drawn, at a temperature above 0.
        answers: prompts and new tokens. Draws of one must not be those of another: each has a seed
            of its own, and a repeat with the same seed is no further answer.
        seed: of the points within the tokens' parts.

    Returns:
        With a p-value of 0 if the target cannot have drawn a token, because truncation drops it.
        None of fewer than `LEAST_TOKENS` tokens.
    """
    generator = np.random.default_rng(seed)
    found = [
        places(warped_rows(verifier, sampling, prompt, answer), answer, generator)
        for prompt, answer in answers
        if answer
    ]
    return law_of(np.concatenate(found)) if found else None


def law_of(found: Array) -> LawCheck | None:
    """Compare places with uniform ones; NaN is an impossible one."""
    if len(found) < LEAST_TOKENS:
        return None
    possible = found[~np.isnan(found)]
    counts = np.bincount((possible * NUM_CELLS).astype(int).clip(0, NUM_CELLS - 1), None, NUM_CELLS)
    expected = len(found) / NUM_CELLS
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    half_freedom = torch.tensor((NUM_CELLS - 1) / 2, dtype=torch.float64)
    tail = torch.special.gammaincc(half_freedom, torch.tensor(chi_square / 2, dtype=torch.float64))
    return LawCheck(
        tokens=len(found),
        cells=NUM_CELLS,
        chi_square=chi_square,
        p_value=float(tail) if len(possible) == len(found) else 0.0,
    )


@torch.inference_mode()
def warped_rows(
    verifier: Verifier, sampling: Sampling, prompt: list[int], answer: list[int]
) -> Tensor:
    """Probabilities [T, V] that the target draws each token of an answer from."""
    logits = answer_logits(verifier, prompt, answer, _PATTERN)
    prefixes = Prefixes(prompt, [answer[:place] for place in range(len(answer))])
    return warp(logits, sampling, prefixes, len(prompt))


def places(rows: Tensor, tokens: list[int], generator: np.random.Generator) -> Array:
    """Where each token lies in its row of probabilities [T, V], 0 to 1; NaN if it cannot be."""
    rows = rows.double().cpu()
    rows /= rows.sum(-1, keepdim=True)
    drawn = torch.tensor(tokens)[:, None]
    own = rows.gather(1, drawn)
    # of tokens of the same probability, the smaller id comes first
    is_before = (rows > own) | ((rows == own) & (torch.arange(rows.shape[1]) < drawn))
    before = (rows * is_before).sum(-1).numpy()
    width = own[:, 0].numpy()
    found: Array = before + generator.random(len(tokens)) * width
    return np.where(width > 0, found, np.nan)
