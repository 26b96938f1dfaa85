"""Verification of a block: how many of its tokens a stage keeps, and what it samples next.

The block's tokens x_1..x_K were sampled from known distributions q_1..q_K; p_1..p_K+1 are the
verifier's. Both rules keep a prefix and add one token so that the result follows p exactly:

- `token`: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.
- `block`: Sun et al., "Block Verification Accelerates Speculative Decoding", 2024; never keeps
  fewer tokens in expectation.

The functions work on any kind of number: float32 tensors when a chain runs, arrays of fractions
when the tests enumerate every outcome.
"""

from collections.abc import Callable
from typing import Any

Rows = Any
"""Probabilities [rows, vocabulary]: a float32 tensor or a NumPy array of fractions."""


def cut(
    tokens: list[int], p: Rows, q: Rows, rule: str, happens: Callable[[list[Any]], list[bool]]
) -> tuple[int, Any]:
    """How many tokens of a block are kept, and the distribution of the token after them.

    Args:
        tokens: x_1..x_K.
        p: K + 1 rows.
        q: K rows.
        rule: "block" or "token".
        happens: draws an independent event for each of some probabilities.
    """
    num_tokens, weight = len(tokens), 1
    if rule == "token":
        kept = (happens([probability])[0] for probability in token_acceptance(p, q, tokens))
        num_kept = next((number for number, is_kept in enumerate(kept) if not is_kept), num_tokens)
    else:
        weights = block_weights(p, q, tokens)
        happened = happens(block_acceptance(p, q, weights))
        num_kept = max((number for number, it_did in enumerate(happened, 1) if it_did), default=0)
        weight = weights[num_kept]
    if num_kept == num_tokens:
        return num_kept, p[num_kept]
    return num_kept, residual(p[num_kept], q[num_kept], weight)


def token_acceptance(p: Rows, q: Rows, tokens: list[int]) -> list[Any]:
    """Probability of keeping each token, given that those before it were kept."""
    at_p, at_q = _at(p, tokens), _at(q, tokens)
    return [min(1, p_x / q_x) for p_x, q_x in zip(at_p, at_q, strict=True)]


def block_weights(p: Rows, q: Rows, tokens: list[int]) -> list[Any]:
    """w_0..w_K: w_0 = 1, w_i = min(w_(i-1) p(x_i)/q(x_i), 1)."""
    weights: list[Any] = [1]
    for p_x, q_x in zip(_at(p, tokens), _at(q, tokens), strict=True):
        weights.append(min(weights[-1] * p_x / q_x, 1))
    return weights


def block_acceptance(p: Rows, q: Rows, weights: list[Any]) -> list[Any]:
    """h_1..h_K: the block is cut at the largest i whose own uniform number is at most h_i.

    For i < K, s_i = sum_y max(w_i p_(i+1)(y) - q_(i+1)(y), 0) and h_i = s_i / (s_i + 1 - w_i);
    h_K = w_K.
    """
    num_tokens = len(weights) - 1
    acceptance: list[Any] = []
    for i in range(1, num_tokens):
        excess = _number((weights[i] * p[i] - q[i]).clip(0).sum())
        total = excess + 1 - weights[i]
        acceptance.append(excess / total if total > 0 else 0)
    return acceptance + weights[num_tokens:] if num_tokens else []


def residual(p_row: Any, q_row: Any, weight: Any) -> Any:
    """Distribution of the token after a cut: the normalised positive part of weight * p - q.

    In floating point the positive part can vanish where p and q agree to the last bit. The cut then
    has probability zero, so any distribution is right, and p is used.
    """
    positive = (weight * p_row - q_row).clip(0)
    total = positive.sum()
    return positive / total if total > 0 else p_row


def _at(rows: Rows, tokens: list[int]) -> list[Any]:
    if not tokens:
        return []
    values = rows[list(range(len(tokens))), tokens]
    return list(values.tolist())


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
