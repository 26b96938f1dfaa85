"""A decoder or a draft head whose passes run without the host reading anything.

The counterpart of `polybasic.chain.kernels.cpu.passes`, in the operations of a device.

#   R = rows (tokens of one pass), D = hidden size, W = width of the states, V = tokens to draft
#   K = key/value heads, H = head size
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.formats.config import DecoderConfig
from polybasic.chain.kernels.torch.operations import DeviceLinear, Heads, Norm, Operations
from polybasic.chain.kernels.torch.rotary import RotaryTable
from polybasic.chain.kernels.torch.rows import DeviceRows, Span
from polybasic.chain.model.linear import softcapped


@dataclass(frozen=True)
class DeviceLayer:
    """Parts of one layer; see `polybasic.chain.model.decoder.DecoderLayer`."""

    qkv: DeviceLinear
    out: DeviceLinear
    gate_up: DeviceLinear
    down: DeviceLinear
    heads: Heads
    input_norm: Norm | None
    mlp_norm: Norm
    attention_post_norm: Norm | None
    mlp_post_norm: Norm | None
    kind: int


@dataclass(frozen=True)
class DeviceParts:
    """The parts of a device model.

    Attributes:
        final_norm: before the output projection; None for an EAGLE-2 head.
        embedding_norm: of an EAGLE-3 head; so is `feature_norm`.
        fc: of a head: 2D -> D for EAGLE-2, features of the verifier's states -> D for EAGLE-3.
        lm_head: before soft-capping.
        softcap: of its logits, None for none.
        embedding_scale: as rounded to the compute dtype.
    """

    config: DecoderConfig
    embedding: Tensor
    layers: Sequence[DeviceLayer]
    rotary: RotaryTable
    lm_head: DeviceLinear
    softcap: float | None = None
    embedding_scale: float | None = None
    final_norm: Norm | None = None
    embedding_norm: Norm | None = None
    feature_norm: Norm | None = None
    fc: DeviceLinear | None = None

    @property
    def is_head(self) -> bool:
        """Whether these are the parts of a draft head, whose states are not normed yet."""
        return self.fc is not None


class DeviceModel:
    """Runs passes of one model without waiting for the host.

    Shapes depend on the number of rows, the cache's capacity and the number of provisional rows;
    everything else is read from tensors on the device.
    """

    def __init__(self, parts: DeviceParts) -> None:
        self.parts = parts
        self.operations: Operations = parts.lm_head.operations

    def forward(
        self,
        token_ids: Tensor,
        cache: Sequence[Tensor],
        rows: DeviceRows,
        features: Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> Tensor:
        """States [R, W] as `Decoder.forward` gives them; a head's [R, D] before its final norm.

        Args:
            token_ids: int64 [R].
            cache: one [2K, capacity, H] a layer; the rows of the pass are written.
            features: [R, D], for a head: the feature of the token before each row's.
            feature_layers: layers whose inputs are a part of the states.
        """
        parts = self.parts
        x_RD, attention_input = self._embed(token_ids, features)
        spans = [rows.span_of(kind) for kind in parts.config.kinds]
        inputs: dict[int, Tensor] = {}
        for index, (layer, layer_cache) in enumerate(zip(parts.layers, cache, strict=True)):
            if index in feature_layers:
                inputs[index] = x_RD
            x_RD = self._layer(layer, x_RD, layer_cache, rows, spans[layer.kind], attention_input)
        if parts.is_head or parts.final_norm is None:
            return x_RD
        final = self.operations.norm(x_RD, parts.final_norm)
        if not feature_layers:
            return final
        return torch.cat([final, *(inputs[index] for index in feature_layers)], -1)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [R, V] of states [R, W] as `forward` returns them."""
        parts = self.parts
        # a decoder's states are normed, and features may follow them
        norm = parts.final_norm if parts.is_head else None
        states = states[:, : parts.config.hidden_size].contiguous()
        logits = self.operations.product(parts.lm_head, states, norm)
        return logits if parts.softcap is None else softcapped(logits, parts.softcap)

    def features(self, inputs: Tensor) -> Tensor:
        """A head's features [R, D] of its inputs from the verifier's states."""
        parts = self.parts
        if parts.feature_norm is None:
            return inputs
        assert parts.fc is not None
        return self.operations.product(parts.fc, inputs.contiguous())

    def _embed(self, token_ids: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The residual stream before the first layer, and its attention's input if different."""
        parts, operations = self.parts, self.operations
        embedded = F.embedding(token_ids, parts.embedding)
        if features is None:
            scale = parts.embedding_scale
            return embedded if scale is None else embedded * scale, None
        assert parts.fc is not None
        if parts.embedding_norm is None or parts.feature_norm is None:
            return operations.product(parts.fc, torch.cat([embedded, features], -1)), None
        normed = [
            operations.norm(embedded, parts.embedding_norm),
            operations.norm(features, parts.feature_norm),
        ]
        return features, torch.cat(normed, -1)

    def _layer(
        self,
        layer: DeviceLayer,
        x_RD: Tensor,
        cache: Tensor,
        rows: DeviceRows,
        span: Span,
        attention_input: Tensor | None,
    ) -> Tensor:
        operations, rotation = self.operations, self.parts.rotary.tables[layer.kind]
        if attention_input is None:
            qkv = operations.product(layer.qkv, x_RD, layer.input_norm)
        else:
            qkv = operations.product(layer.qkv, attention_input)
        attended = operations.attention(qkv, cache, rows, span, layer.heads, rotation)
        x_RD = self._add_product(layer.out, attended, x_RD, layer.attention_post_norm)
        inner = operations.gated_product(
            layer.gate_up, x_RD, layer.mlp_norm, self.parts.config.activation
        )
        return self._add_product(layer.down, inner, x_RD, layer.mlp_post_norm)

    def _add_product(
        self, linear: DeviceLinear, rows: Tensor, x_RD: Tensor, post_norm: Norm | None
    ) -> Tensor:
        """`x_RD` plus the product of the rows, which is normed first if there is a norm."""
        if post_norm is None:
            return self.operations.product(linear, rows, added=x_RD)
        return x_RD + self.operations.norm(self.operations.product(linear, rows), post_norm)
