"""Warping, draws, walks and block verification, none of which reads a number on the host.

The counterpart of warping, sampling, tree and verification in `polybasic.deploy.rounds`: the same
distributions, as functions of given uniform numbers. Equal numbers give equal results, on a GPU
too.

#   R = rows, V = vocabulary, T = most tokens of a walk, S = stop tokens
#   B = most tokens of a block
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.kernels.torch.operations import Operations
from polybasic.chain.kernels.torch.trees import DeviceTree, Walk
from polybasic.deploy.rounds.warping import Sampling

_TORCH = Operations()


@dataclass(frozen=True)
class Warping:
    """Which sampling settings are on: the part of them that a captured round depends on.

    Rounds of equal warpings differ only in the values that `values_of` returns.

    Attributes:
        max_top_k: the most tokens that top-k keeps, a power of two; None if it is off.
        has_top_p: whether top-p is on.
        has_min_p: whether min-p is on.
    """

    NUM_VALUES: ClassVar = 4

    max_top_k: int | None = None
    has_top_p: bool = False
    has_min_p: bool = False

    @classmethod
    def of(cls, sampling: Sampling) -> "Warping":
        """The warping of settings with a temperature above 0."""
        assert not sampling.is_greedy, "greedy draws are the argmax"
        return cls(
            1 << (sampling.top_k - 1).bit_length() if sampling.top_k else None,
            sampling.top_p is not None and sampling.top_p < 1,
            bool(sampling.min_p),
        )

    @staticmethod
    def values_of(sampling: Sampling) -> list[float]:
        """Temperature, top-k, top-p and min-p; 0 for those that are not set."""
        values = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        return [float(value or 0) for value in values]


def probabilities(logits: Tensor, warping: Warping, values: Tensor) -> Tensor:
    """Probabilities [R, V] in float32, as `polybasic.deploy.rounds.warping.warp` without penalties.

    Args:
        logits: [R, V].
        values: float32 [NUM_VALUES] on the device, as `Warping.values_of` orders them.
    """
    temperature, top_k, top_p, min_p = values.unbind()
    logits = logits.float() / temperature
    if warping.max_top_k is not None and warping.max_top_k // 2 < logits.shape[1]:
        best = logits.topk(min(warping.max_top_k, logits.shape[1])).values
        last = (top_k.long() - 1).clamp(max=best.shape[1] - 1)
        threshold = best.index_select(1, last)
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    found = logits.softmax(-1)
    if warping.has_top_p:
        ordered, order = found.sort(dim=-1, descending=True, stable=True)
        is_beyond = ordered.cumsum(-1) - ordered >= top_p
        found = _without(found, torch.zeros_like(is_beyond).scatter(-1, order, is_beyond))
    if warping.has_min_p:
        found = _without(found, found < min_p * found.amax(-1, keepdim=True))
    return found


def draw(probabilities: Tensor, uniforms: Tensor, operations: Operations = _TORCH) -> Tensor:
    """One token from each row by inversion, int64 [R]; none of probability 0.

    Args:
        probabilities: float32 [R, V]; rows need not be normalised.
        uniforms: float32 [R], from 0 to 1 (excluded).
    """
    return operations.draw(probabilities, uniforms)


def walk(
    tree: DeviceTree,
    drawn: Tensor,
    limit: Tensor,
    stop_tokens: Tensor,
    max_tokens: int,
    operations: Operations = _TORCH,
) -> Walk:
    """Walk from the root by sampling, as `polybasic.chain.kernels.drafts.walk`.

    Args:
        tree: some rows may be padding, with the token -1.
        drawn: int64 [R], the token drawn from the verifier's distribution after each row.
        limit: int64 [], the most tokens to gain; at least 1.
        stop_tokens: int64 [S]; the walk ends with the first of them. May be empty.
        max_tokens: T, more than the maximum depth of the tree.
    """
    return operations.walk(tree, drawn, limit, stop_tokens, max_tokens)


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
        rule: "block" or "token", see `polybasic.deploy.rounds.verification`.
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


def _without(found: Tensor, dropped: Tensor) -> Tensor:
    kept = found.masked_fill(dropped, 0.0)
    return kept / kept.sum(-1, keepdim=True)


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
