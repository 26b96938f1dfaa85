"""An EAGLE-3 head by its definition, from the weights of its file: no cache, no tricks.

#   R = rows, D = hidden size, V = tokens that can be drafted
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PlainEagle3:
    """Computes in float32; rotary positions are Llama's.

    Attributes:
        weights: by their names.
        embedding: the target's.
    """

    weights: dict[str, Tensor]
    embedding: Tensor
    head_dim: int
    eps: float
    theta: float = 10000.0

    def log_probabilities(self, layers: Tensor, next_tokens: list[int], path: list[int]) -> Tensor:
        """Of the token after the path, [V]; all rows are read again for each of its tokens.

        Args:
            layers: [R, 3D], inputs of the target's layers at the tokens before `next_tokens`.
        """
        features = layers @ self.weights["fc.weight"].T
        outputs = self.layer(next_tokens, features)
        for place in range(1, len(path) + 1):
            features = torch.cat([features, outputs[-1:]])
            outputs = self.layer([*next_tokens, *path[:place]], features)
        return self.logits(outputs[-1]).log_softmax(-1)

    def logits(self, features: Tensor) -> Tensor:
        return self._product(self._norm(features, "norm"), "lm_head")

    def layer(self, next_tokens: list[int], features: Tensor) -> Tensor:
        """Features [R, D] behind the layer, over a whole text of `fc`'s outputs [R, D]."""
        embedded = self._norm(self.embedding[next_tokens], "midlayer.input_layernorm")
        read = torch.cat([embedded, self._norm(features, "midlayer.hidden_norm")], -1)
        q, k, v = (
            self._product(read, f"midlayer.self_attn.{part}_proj").unflatten(
                -1, (-1, self.head_dim)
            )
            for part in "qkv"
        )
        groups = q.shape[1] // k.shape[1]
        k, v = self._rotated(k).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", self._rotated(q), k) / self.head_dim**0.5
        is_later = torch.ones(scores.shape[1:]).triu(1).bool()
        attended = scores.masked_fill(is_later, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", attended, v).flatten(1)
        x = features + self._product(attended, "midlayer.self_attn.o_proj")
        normed = self._norm(x, "midlayer.post_attention_layernorm")
        gate = F.silu(self._product(normed, "midlayer.mlp.gate_proj"))
        return x + self._product(
            gate * self._product(normed, "midlayer.mlp.up_proj"), "midlayer.mlp.down_proj"
        )

    def _rotated(self, heads: Tensor) -> Tensor:
        rates = self.theta ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = (torch.arange(len(heads))[:, None] * rates).repeat(1, 2)[:, None]
        first, second = heads.chunk(2, -1)
        return heads * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    def _product(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]
