"""Checkpoints to decoders and draft heads, on a device and in a dtype."""

from pathlib import Path

import torch
from torch import Tensor

from polybasic.chain.awq import QuantizedWeight, read_quantization_config
from polybasic.chain.checkpoint import load_tensors
from polybasic.chain.config import DecoderConfig, decoder_config
from polybasic.chain.decoder import Decoder, DecoderLayer, RotaryTable
from polybasic.chain.eagle import EagleHead
from polybasic.chain.errors import UserError
from polybasic.chain.files import read_json
from polybasic.chain.linear import Linear, dense_linear, int4_linear


class _Weights:
    """Tensors of one checkpoint by name, converted to device and dtype when they are taken."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.folder, self.dtype, self.device = folder, dtype, device
        self.tensors = dict(load_tensors(folder))

    def stored(self, name: str) -> Tensor:
        try:
            return self.tensors[name]
        except KeyError as error:
            raise UserError(
                "weight missing", f"{name} in {self.folder}", "export the checkpoint again"
            ) from error

    def dense(self, name: str) -> Tensor:
        return self.stored(name).to(self.device, self.dtype)

    def linear(self, *names: str) -> Linear:
        """One product for several weights side by side in their output features."""
        if f"{names[0]}.qweight" not in self.tensors:
            return dense_linear(torch.cat([self.dense(f"{name}.weight") for name in names]))
        parts = [
            QuantizedWeight.unpack(
                self.stored(f"{name}.qweight"),
                self.stored(f"{name}.qzeros"),
                self.stored(f"{name}.scales"),
                name=name,
            )
            for name in names
        ]
        return int4_linear(QuantizedWeight.stack(parts), self.dtype, self.device)


def load_decoder(
    folder: Path, dtype: torch.dtype, device: torch.device, num_positions: int
) -> Decoder:
    """Load a target (dense) or an intermediate (AWQ) from a checkpoint folder.

    Args:
        num_positions: positions that the rotary table is made for.

    Raises:
        UserError: an unsupported architecture or quantization, or a missing weight.
    """
    path = folder / "config.json"
    raw_config = read_json(path, "model config")
    config = decoder_config(raw_config, str(path))
    if raw_config.get("quantization_config"):
        read_quantization_config(raw_config, str(path))
    weights = _Weights(folder, dtype, device)
    rotary = RotaryTable(config, num_positions, dtype, device)
    layers = [
        _load_layer(config, weights, f"model.layers.{index}", has_input_norm=True)
        for index in range(config.num_layers)
    ]
    embedding = weights.dense("model.embed_tokens.weight")
    return Decoder(
        config,
        embedding,
        layers,
        weights.dense("model.norm.weight"),
        dense_linear(embedding) if config.tie_word_embeddings else weights.linear("lm_head"),
        rotary,
    )


def load_head(folder: Path, target: Decoder, num_positions: int) -> EagleHead:
    """Load an EAGLE-2 head that drafts for `target`; the embedding is the target's own.

    Raises:
        UserError: shapes that differ from the target's, a bias in `fc` other than zero, or a
            missing weight.
    """
    path = folder / "config.json"
    config = decoder_config(read_json(path, "head config"), str(path))
    if config.hidden_size != target.config.hidden_size:
        raise UserError(
            "head does not fit its target",
            f"{path} hidden_size {config.hidden_size}, target {target.config.hidden_size}",
            "train a head for this target",
        )
    weights = _Weights(folder, target.dtype, target.device)
    if "fc.bias" in weights.tensors and weights.stored("fc.bias").any():
        raise UserError(
            "unsupported draft head",
            f"fc.bias in {folder} is not zero",
            "export the head without a bias",
        )
    layer = _load_layer(config, weights, "layers.0", has_input_norm=False)
    rotary = RotaryTable(config, num_positions, target.dtype, target.device)
    return EagleHead(config, target.embedding, weights.linear("fc"), layer, rotary)


def _load_layer(
    config: DecoderConfig, weights: _Weights, prefix: str, has_input_norm: bool
) -> DecoderLayer:
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return DecoderLayer(
        config,
        weights.dense(f"{prefix}.input_layernorm.weight") if has_input_norm else None,
        weights.linear(*(f"{attention}.{part}_proj" for part in "qkv")),
        weights.linear(f"{attention}.o_proj"),
        weights.dense(f"{prefix}.post_attention_layernorm.weight"),
        weights.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        weights.linear(f"{mlp}.down_proj"),
    )
