"""A lean decoder for Llama and its relatives: one sequence, a few rows a pass, a cache of keys and
values that the caller owns.

#   R = rows (tokens of one pass), S = rows in the cache, T = S + R, D = hidden size
#   K = key/value heads, G = query heads that read one of them, H = head size, V = vocabulary
#   W = width of the states: D, plus D for each feature layer
"""

from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.formats.config import DecoderConfig
from polybasic.chain.kernels.cpu.matrices import NativeLinear
from polybasic.chain.kernels.cpu.passes import NativeLayer, NativeModel, NativeParts, supports
from polybasic.chain.kernels.torch.attend import Attend, View
from polybasic.chain.kernels.torch.operations import ACTIVATIONS, DeviceLinear, Heads, Norm
from polybasic.chain.kernels.torch.rotary import RotaryTable
from polybasic.chain.model.device_model import DeviceLayer, DeviceModel, DeviceParts
from polybasic.chain.model.linear import Linear, Softcapped, drafts_in_4_bits, softcapped


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in the weight's dtype."""
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


class DecoderLayer:
    """One layer: attention over the cache, then the gated MLP; residuals around both.

    Weights of norms are in the compute dtype, or in float32 if the norm is computed in float32.

    Args:
        input_norm: weight [D] of the norm before attention; a draft head's layer has none.
        qkv: D -> (K*G + K + K) * H, queries first, then keys, then values.
        gate_up: D -> 2 * intermediate size, gate first.
        kind: index into `config.kinds`.
        query_norm: weight [H] of the norm of each query; comes with `key_norm`.
        attention_post_norm: weight [D] of the norm of attention's output.
        mlp_post_norm: weight [D] of the norm of the MLP's output.
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
        *,
        kind: int = 0,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        attention_post_norm: Tensor | None = None,
        mlp_post_norm: Tensor | None = None,
    ) -> None:
        self.kind, self.eps = kind, config.rms_norm_eps
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.input_norm, self.mlp_norm = input_norm, mlp_norm
        self.attention_post_norm, self.mlp_post_norm = attention_post_norm, mlp_post_norm
        self.qkv, self.out, self.gate_up, self.down = qkv, out, gate_up, down
        self.activation = ACTIVATIONS[config.activation]
        self.num_kv_heads, self.query_groups = config.num_kv_heads, config.query_groups
        self.head_dim = config.head_dim
        self.num_rotated = config.num_heads + config.num_kv_heads
        self.query_norm, self.key_norm = query_norm, key_norm
        self.head_norms: Tensor | None = None
        if query_norm is not None and key_norm is not None:
            queries, keys = (config.num_heads, -1), (config.num_kv_heads, -1)
            self.head_norms = torch.cat([query_norm.expand(*queries), key_norm.expand(*keys)])

    def native(self) -> NativeLayer | None:
        """The layer's parts for the native kernels, or None if its weights have another layout."""
        qkv, out, gate_up, down = self.qkv, self.out, self.gate_up, self.down
        if not (isinstance(qkv, NativeLinear) and isinstance(out, NativeLinear)):
            return None
        if not (isinstance(gate_up, NativeLinear) and isinstance(down, NativeLinear)):
            return None
        return NativeLayer(
            qkv,
            out,
            gate_up,
            down,
            self.input_norm,
            self.mlp_norm,
            self.query_norm,
            self.key_norm,
            self.attention_post_norm,
            self.mlp_post_norm,
            self.kind,
        )

    def on_device(self) -> DeviceLayer | None:
        """The layer's parts for the device path, or None if its weights have another layout."""
        qkv, out, gate_up, down = self.qkv, self.out, self.gate_up, self.down
        if not (isinstance(qkv, DeviceLinear) and isinstance(out, DeviceLinear)):
            return None
        if not (isinstance(gate_up, DeviceLinear) and isinstance(down, DeviceLinear)):
            return None
        heads = Heads(
            self.num_kv_heads,
            self.query_groups,
            self.head_dim,
            self.head_dim**-0.5 if self.scale is None else self.scale,
            self.softcap,
            self._norm(self.query_norm),
            self._norm(self.key_norm),
        )
        return DeviceLayer(
            qkv,
            out,
            gate_up,
            down,
            heads,
            self._norm(self.input_norm),
            Norm(self.mlp_norm, self.eps),
            self._norm(self.attention_post_norm),
            self._norm(self.mlp_post_norm),
            self.kind,
        )

    def _norm(self, weight: Tensor | None) -> Norm | None:
        return None if weight is None else Norm(weight, self.eps)

    def forward(
        self,
        x_RD: Tensor,
        cache: Tensor,
        start: int,
        view: View,
        attention_input: Tensor | None = None,
    ) -> Tensor:
        """Read `x_RD` and write its keys and values into `cache` [2K, capacity, H].

        Args:
            start: first row of the cache that is written.
            view: how layers of this kind attend to the cache.
            attention_input: [R, inputs of `qkv`], instead of the normed `x_RD`.
        """
        if attention_input is None:
            attention_input = x_RD
            if self.input_norm is not None:
                attention_input = rms_norm(x_RD, self.input_norm, self.eps)
        attended = self.out(self._attention(attention_input, cache, start, view))
        if self.attention_post_norm is not None:
            attended = rms_norm(attended, self.attention_post_norm, self.eps)
        x_RD = x_RD + attended
        gate, up = self.gate_up(rms_norm(x_RD, self.mlp_norm, self.eps)).chunk(2, -1)
        added = self.down(self.activation(gate).mul_(up))
        if self.mlp_post_norm is not None:
            added = rms_norm(added, self.mlp_post_norm, self.eps)
        return x_RD + added

    def _attention(self, x: Tensor, cache: Tensor, start: int, view: View) -> Tensor:
        rows, end = x.shape[0], start + x.shape[0]
        K, G, H = self.num_kv_heads, self.query_groups, self.head_dim
        qkv = self.qkv(x).view(rows, -1, H)
        cos, sin = view.rotation
        rotated = qkv[:, : self.num_rotated]
        if self.head_norms is not None:
            rotated = self._normed_heads(rotated, self.head_norms)
        rotated = (rotated * cos).addcmul_(rotated.roll(H // 2, -1), sin)
        cache[:K, start:end].copy_(rotated[:, K * G :].transpose(0, 1))
        cache[K:, start:end].copy_(qkv[:, self.num_rotated :].transpose(0, 1))
        queries = rotated[:, : K * G].view(rows, K, G, H)
        keys, values = view.of(cache[None], end, 2).split(K, 1)
        if view.is_prompt:
            if view.mask is not None and G > 1:
                # CUDA has no fused kernel for masks with fewer key heads than query heads
                keys, values = keys.repeat_interleave(G, 1), values.repeat_interleave(G, 1)
            attended = F.scaled_dot_product_attention(
                queries.reshape(rows, K * G, H).transpose(0, 1)[None],
                keys,
                values,
                attn_mask=view.mask,
                is_causal=view.mask is None,
                scale=self.scale,
                enable_gqa=G > 1 and view.mask is None,
            )
            return attended[0].transpose(0, 1).reshape(rows, -1)
        # Rows and query groups are folded into one dimension: each key/value head is read once.
        queries = queries.transpose(0, 1).reshape(1, K, rows * G, H)
        if self.softcap is None:
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=view.mask, scale=self.scale
            )
        else:
            attended = _softcapped_attention(
                queries, keys, values, view.mask, self.scale, self.softcap
            )
        return attended.view(K, rows, G, H).transpose(0, 1).reshape(rows, -1)

    def _normed_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        """Norm queries and keys [R, K*G + K, H], each head with its own weights."""
        wide = heads.to(weight.dtype)
        normed = F.rms_norm(wide, wide.shape[-1:], None, self.eps)
        return (normed * weight).to(heads.dtype)


class Decoder:
    """Embedding, layers, final norm and output projection of one checkpoint.

    Args:
        embedding: [V, D] in the compute dtype.
        final_norm: [D].
        lm_head: D -> V, before soft-capping.
        draft_lm_head: token ids (int64 [V'], or None for all) -> a linear D -> V', for the method
            of this name.

    Attributes:
        lm_head: D -> V with the config's soft-capping, for drafters too.
        feature_layers: layers whose inputs are part of the states, for an EAGLE-3 head.
    """

    feature_layers: tuple[int, ...] = ()

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Tensor,
        layers: list[DecoderLayer],
        final_norm: Tensor,
        lm_head: Linear,
        rotary: RotaryTable,
        draft_lm_head: Callable[[Tensor | None], Linear],
    ) -> None:
        self.config, self.rotary = config, rotary
        self.embedding, self.layers, self.final_norm = embedding, layers, final_norm
        self.lm_head = self._with_softcap(lm_head)
        self._draft_lm_head = draft_lm_head
        # transformers rounds the factor to the dtype of the weights
        scale = config.embedding_scale
        self.embedding_scale = None if scale is None else embedding.new_tensor(scale).item()

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @cached_property
    def native(self) -> NativeModel | None:
        """Runs each pass or draft in one call, on a CPU with native kernels; else None."""
        lm_head = self.lm_head.linear if isinstance(self.lm_head, Softcapped) else self.lm_head
        layers = [layer.native() for layer in self.layers]
        if not isinstance(lm_head, NativeLinear) or not supports(self.config):
            return None
        if any(layer is None for layer in layers):
            return None
        parts = NativeParts(
            kind="decoder",
            config=self.config,
            embedding=self.embedding,
            layers=[layer for layer in layers if layer is not None],
            rotary=self.rotary,
            lm_head=lm_head,
            softcap=self.config.logit_softcap,
            embedding_scale=self.embedding_scale,
            final_norm=self.final_norm,
        )
        return NativeModel(lm_head.kernels, parts)

    @cached_property
    def device_model(self) -> DeviceModel | None:
        """Runs passes without the host, if the weights have the layout for it; else None."""
        lm_head = self.lm_head.linear if isinstance(self.lm_head, Softcapped) else self.lm_head
        layers = [layer.on_device() for layer in self.layers]
        if not isinstance(lm_head, DeviceLinear) or any(layer is None for layer in layers):
            return None
        parts = DeviceParts(
            config=self.config,
            embedding=self.embedding,
            layers=[layer for layer in layers if layer is not None],
            rotary=self.rotary,
            lm_head=lm_head,
            softcap=self.config.logit_softcap,
            embedding_scale=self.embedding_scale,
            final_norm=Norm(self.final_norm, self.config.rms_norm_eps),
        )
        return DeviceModel(parts)

    @property
    def states_width(self) -> int:
        """W of the states."""
        return (1 + len(self.feature_layers)) * self.config.hidden_size

    def forward(self, token_ids: Tensor, cache: list[Tensor], attend: Attend) -> Tensor:
        """States [R, W], which the output projection and draft heads read.

        These are the residual stream after the final norm, followed by the inputs of
        `feature_layers` in order.

        Args:
            token_ids: int64 [R].
            cache: one [2K, capacity, H] a layer, keys first; rows `attend.start` to T - 1 are
                written.
        """
        if self.native is not None:
            return self.native.forward(token_ids, cache, attend, feature_layers=self.feature_layers)
        x_RD = F.embedding(token_ids, self.embedding)
        if self.embedding_scale is not None:
            x_RD = x_RD * self.embedding_scale
        feature_layers, inputs = self.feature_layers, {}
        views = attend.views_of(self)
        for index, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            if index in feature_layers:
                inputs[index] = x_RD
            x_RD = layer.forward(x_RD, layer_cache, attend.start, views[layer.kind])
        final = rms_norm(x_RD, self.final_norm, self.config.rms_norm_eps)
        if not feature_layers:
            return final
        return torch.cat([final, *(inputs[index] for index in feature_layers)], -1)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [R, V] of `states` [R, W]."""
        if self.feature_layers:
            states = states[:, : self.config.hidden_size]
        return self.lm_head(states)

    def draft_lm_head(self, token_ids: Tensor | None) -> Linear:
        """The output projection of a draft head: D -> V'.

        It is the decoder's own unless it is limited to some tokens or drafts are rounded to 4 bits.

        Args:
            token_ids: int64 [V'], the tokens to draft; None for all.
        """
        is_rounded = drafts_in_4_bits(self.device, self.dtype, self.config.hidden_size)
        if token_ids is None and not is_rounded:
            return self.lm_head
        return self._with_softcap(self._draft_lm_head(token_ids))

    def _with_softcap(self, lm_head: Linear) -> Linear:
        softcap = self.config.logit_softcap
        return lm_head if softcap is None else Softcapped(lm_head, softcap)


def _softcapped_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float,
) -> Tensor:
    scores = queries @ keys.mT * (queries.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcapped(scores, softcap)
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
