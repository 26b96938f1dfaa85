"""Runs an intermediate as in a chain: past tokens have the target's keys and values.

In a chain both share one cache, in which a pass of the target overwrites what the intermediate
wrote. A token's own key and value are always the intermediate's; those of earlier tokens are the
target's once the target has read them. Here it has read all of them.

#   B = rows, H = query heads, T = tokens, D = head dimension
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

_NAME = "polybasic_shared_cache"


class _Cache:
    """Keys and values [B, H, T, D] of one layer in the target's latest pass."""

    keys: Tensor
    values: Tensor


@contextmanager
def shared_cache(target: PreTrainedModel, model: PreTrainedModel) -> Iterator[None]:
    """Let each pass of `model` attend to the keys and values of the target's pass before it.

    Both passes must be over the same token ids, without padding and without a cache of their own.
    Gradients do not reach the target.

    Args:
        target: of the model's shape.
        model: the intermediate.
    """
    ordinary = [each.config._attn_implementation for each in (target, model)]
    for exact, rounded in zip(target.model.layers, model.model.layers, strict=True):
        cache = _Cache()
        exact.self_attn.writes_to, rounded.self_attn.reads_from = cache, cache
        exact.self_attn.reads_from = None
    for each in (target, model):
        each.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        for each, name in zip((target, model), ordinary, strict=True):
            each.set_attn_implementation(name)
        for exact, rounded in zip(target.model.layers, model.model.layers, strict=True):
            del exact.self_attn.writes_to, exact.self_attn.reads_from
            del rounded.self_attn.reads_from


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; query [B, H, T, D], key and value with fewer heads."""
    num_queries = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(num_queries, dim=1) for each in (key, value))
    cache: _Cache | None = module.reads_from
    if cache is None:
        module.writes_to.keys, module.writes_to.values = keys.detach(), values.detach()
        past_keys, past_values = keys, values
    else:
        past_keys, past_values = cache.keys, cache.values
    num_tokens = query.shape[2]
    is_own = torch.eye(num_tokens, dtype=torch.bool, device=query.device)
    own_scores = (query * keys).sum(dim=3, keepdim=True)
    scores = torch.where(is_own, own_scores, query @ past_keys.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if attention_mask is None:
        attention_mask = torch.ones_like(is_own).tril()
    weights = scores.masked_fill(~attention_mask, -torch.inf).softmax(dim=-1)
    own_weights = weights.diagonal(dim1=2, dim2=3).unsqueeze(3)
    mixed = weights.masked_fill(is_own, 0) @ past_values + own_weights * values
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, sdpa_mask)
