"""The operations of a pass on a device, in PyTorch.

They run anywhere and define the right results; `polybasic.chain.kernels.cuda` computes the same in
Triton. None reads a number on the host and none has a shape that depends on one, so all can be
captured.

#   R = rows (tokens of one pass), I = in features, O = out features, V = tokens to choose from
#   K = key/value heads, G = query heads that read one of them, H = head size
#   P = provisional rows of the cache, those of the pass included
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.kernels.noise import gumbel_noise
from polybasic.chain.kernels.rotary import Rotation
from polybasic.chain.kernels.torch import trees
from polybasic.chain.kernels.torch.packed_blocks import PackedBlocks
from polybasic.chain.kernels.torch.packed_weight import PackedWeight
from polybasic.chain.kernels.torch.rows import DeviceRows, Span
from polybasic.chain.kernels.weights import Linear

_CHUNK = 1024
"""Outputs whose probabilities are summed first; the sums of chunks are added after that."""
SHARES = 2.0**60
"""Of a probability of 1, where shares are added as whole numbers: in any order to the same sum."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""Activations of a gated MLP, by name."""
DeviceWeight: TypeAlias = Tensor | PackedWeight | PackedBlocks
"""[O, I], dense or packed."""


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm: weight [I], in the compute dtype or in float32."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Heads:
    """Heads of an attention layer.

    Attributes:
        scale: factor of the scores.
        softcap: c of c * tanh(score / c); None leaves scores as they are.
        query_norm: of each query, weight [H]; comes with `key_norm`.
    """

    num_kv_heads: int
    query_groups: int
    head_dim: int
    scale: float
    softcap: float | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None


class DeviceLinear:
    """A product as GPUs keep it: x [R, I] -> [R, O], in the dtype of x.

    Args:
        weight: [O, I] or packed.
        bias: [O] or None.
    """

    def __init__(self, weight: DeviceWeight, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        out_size, in_size = self.weight.shape
        return out_size, in_size

    def __call__(self, x_RI: Tensor) -> Tensor:
        """The product by PyTorch's operations, over any number of rows."""
        return F.linear(x_RI, self.dense(x_RI.dtype), self.bias)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight [O, I]; a packed one is dequantized."""
        return self.weight if isinstance(self.weight, Tensor) else self.weight.dequantized(dtype)


class JoinedLinear:
    """Products of the same inputs whose weights differ in kind: x [R, I] -> [R, O]."""

    def __init__(self, parts: Sequence[DeviceLinear]) -> None:
        self.parts = parts

    def __call__(self, x_RI: Tensor) -> Tensor:
        """One product after the other by PyTorch's operations, over any number of rows."""
        return torch.cat([part(x_RI) for part in self.parts], 1)


class DeviceEmbedding:
    """The rows of a weight in blocks, in the layout of its product; see `StoredEmbedding`."""

    def __init__(self, weight: PackedBlocks, dtype: torch.dtype) -> None:
        self.weight, self.linear = weight, DeviceLinear(weight)
        self.dtype, self.device = dtype, weight.words.device

    def rows(self, token_ids: Tensor) -> Tensor:
        """int64 [R] -> [R, D] in the dtype."""
        return self.weight.of_outputs(token_ids).dequantized(self.dtype)


class Operations:
    """The operations of a pass; tensors are in the compute dtype unless stated otherwise."""

    def norm(self, x_RI: Tensor, norm: Norm) -> Tensor:
        """The norm of each row, computed in the dtype of its weight."""
        weight = norm.weight
        if weight.dtype == x_RI.dtype:
            return F.rms_norm(x_RI, weight.shape, weight, norm.eps)
        wide = x_RI.to(weight.dtype)
        return F.rms_norm(wide, weight.shape, weight, norm.eps).to(x_RI.dtype)

    def product(
        self,
        linear: Linear,
        x_RI: Tensor,
        norm: Norm | None = None,
        added: Tensor | None = None,
    ) -> Tensor:
        """`linear` of the rows, normed first where a norm is given, plus `added` [R, O]."""
        out = linear(x_RI if norm is None else self.norm(x_RI, norm))
        return out if added is None else added + out

    def joined_product(
        self, linear: JoinedLinear, x_RI: Tensor, norm: Norm | None, added: Tensor | None
    ) -> Tensor:
        """`product`, part by part."""
        out = torch.cat([self.product(part, x_RI, norm) for part in linear.parts], 1)
        return out if added is None else added + out

    def gated_product(
        self, linear: Linear, x_RI: Tensor, norm: Norm | None, activation: str
    ) -> Tensor:
        """activation(gate) * up [R, O / 2], of which `linear` computes gate first, then up."""
        gate, up = self.product(linear, x_RI, norm).chunk(2, -1)
        return ACTIVATIONS[activation](gate).mul_(up)

    def attention(
        self,
        qkv: Tensor,
        cache: Tensor,
        rows: DeviceRows,
        span: Span,
        heads: Heads,
        rotation: Rotation,
    ) -> Tensor:
        """Write the rows' keys and values into the cache, then attend: [R, K * G * H].

        Args:
            qkv: [R, (K*G + K + K) * H], queries first, then keys, then values.
            cache: [2K, capacity, H], keys first; rows that were never written are finite.
            span: what layers of this kind see; from `rows.span_of`, one for all layers of a pass.
            rotation: cosines and signed sines of all positions, each [positions, 1, H].
        """
        K, G, H = heads.num_kv_heads, heads.query_groups, heads.head_dim
        num_rows = rows.num_rows
        queries = self.write_rows(qkv, cache, rows, span, heads, rotation)
        keys, values = span.of(cache)[None].split(K, 1)
        if span.is_whole_prompt and heads.softcap is None:
            attended = F.scaled_dot_product_attention(
                queries.transpose(0, 1)[None],
                keys,
                values,
                is_causal=True,
                scale=heads.scale,
                enable_gqa=G > 1,
            )
            return attended[0].transpose(0, 1).reshape(num_rows, -1)
        # rows and query groups are folded into one dimension: each key/value head is read once
        queries = queries.reshape(num_rows, K, G, H).transpose(0, 1).reshape(1, K, -1, H)
        mask = None if span.sees_all else span.mask(cache.shape[1], G, qkv.dtype)
        if heads.softcap is None:
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=heads.scale
            )
        else:
            scores = softcapped(queries @ keys.mT * heads.scale, heads.softcap)
            scores = scores if mask is None else scores + mask
            attended = scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
        return attended.view(K, num_rows, G, H).transpose(0, 1).reshape(num_rows, -1)

    def write_rows(
        self,
        qkv: Tensor,
        cache: Tensor,
        rows: DeviceRows,
        span: Span,
        heads: Heads,
        rotation: Rotation,
    ) -> Tensor:
        """Write the rows' keys and values as `attention` does; the queries [R, K * G, H]."""
        K, G, H = heads.num_kv_heads, heads.query_groups, heads.head_dim
        num_rows = rows.num_rows
        parts = qkv.view(num_rows, -1, H)
        rotated = parts[:, : K * G + K]
        if heads.query_norm is not None and heads.key_norm is not None:
            queries = self.norm(rotated[:, : K * G], heads.query_norm)
            rotated = torch.cat([queries, self.norm(rotated[:, K * G :], heads.key_norm)], 1)
        cos, sin = span.rotation(rotation)
        rotated = (rotated * cos).addcmul_(rotated.roll(H // 2, -1), sin)
        new_rows = torch.cat([rotated[:, K * G :], parts[:, K * G + K :]], 1).transpose(0, 1)
        if rows.known_prefix is None:
            written = rows.prefix + rows.first + torch.arange(num_rows, device=qkv.device)
            cache.index_copy_(1, written, new_rows)
        else:
            start = rows.known_prefix + rows.first
            cache[:, start : start + num_rows].copy_(new_rows)
        return rotated[:, : K * G]

    def best(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities float32 and outputs int64, both [R, k], best first.

        Those of a row that contains NaN or infinity may be minus infinity, and are never NaN: it
        would sort a child before its parent.
        """
        best, outputs = logits.log_softmax(-1, dtype=torch.float32).topk(k)
        return best.masked_fill(best.isnan(), float("-inf")), outputs

    def most_probable(self, logits: Tensor) -> Tensor:
        """The most probable output of each row, int64 [R]."""
        return logits.argmax(-1)

    def noise(self, key: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
        """See `polybasic.chain.kernels.noise.gumbel_noise`."""
        return gumbel_noise(key, positions, num_tokens)

    def draw(self, probabilities: Tensor, uniforms: Tensor) -> Tensor:
        """One output of each row by inversion, int64 [R]; none of probability 0.

        Equal numbers give equal draws, on a GPU too, where PyTorch's cumulative sum of one row is
        not reproducible.

        Args:
            probabilities: float32 [R, V]; rows need not be normalised.
            uniforms: float32 [R], from 0 to 1 (excluded).
        """
        num_rows, num_outputs = probabilities.shape
        # a scan over several rows has a fixed order of additions, hence at least two chunks
        num_chunks = max(2, -(-num_outputs // _CHUNK))
        padded = F.pad(probabilities, (0, num_chunks * _CHUNK - num_outputs))
        within = padded.view(num_rows, num_chunks, _CHUNK).cumsum(-1)
        sums = within[..., -1]
        chunks = torch.arange(num_chunks, device=sums.device)
        before = torch.where(chunks < chunks[:, None], sums[:, None], 0).sum(-1)
        total = before[:, -1] + sums[:, -1]
        cumulative = (before[..., None] + within).flatten(1)[:, :num_outputs]
        # parallel sums on a GPU may increase where nothing is added
        is_possible = probabilities > 0
        is_beyond = is_possible & (cumulative > (uniforms * total)[:, None])
        outputs = torch.arange(num_outputs, device=sums.device)
        last = torch.where(is_possible, outputs, 0).amax(1, keepdim=True)
        return torch.where(is_beyond, outputs, last).amin(1)

    def without_tail(self, logits: Tensor, probabilities: Tensor, top_p: Tensor) -> Tensor:
        """Logits [R, V], minus infinity where a token is not among the most probable ones whose
        probabilities reach `top_p`; of equal ones the first is more probable. A row of NaN is kept.

        Probabilities are added in whole units of 2**-60, so that equal ones keep the same tokens
        everywhere.

        Args:
            logits: float32 [R, V].
            probabilities: float32 [R, V], of at most 1.
            top_p: float32, above 0 and at most 1: [] or [1], or in PyTorch one of each row [R, 1].
        """
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        shares = (ordered.nan_to_num(0.0) * SHARES).long()
        is_beyond = shares.cumsum(-1) - shares >= (top_p * SHARES).long().clamp(min=1)
        dropped = torch.zeros_like(is_beyond).scatter(-1, order, is_beyond)
        return logits.masked_fill(dropped, float("-inf"))

    def continuations(
        self, logits: Tensor, k: int, above: Tensor | None, token_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Scores float32 and tokens int64, both [R * k], of the k best children of each draft row.

        Args:
            above: float32 [R], the rows' own scores, to which log-probabilities are added.
            token_ids: int64 [V], the token of each output; None if outputs are token ids.
        """
        scores, outputs = self.best(logits, k)
        if above is not None:
            scores = above[:, None] + scores
        if token_ids is not None:
            outputs = token_ids[outputs]
        return scores.flatten(), outputs.flatten()

    def next_beam(
        self, scores: Tensor, tokens: Tensor, states: Tensor, visible: Tensor
    ) -> trees.Beam:
        """The best n of a level's n * n candidates, n children of each of n rows.

        Args:
            scores: float32 [n * n]; equal ones may come in any order.
            tokens: int64 [n * n].
            states: [n, H] of the rows.
            visible: bool [n, P], provisional rows of the cache that each row sees.
        """
        return trees.next_beam(scores, tokens, states, visible)

    def keep_best(
        self, top_k: int, tokens: Tensor, scores: Tensor, beams: Tensor, root: Tensor, rows: int
    ) -> trees.DeviceTree:
        """The token `root` int64 [] and the best `rows - 1` of all candidates, or all of them.

        Of equal scores the candidate with the smaller number is better.

        Args:
            tokens, scores, beams: int64 [N], float32 [N] and int64 [levels - 1, top_k], as in
                `polybasic.chain.kernels.drafts.Candidates`.
        """
        return trees.keep_best(top_k, tokens, scores, beams, root, rows)

    def walk(
        self,
        tree: trees.DeviceTree,
        drawn: Tensor,
        limit: Tensor,
        stop_tokens: Tensor,
        max_tokens: int,
    ) -> trees.Walk:
        """Walk from the root, stepping to the child with the drawn token as long as there is one.

        Args:
            tree: some rows may be padding, whose token is never drawn.
            drawn: int64 [tree rows], the token drawn after each row.
            limit: int64 [], the most tokens to gain; at least 1.
            stop_tokens: int64 [S]; the walk ends with the first of them. May be empty.
            max_tokens: more than the maximum depth of the tree.
        """
        return trees.walk(tree, drawn, limit, stop_tokens, max_tokens)


def softcapped(x: Tensor, softcap: float) -> Tensor:
    """`x`, kept between -softcap and softcap."""
    return (x / softcap).tanh() * softcap
