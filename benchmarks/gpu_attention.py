"""Attention of few rows over a long cache: the runtime's, PyTorch's fused one, flex attention.

Each reads the caches of all layers of a loaded model one after the other, as a pass does: they come
from memory. The runtime's rotates the rows and writes them into the cache, too, and reads the
length on the device. The others are given rotated queries and written rows, and are told the length
on the host: what they take in a runtime is more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_budget import Allowance
from gpu_clock import captured, device_seconds
from gpu_names import FLEX, RUNTIME, SDPA
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from polybasic.chain.kernels.torch.operations import Heads
from polybasic.chain.kernels.torch.rows import causal_rows
from polybasic.chain.model.device_model import DeviceModel
from polybasic.deploy.graphs.capture import Graphs
from polybasic.deploy.rounds.cache import KeyValueCache

FLEX_SECONDS = 25.0
"""That compiling it for one shape takes."""
SECONDS = 1.5

Attend = Callable[[Tensor], Tensor]
"""The cache of a layer, [2K, capacity, H] -> what the rows attend to."""


@dataclass(frozen=True)
class AttentionSettings:
    """What is measured; flex attention over the last number of rows alone."""

    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    repeats: int
    turns: int


@torch.inference_mode()
def measure_attention(
    model: DeviceModel,
    cache: KeyValueCache,
    settings: AttentionSettings,
    bandwidth: float,
    found: dict[str, Any],
    allowance: Allowance,
) -> None:
    """Time attention over one layer's cache, by context, rows and kernel.

    Args:
        bandwidth: bytes a second, by which bounds are computed.
        found: context -> rows -> kernel -> microseconds; filled on the way.
    """
    graphs = Graphs(cache.block.device, most=4)
    variants: dict[str, Callable[..., Attend]] = {RUNTIME: runtime, SDPA: sdpa}
    cases = [
        (context, rows, name, make)
        for context in settings.contexts
        for rows in settings.rows
        for name, make in variants.items()
    ]
    cases += [(context, settings.rows[-1], FLEX, flex) for context in settings.contexts]
    for context, rows, name, make in cases:
        what = f"{name}, {rows} rows behind {context}"
        if not allowance.allows(what, FLEX_SECONDS if name == FLEX else SECONDS):
            continue
        with allowance.trying(what):
            attend = make(model, cache, context, rows)
            run = captured(graphs, (name, context, rows), partial(_over_all, attend, cache))
            taken = device_seconds({name: run}, settings.turns, settings.repeats, graphs.device)
            each = taken[name].times(1e6 / len(cache.layers))
            num_bytes = cache.block[0, :, : context + rows].nbytes
            found.setdefault(str(context), {}).setdefault(str(rows), {})[name] = {
                "microseconds": each.to_json(),
                "bytes": num_bytes,
                "times_bound": each.median * 1e-6 * bandwidth / num_bytes,
            }


def _over_all(attend: Attend, cache: KeyValueCache) -> None:
    for layer in cache.layers:
        attend(layer)


def runtime(model: DeviceModel, cache: KeyValueCache, context: int, rows: int) -> Attend:
    """The attention of the runtime's passes."""
    heads, device = model.parts.layers[0].heads, cache.block.device
    rotation = model.parts.rotary.tables[0]
    prefix = torch.tensor(context, device=device)
    num_heads = heads.num_kv_heads * (heads.query_groups + 2)
    qkv = torch.randn(rows, num_heads * heads.head_dim).to(cache.block)
    looking = causal_rows(prefix, rows)
    span = looking.span_of(model.parts.config.kinds[0])

    def attend(layer: Tensor) -> Tensor:
        return model.operations.attention(qkv, layer, looking, span, heads, rotation)

    return attend


def sdpa(model: DeviceModel, cache: KeyValueCache, context: int, rows: int) -> Attend:
    """PyTorch's fused attention with a mask; the queries of a key/value head are folded."""
    heads = model.parts.layers[0].heads
    K, G, H = heads.num_kv_heads, heads.query_groups, heads.head_dim
    queries = _queries(heads, cache, rows).view(1, K, G * rows, H)
    is_seen = _seen(context, rows, cache.block.device).repeat(G, 1)
    mask = torch.zeros_like(is_seen, dtype=cache.block.dtype).masked_fill_(~is_seen, float("-inf"))

    def attend(layer: Tensor) -> Tensor:
        keys, values = layer[None, :, : context + rows].split(K, 1)
        found = F.scaled_dot_product_attention(queries, keys, values, mask, scale=heads.scale)
        return found.view(1, K * G, rows, H)

    return attend


def flex(model: DeviceModel, cache: KeyValueCache, context: int, rows: int) -> Attend:
    """Flex attention over the blocks that rows see; compiled on a GPU."""
    heads, device = model.parts.layers[0].heads, cache.block.device
    queries = _queries(heads, cache, rows)
    is_seen = _seen(context, rows, device)

    def sees(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return is_seen[row, column]

    blocks = create_block_mask(sees, None, None, rows, context + rows, device=device.type)
    compute: Callable[..., Tensor] = flex_attention
    if device.type == "cuda":
        compute = torch.compile(flex_attention, dynamic=False)

    def attend(layer: Tensor) -> Tensor:
        keys, values = layer[None, :, : context + rows].split(heads.num_kv_heads, 1)
        is_grouped = heads.query_groups > 1
        return compute(
            queries, keys, values, block_mask=blocks, scale=heads.scale, enable_gqa=is_grouped
        )

    return attend


def _queries(heads: Heads, cache: KeyValueCache, rows: int) -> Tensor:
    """[1, heads, rows, head size], the same at each call."""
    num_heads = heads.num_kv_heads * heads.query_groups
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(1, num_heads, rows, heads.head_dim, generator=generator).to(cache.block)


def _seen(context: int, rows: int, device: torch.device) -> Tensor:
    """Which columns each row sees, bool [rows, context + rows]."""
    return torch.ones(rows, context + rows, dtype=torch.bool, device=device).tril(context)
