"""`Operations.attention` in Triton: a few rows over a long cache, in one launch.

Each program reads one part of a key/value head's cache once, for all rows of the pass and all
queries of the head. The number of parts depends on the cache's length, which programs read on the
device; programs whose part is not needed exit at once. The first part also rotates the keys of the
pass, writes them into the cache, and attends to the provisional rows. The program that finishes
last combines the results of all parts of its head in a fixed order, so that they do not depend on
which program that is; if this is too much for one program, a second kernel does it.
"""

from dataclasses import dataclass, replace
from functools import cache as remembered

import torch
from torch import Tensor

from polybasic.chain.kernels.cuda.attention_kernels import attend, combine
from polybasic.chain.kernels.cuda.attention_plan import (
    MAX_TICKETS,
    NUM_WARPS,
    AttentionLayer,
    AttentionPlan,
    Gpu,
)
from polybasic.chain.kernels.cuda.products.launch import early_launch
from polybasic.chain.kernels.rotary import Rotation
from polybasic.chain.kernels.torch.operations import Heads
from polybasic.chain.kernels.torch.rows import DeviceRows, Span

LOG2_E = 1.4426950408889634


def attention(
    qkv: Tensor, cache: Tensor, rows: DeviceRows, span: Span, heads: Heads, rotation: Rotation
) -> Tensor:
    """See `Operations.attention`; scores are not rounded on their way to the softmax.

    Rows of the pass beyond the cache's capacity are not written, and the result of rows that see
    nothing is 0. All calls on a device share what the first one allocates, which must run outside
    of a graph; calls run one after another.
    """
    layer = AttentionLayer(heads.num_kv_heads, heads.query_groups, heads.head_dim, cache.shape[1])
    plan = AttentionPlan.of(_gpu(qkv.device), layer, len(qkv))
    return attention_by(plan, qkv, cache, rows, span, heads, rotation)


def attention_by(
    plan: AttentionPlan,
    qkv: Tensor,
    cache: Tensor,
    rows: DeviceRows,
    span: Span,
    heads: Heads,
    rotation: Rotation,
) -> Tensor:
    """As `attention`, with a given plan."""
    assert cache.is_contiguous()
    seen = Seen(rows.positions, span.visible, rows.prefix, rows.first, span.tokens, span.sinks)
    return _launched(plan, qkv, cache, seen, heads, rotation)


@dataclass(frozen=True)
class Seen:
    """What the rows of a pass see, as the kernel reads it; see `DeviceRows` and `Span`.

    Attributes:
        positions: int64 [R].
        visible: bool [R, P].
        prefix: int64 [], or [S] of several sequences.
        first: provisional rows before those of the pass.
        tokens, sinks: of a window.
        first_rows, counts: int64 [S], the first of each sequence's rows of the pass, and how many
            there are; None where all are of one.
    """

    positions: Tensor
    visible: Tensor
    prefix: Tensor
    first: int = 0
    tokens: int = 0
    sinks: int = 0
    first_rows: Tensor | None = None
    counts: Tensor | None = None


def joined_plan(
    device: torch.device, heads: Heads, capacity: int, num_rows: int, num_sequences: int
) -> AttentionPlan:
    """The division of `joined_attention` over as many rows of each of as many sequences."""
    layer = AttentionLayer(heads.num_kv_heads, heads.query_groups, heads.head_dim, capacity)
    # a second kernel takes one sequence
    return replace(AttentionPlan.of(_gpu(device), layer, num_rows, num_sequences), combines=True)


def joined_attention(
    plan: AttentionPlan,
    qkv: Tensor,
    addresses: Tensor,
    seen: Seen,
    heads: Heads,
    rotation: Rotation,
) -> Tensor:
    """Attention of rows of several sequences, whose caches only the device knows, in one launch.

    Rows that belong to no sequence are undefined.

    Args:
        plan: by `joined_plan`.
        qkv: as of `Operations.attention`, the rows of a sequence side by side.
        addresses: int64 [S], of each one's cache of the layer in memory, in the dtype of `qkv`.
    """
    return _launched(plan, qkv, addresses, seen, heads, rotation)


def _launched(
    plan: AttentionPlan, qkv: Tensor, cache: Tensor, seen: Seen, heads: Heads, rotation: Rotation
) -> Tensor:
    """Attention over a cache, or where `seen` has `counts` over those at addresses."""
    for tensor in (qkv, *rotation):
        assert tensor.is_contiguous()
    assert plan.num_units <= MAX_TICKETS, f"{plan.num_units} heads times tiles"
    layer, tickets = plan.layer, _tickets(qkv.device)
    out = qkv.new_empty(len(qkv), layer.num_kv_heads * layer.query_groups * layer.head_dim)
    partial = torch.empty(plan.num_partial, dtype=torch.float32, device=qkv.device)
    num_active = tickets if plan.combines else torch.empty_like(tickets[: plan.num_units])
    visible = seen.visible.view(torch.uint8)
    factor, softcap = heads.scale * LOG2_E, 0.0
    if heads.softcap is not None:
        factor, softcap = 2 * factor / heads.softcap, heads.softcap * LOG2_E
    query_norm, key_norm = heads.query_norm, heads.key_norm
    early = early_launch(qkv.device)
    with torch.cuda.device_of(qkv):
        attend[(plan.num_units, plan.parts)](
            qkv,
            cache,
            out,
            partial,
            num_active,
            tickets,
            *rotation,
            None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight,
            seen.positions,
            visible,
            seen.prefix,
            seen.first_rows,
            seen.counts,
            len(qkv),
            seen.first,
            layer.capacity,
            len(rotation[0]),
            plan.num_tiles,
            seen.positions.stride(0),
            *visible.stride(),
            seen.tokens,
            seen.sinks,
            factor,
            softcap,
            0.0 if query_norm is None else query_norm.eps,
            0.0 if key_norm is None else key_norm.eps,
            **plan.shape(),
            **plan.constants(),
            HAS_WINDOW=seen.tokens > 0,
            IS_CAPPED=heads.softcap is not None,
            IS_JOINED=seen.counts is not None,
            num_warps=NUM_WARPS,
            **early,
        )
    if not plan.combines:
        num_queries = len(qkv) * layer.query_groups
        with torch.cuda.device_of(qkv):
            combine[(num_queries, layer.num_kv_heads)](
                partial, num_active, out, **plan.shape(), **early
            )
    return out


@remembered
def _gpu(device: torch.device) -> Gpu:
    return Gpu.of(device)


@remembered
def _tickets(device: torch.device) -> Tensor:
    """Counters of the finished programs of a head, int32; all 0 between two launches."""
    if device.type == "cuda":
        is_captured = torch.cuda.is_current_stream_capturing()
        assert not is_captured, "attention must run once before it is captured"
    return torch.zeros(MAX_TICKETS, dtype=torch.int32, device=device)
