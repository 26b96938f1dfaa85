"""The draft head in EAGLE-2's layout: one fc and one Llama layer without an input norm.

Row t of the input is [embedding of token t+1, feature t]; its output is the feature t+1, from
which the target's own lm_head predicts token t+2. A feature is the target's hidden state after
its final norm. Row t has rotary position t.

Shapes: B = batch, R = rows, C = rows in the cache, H = hidden size, D = head size.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polybasic.chain.rotary import inverse_frequency


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head; a random one has the target's, all but `intermediate_size`.

    Attributes:
        rope: rotary parameters as transformers names them (rope_type, rope_theta, factor, ...).
        context_tokens: positions that the target is declared for.
        has_fc_bias: heads of others may have one.
        has_qkv_bias: on queries, keys and values; heads of others may have them.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict[str, Any]
    context_tokens: int
    has_fc_bias: bool = False
    has_qkv_bias: bool = False


class KeysValues(NamedTuple):
    """Cached attention rows, each [B, num_kv_heads, C, D]."""

    keys: Tensor
    values: Tensor


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=shape.has_qkv_bias)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=shape.has_qkv_bias)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=shape.has_qkv_bias)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)
        # no buffer: frequencies stay float32 whatever the weights are converted to
        self._frequencies, self._rotary_scale = inverse_frequency(
            shape.rope, shape.head_dim, shape.context_tokens
        )

    def forward(
        self, x: Tensor, positions: Tensor, past: KeysValues | None, mask: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        """See `DraftHead.forward`."""
        batch, rows, _ = x.shape
        cos, sin = self._rotary(positions, x.dtype)
        split = (batch, rows, -1, self.shape.head_dim)
        queries = _rotate(self.q_proj(x).view(split).transpose(1, 2), cos, sin)
        keys = _rotate(self.k_proj(x).view(split).transpose(1, 2), cos, sin)
        values = self.v_proj(x).view(split).transpose(1, 2)
        if past is not None:
            keys = torch.cat((past.keys, keys), dim=2)
            values = torch.cat((past.values, values), dim=2)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        merged = attended.transpose(1, 2).reshape(batch, rows, -1)
        return self.o_proj(merged), KeysValues(keys, values)

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., 1, R, D], computed in float32 at each call."""
        angles = positions[..., None].float() * self._frequencies.to(positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        angles = angles if positions.dim() == 1 else angles[:, None]
        scale = self._rotary_scale
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


class Mlp(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """A Llama decoder layer whose attention reads its input without a norm."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size)

    def forward(
        self, x: Tensor, positions: Tensor, past: KeysValues | None, mask: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        """See `DraftHead.forward`."""
        attended, cache = self.self_attn(x, positions, past, mask)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class DraftHead(nn.Module):
    """EAGLE-2's head; parameter names are those of its checkpoints. The embedding is frozen.

    Args:
        shape: of the head.
        embedding: [V, H], kept as it is, not copied; default: random.
    """

    def __init__(self, shape: HeadShape, embedding: Tensor | None = None) -> None:
        super().__init__()
        self.shape = shape
        if embedding is None:
            embedding = torch.randn(shape.vocab_size, shape.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(embedding, freeze=True)
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=shape.has_fc_bias)
        self.layers = nn.ModuleList([DraftLayer(shape)])

    def forward(
        self,
        token_ids: Tensor,
        features: Tensor,
        positions: Tensor,
        past: KeysValues | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Run rows that may attend to cached rows and to each other.

        Args:
            token_ids: [B, R], the token after each feature.
            features: [B, R, H].
            positions: [R] or [B, R], rotary positions.
            past: rows before these.
            mask: bool, broadcast to [B, 1, R, C + R], true where a row attends; None is the
                ordinary causal mask, and then there must be no `past`.

        Returns:
            The predicted features [B, R, H], and the cache with these rows appended.
        """
        assert mask is not None or past is None
        x = self.fc(torch.cat((self.embed_tokens(token_ids), features), dim=-1))
        return self.layers[0](x, positions, past, mask)

    def unroll(self, token_ids: Tensor, features: Tensor, num_steps: int) -> list[Tensor]:
        """Predict as in training: one step over true features, the others over its own.

        Row t of step s has as its feature the output of row t-1 of step s-1. It attends to what
        it would find in the cache s-1 tokens into a draft: rows up to t-s+1 with true features,
        then for each later row the one of the step in which that row was drafted, itself last.
        (As in HASS, arXiv 2408.15766, and in EAGLE-3's training-time test, arXiv 2503.01840.)

        Args:
            token_ids: [B, R], the true token after each feature.
            features: [B, R, H], the target's.
            num_steps: at least 1.

        Returns:
            The outputs [B, R, H] of each step; rows t < s-1 of step s have no meaning.
        """
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        output, cache = self(token_ids, features, positions)
        outputs = [output]
        for step in range(2, num_steps + 1):
            drafted = torch.cat((features[:, :1], output[:, :-1]), dim=1)
            output, cache = self(
                token_ids, drafted, positions, cache, unrolled_mask(positions, step)
            )
            outputs.append(output)
        return outputs


def unrolled_mask(positions: Tensor, step: int) -> Tensor:
    """What the rows of one unrolled step attend to, among the rows of all steps so far.

    Args:
        positions: [R], 0 .. R-1.
        step: from 2 on.

    Returns:
        bool [R, step * R]; the blocks of R columns are the steps' rows in order.
    """
    back = positions[:, None] - positions[None, :]  # how far the column lies before the row
    committed = back >= step - 1
    drafted = [back == step - earlier for earlier in range(2, step + 1)]
    return torch.cat((committed, *drafted), dim=1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's rotation of the two halves of [B, heads, R, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
