"""A lean decoder in the Llama family's layout: one sequence, a few rows a pass, a cache of keys
and values that the caller owns.

#   R = rows (tokens of one pass), S = rows in the cache, T = S + R, D = hidden size
#   K = key/value heads, G = query heads that read one of them, H = head size, V = vocabulary
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.config import DecoderConfig
from polybasic.chain.linear import Linear


class RotaryTable:
    """Cosines and signed sines of every position, in the compute dtype.

    Rotating x is x * cos + roll(x, H/2) * sin, with the sign of the rotated half kept in `sin`.
    """

    def __init__(
        self, config: DecoderConfig, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        inverse_frequency, scaling = _inverse_frequency(config)
        angle = torch.outer(torch.arange(num_positions).float(), inverse_frequency)
        sin, cos = angle.sin() * scaling, angle.cos() * scaling
        self.cos = torch.cat([cos, cos], -1).unsqueeze(1).to(device, dtype)  # [positions, 1, H]
        self.sin = torch.cat([-sin, sin], -1).unsqueeze(1).to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, 1, H] of `positions` [R]."""
        return self.cos[positions], self.sin[positions]

    def between(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [end - first, 1, H] of consecutive positions, without a copy."""
        return self.cos[first:end], self.sin[first:end]


@dataclass
class Attend:
    """How the rows of one pass look at the cache.

    Attributes:
        start: rows already in the cache; this pass writes behind them.
        rotary: cosines and sines of the rows' positions, each [R, 1, H].
        mask: [R * G, T] added to the scores (0 or -inf), each row repeated for its G query heads;
            None where every row sees all T, or where `is_causal` says the rest.
        is_causal: an empty cache, read from left to right (only with start 0).
    """

    start: int
    rotary: tuple[Tensor, Tensor]
    mask: Tensor | None = None
    is_causal: bool = False


class DecoderLayer:
    """One layer: attention over the cache, then the gated MLP; residuals around both.

    Args:
        input_norm: weight [D] of the norm before attention; an EAGLE head has none.
        qkv: D -> (K*G + K + K) * H, queries first, then keys, then values.
        gate_up: D -> 2 * intermediate size, gate first.
    """

    def __init__(
        self,
        config: DecoderConfig,
        input_norm: Tensor | None,
        qkv: Linear,
        out: Linear,
        mlp_norm: Tensor,
        gate_up: Linear,
        down: Linear,
    ) -> None:
        self.config = config
        self.input_norm, self.mlp_norm = input_norm, mlp_norm
        self.qkv, self.out, self.gate_up, self.down = qkv, out, gate_up, down
        self.num_kv_heads, self.query_groups = config.num_kv_heads, config.query_groups
        self.head_dim = config.head_dim
        self.num_rotated = config.num_heads + config.num_kv_heads

    def forward(self, x_RD: Tensor, cache: Tensor, attend: Attend) -> Tensor:
        """Read `x_RD` and write its keys and values into `cache` [2K, capacity, H]."""
        normed = x_RD if self.input_norm is None else self.norm(x_RD, self.input_norm)
        x_RD = x_RD + self.out(self._attention(normed, cache, attend))
        gate, up = self.gate_up(self.norm(x_RD, self.mlp_norm)).chunk(2, -1)
        return x_RD + self.down(F.silu(gate).mul_(up))

    def norm(self, x_RD: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm."""
        return F.rms_norm(x_RD, weight.shape, weight, self.config.rms_norm_eps)

    def _attention(self, x_RD: Tensor, cache: Tensor, attend: Attend) -> Tensor:
        rows, end = x_RD.shape[0], attend.start + x_RD.shape[0]
        K, G, H = self.num_kv_heads, self.query_groups, self.head_dim
        qkv = self.qkv(x_RD).view(rows, -1, H)
        cos, sin = attend.rotary
        rotated = qkv[:, : self.num_rotated]
        rotated = (rotated * cos).addcmul_(rotated.roll(H // 2, -1), sin)
        cache[:K, attend.start : end].copy_(rotated[:, K * G :].transpose(0, 1))
        cache[K:, attend.start : end].copy_(qkv[:, self.num_rotated :].transpose(0, 1))
        queries = rotated[:, : K * G].view(rows, K, G, H)
        if attend.is_causal:
            attended = F.scaled_dot_product_attention(
                queries.reshape(rows, K * G, H).transpose(0, 1)[None],
                cache[None, :K, :end],
                cache[None, K:, :end],
                is_causal=True,
                enable_gqa=G > 1,
            )
            return attended[0].transpose(0, 1).reshape(rows, -1)
        # Rows and query groups are folded into one dimension: each key/value head is read once.
        attended = F.scaled_dot_product_attention(
            queries.transpose(0, 1).reshape(1, K, rows * G, H),
            cache[None, :K, :end],
            cache[None, K:, :end],
            attn_mask=attend.mask,
        )
        return attended.view(K, rows, G, H).transpose(0, 1).reshape(rows, -1)


class Decoder:
    """Embedding, layers, final norm and output projection of one checkpoint.

    Args:
        embedding: [V, D] in the compute dtype.
        final_norm: [D].
        lm_head: D -> V.
    """

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Tensor,
        layers: list[DecoderLayer],
        final_norm: Tensor,
        lm_head: Linear,
        rotary: RotaryTable,
    ) -> None:
        self.config, self.rotary = config, rotary
        self.embedding, self.layers, self.final_norm = embedding, layers, final_norm
        self.lm_head = lm_head

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """Layers, key/value heads, head size and width of the states.

        Decoders that agree in it can share a cache, and one's states serve a head of the other.
        """
        config = self.config
        return config.num_layers, config.num_kv_heads, config.head_dim, config.hidden_size

    def forward(self, token_ids: Tensor, cache: list[Tensor], attend: Attend) -> Tensor:
        """States [R, D] after the final norm: what the output projection and a draft head read.

        Args:
            token_ids: int64 [R].
            cache: one [2K, capacity, H] a layer, keys first; rows start..T are written.
        """
        x_RD = F.embedding(token_ids, self.embedding)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x_RD = layer.forward(x_RD, layer_cache, attend)
        return F.rms_norm(x_RD, self.final_norm.shape, self.final_norm, self.config.rms_norm_eps)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [R, V] of `states` [R, D]."""
        return self.lm_head(states)


class Attending(Protocol):
    """What `Attend` is made for: a `Decoder` or an `EagleHead`."""

    config: DecoderConfig
    rotary: RotaryTable


def attend_causally(model: Attending, start: int, rows: int) -> Attend:
    """`rows` consecutive tokens behind `start` cached ones."""
    rotary = model.rotary.between(start, start + rows)
    if rows == 1:
        return Attend(start, rotary)
    if start == 0:
        return Attend(start, rotary, is_causal=True)
    cos = rotary[0]
    future = torch.full((rows, rows), float("-inf"), dtype=cos.dtype, device=cos.device).triu_(1)
    return Attend(start, rotary, folded_mask(future, start, model.config.query_groups))


def attend_to_ancestors(
    model: Attending, start: int, positions: Tensor, among_rows: Tensor
) -> Attend:
    """Rows of a tree behind `start` cached tokens, all of which they see.

    Args:
        positions: int64 [R].
        among_rows: [R, R], 0 where a row sees another (its ancestors and itself), else -inf.
    """
    mask = folded_mask(among_rows, start, model.config.query_groups)
    return Attend(start, model.rotary.at(positions), mask)


def folded_mask(among_rows: Tensor, start: int, query_groups: int) -> Tensor:
    """Mask [R * G, start + columns]: `start` visible columns before those of `among_rows`."""
    mask = F.pad(among_rows, (start, 0))
    return mask.repeat_interleave(query_groups, 0) if query_groups > 1 else mask


def _inverse_frequency(config: DecoderConfig) -> tuple[Tensor, float]:
    """Rotary frequencies [H/2] and attention scaling, as transformers computes them."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = config.rope["rope_type"]
    if rope_type == "default":
        exponent = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        return config.rope["rope_theta"] ** -exponent, 1.0
    described = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context_tokens,
        rope_parameters=config.rope,
    )
    return ROPE_INIT_FUNCTIONS[rope_type](described, torch.device("cpu"))
