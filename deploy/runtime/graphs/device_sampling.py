"""Block verification that reads no number on the host.

The counterpart of `polybasic.deploy.runtime.rounds.verification`: the same distributions, as
functions of given uniform numbers. Equal numbers give equal results, on a GPU too.

#   V = vocabulary, B = most tokens of a block
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.kernels.torch.operations import Operations

_TORCH = Operations()


def verify(
    tokens: Tensor,
    num_tokens: Tensor,
    p: Tensor,
    q: Tensor,
    uniforms: Tensor,
    rule: str,
    operations: Operations = _TORCH,
) -> tuple[Tensor, Tensor]:
    """How many tokens of a block are kept, and the token after them: both int64 [].

    Args:
        tokens: int64 [B], drawn from the rows of q.
        num_tokens: int64 [], of the block; later entries of `tokens` and `q`, and rows of `p` after
            one more, are ignored.
        p: float32 [B + 1 or more, V], the verifier's probabilities for each token of the block and
            for the token after its last.
        q: float32 [B, V].
        uniforms: float32 [B + 1], from 0 to 1 (excluded).
        rule: "block" or "token", see `polybasic.deploy.runtime.rounds.verification`.
    """
    size = len(tokens)
    places = torch.arange(size, device=tokens.device)
    is_token = places < num_tokens
    columns = torch.where(is_token, tokens, 0)[:, None]
    ratios = (p[:size].gather(1, columns) / q.gather(1, columns))[:, 0]
    if rule == "token":
        weights = p.new_ones(size + 1)
        num_kept = _num_leading(is_token & (uniforms[:size] < ratios))
    else:
        assert rule == "block", rule
        weights = _block_weights(ratios)
        acceptance = _block_acceptance(p, q, weights, num_tokens)
        happened = is_token & (uniforms[:size] < acceptance)
        num_kept = torch.where(happened, places + 1, 0).amax()
    p_row = p.index_select(0, num_kept)
    q_row = q.index_select(0, num_kept.clamp(max=size - 1))
    positive = (weights.index_select(0, num_kept) * p_row - q_row).clamp(min=0)
    is_cut = (num_kept < num_tokens) & (positive.sum() > 0)
    following = torch.where(is_cut, positive, p_row)
    return num_kept, operations.draw(following, uniforms[size : size + 1]).squeeze(0)


def verify_greedy(tokens: Tensor, num_tokens: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """As `verify`, for greedy draws.

    Args:
        tokens: int64 [B].
        num_tokens: int64 [], of the block.
        own: int64 [B + 1 or more], the verifier's tokens.
    """
    places = torch.arange(len(tokens), device=tokens.device)
    num_kept = _num_leading((tokens == own[: len(tokens)]) & (places < num_tokens))
    return num_kept, own.index_select(0, num_kept).squeeze(0)


def _num_leading(is_kept: Tensor) -> Tensor:
    """Number of leading true entries of [B], int64 []."""
    return is_kept.long().cumprod(0).sum()


def _block_weights(ratios: Tensor) -> Tensor:
    """w_0..w_B float32: w_0 = 1, w_i = min(w_(i-1) * ratio_i, 1), for ratios [B].

    This is exp(S_i - max(S_0, .., S_i)), where S is the running sum of logarithms, in float64.
    """
    logarithms = F.pad(ratios.double().log(), (1, 0))
    places = torch.arange(len(logarithms), device=ratios.device)
    is_before = places <= places[:, None]
    sums = torch.where(is_before, logarithms, 0.0).sum(1)
    highest = torch.where(is_before, sums, float("-inf")).amax(1)
    return (sums - highest).exp().float()


def _block_acceptance(p: Tensor, q: Tensor, weights: Tensor, num_tokens: Tensor) -> Tensor:
    """h_1..h_B [B]; only those up to h_num_tokens are defined."""
    own = weights[1:]
    excess = (own[:-1, None] * p[1 : len(q)] - q[1:]).clamp(min=0).sum(1)
    total = excess + 1 - own[:-1]
    inner = F.pad(torch.where(total > 0, excess / total, 0), (0, 1))
    lengths = torch.arange(1, len(own) + 1, device=own.device)
    return torch.where(lengths == num_tokens, own, inner)
