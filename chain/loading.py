"""Checkpoints to decoders and draft heads, on a device and in a dtype."""

from pathlib import Path

import torch
from torch import Tensor

from polybasic.chain.awq import read_quantization_config
from polybasic.chain.config import DecoderConfig, decoder_config, read_head_config
from polybasic.chain.decoder import Decoder, DecoderLayer
from polybasic.chain.eagle import EagleHead
from polybasic.chain.errors import UserError
from polybasic.chain.files import read_json
from polybasic.chain.layout import layer_linears, layer_norms, required_biases
from polybasic.chain.linear import dense_linear
from polybasic.chain.rotary import RotaryTable
from polybasic.chain.weights import Weights


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
    weights = Weights(folder, dtype, device)
    rotary = RotaryTable(config, num_positions, dtype, device)
    # the largest tensors first: converting them takes the most memory, while little else is there
    embedding = weights.dense("model.embed_tokens.weight")
    lm_head = dense_linear(embedding) if config.tie_word_embeddings else weights.linear("lm_head")
    layers = [
        _load_layer(config, weights, f"model.layers.{index}", config.kind_of(index))
        for index in range(config.num_layers)
    ]
    final_norm = _load_norm(config, weights, "model.norm")
    return Decoder(config, embedding, layers, final_norm, lm_head, rotary)


def load_head(folder: Path, target: Decoder, num_positions: int) -> EagleHead:
    """Load an EAGLE-2 head that drafts for `target`; the embedding is the target's own.

    Raises:
        UserError: shapes that differ from the target's, or a missing weight.
    """
    config = read_head_config(folder)
    if config.hidden_size != target.config.hidden_size:
        raise UserError(
            "head does not fit its target",
            f"{folder / 'config.json'} hidden_size {config.hidden_size}, "
            f"target {target.config.hidden_size}",
            "train a head for this target",
        )
    weights = Weights(folder, target.dtype, target.device)
    layer = _load_layer(config, weights, "layers.0", kind=0, is_head=True)
    rotary = RotaryTable(config, num_positions, target.dtype, target.device)
    return EagleHead(config, target.embedding, weights.linear("fc"), layer, rotary)


def _load_layer(
    config: DecoderConfig, weights: Weights, prefix: str, kind: int, is_head: bool = False
) -> DecoderLayer:
    for name in required_biases(config):
        weights.stored(f"{prefix}.{name}.bias")
    norms = {
        part: _load_norm(config, weights, f"{prefix}.{name}")
        for part, (name, _) in layer_norms(config, is_head).items()
    }
    linears = {
        part: weights.linear(*(f"{prefix}.{name}" for name in names))
        for part, names in layer_linears(config).items()
    }
    return DecoderLayer(
        config,
        norms.get("input_norm"),
        linears["qkv"],
        linears["out"],
        norms["mlp_norm"],
        linears["gate_up"],
        linears["down"],
        kind=kind,
        query_norm=norms.get("query_norm"),
        key_norm=norms.get("key_norm"),
        attention_post_norm=norms.get("attention_post_norm"),
        mlp_post_norm=norms.get("mlp_post_norm"),
    )


def _load_norm(config: DecoderConfig, weights: Weights, name: str) -> Tensor:
    weight = weights.dense(f"{name}.weight")
    return weight.float() + 1 if config.has_offset_norms else weight
