"""Attention of a pass by PyTorch's own fused kernels, which benchmarks compare ours with.

#   R = rows (tokens of one pass), K = key/value heads, G = query heads that read one of them
#   H = head size
"""

import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.kernels.torch.operations import Heads, Operations, seen
from polybasic.chain.kernels.torch.rotary import Rotation
from polybasic.chain.kernels.torch.rows import DeviceRows, Span


def sdpa_attention(
    qkv: Tensor,
    cache: Tensor,
    rows: DeviceRows,
    span: Span,
    heads: Heads,
    rotation: Rotation,
    num_columns: int | None = None,
) -> Tensor:
    """`Operations.attention` by `scaled_dot_product_attention` with a mask; no softcap.

    Args:
        num_columns: leading rows of the cache that are read, the pass's own among them; None for
            all. A host number: a captured graph serves no longer cache.
    """
    assert heads.softcap is None, "scaled_dot_product_attention caps no scores"
    queries = Operations().write_rows(qkv, cache, rows, heads, rotation)
    columns = cache.shape[1] if num_columns is None else num_columns
    keys, values = cache[:, :columns].split(heads.num_kv_heads)
    attended = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys[None],
        values[None],
        seen(rows, span, columns),
        scale=heads.scale,
        enable_gqa=heads.query_groups > 1,
    )
    return attended[0].transpose(0, 1).flatten(1)
