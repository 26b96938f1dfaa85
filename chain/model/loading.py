"""Loads checkpoints as decoders and draft heads, on a device and in a dtype."""

import torch
from torch import Tensor

from polybasic.chain.errors import UserError
from polybasic.chain.formats.awq import read_quantization_config
from polybasic.chain.formats.config import (
    ConfigFile,
    DecoderConfig,
    HeadConfig,
    check_feature_layers,
)
from polybasic.chain.formats.draft_vocabulary import draft_token_ids
from polybasic.chain.formats.manifest import Kind
from polybasic.chain.formats.names import (
    DRAFT_TABLES,
    HEAD_LAYER,
    layer_linears,
    layer_norms,
    required_biases,
)
from polybasic.chain.kernels.cpu.library import kernels_for
from polybasic.chain.kernels.product_times import evaluation_dtype
from polybasic.chain.kernels.selection import operations_for
from polybasic.chain.kernels.torch.rotary import RotaryTable
from polybasic.chain.model.decoder import Decoder, DecoderLayer
from polybasic.chain.model.head import Eagle3Head, EagleHead
from polybasic.chain.model.linear import Linear, dense_linear, draft_linear
from polybasic.chain.model.weights import Weights


def serving_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """What a model is served in where nobody says otherwise: its own dtype, unless that is slow.

    Kernels are fast in all dtypes that they have. Where there are none, PyTorch's products decide:
    float32, which holds every number of the others, stands for what it multiplies slowly.
    """
    has_kernels = kernels_for(device, stored) is not None
    if has_kernels or operations_for(device, stored) is not None:
        return stored
    return evaluation_dtype(stored, device)


def load_decoder(
    file: ConfigFile, dtype: torch.dtype, device: torch.device, num_positions: int
) -> Decoder:
    """Load a target (dense) or an intermediate (AWQ) from a checkpoint.

    Args:
        file: of the checkpoint.
        num_positions: positions of the rotary table.

    Raises:
        UserError: an unsupported architecture or quantization, or a missing weight.
    """
    config = file.decoder
    if file.content.get("quantization_config"):
        read_quantization_config(file.content, str(file.path))
    weights = Weights(file.folder, dtype, device)
    rotary = RotaryTable(config, num_positions, dtype, device)
    # the largest tensors first: converting them takes the most memory, when little is in use
    embedding = weights.dense("model.embed_tokens.weight")
    lm_head = dense_linear(embedding) if config.tie_word_embeddings else weights.linear("lm_head")
    layers = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        norms = _load_norms(config, weights, prefix)
        layers.append(_load_layer(config, weights, prefix, norms, config.kind_of(index)))
    final_norm = _load_norm(config, weights, "model.norm")

    def draft_lm_head(token_ids: Tensor | None) -> Linear:
        chosen = slice(None) if token_ids is None else token_ids.cpu()
        if config.tie_word_embeddings:
            return draft_linear(embedding[chosen])
        # the weight itself may already be in a layout that cannot be read
        rows = {
            name: weights.stored(name)[chosen].to(device, dtype)
            for name in ("lm_head.weight", "lm_head.bias")
            if name in weights
        }
        return draft_linear(rows["lm_head.weight"], rows.get("lm_head.bias"))

    return Decoder(config, embedding, layers, final_norm, lm_head, rotary, draft_lm_head)


def load_head(file: ConfigFile, target: Decoder, num_positions: int) -> EagleHead:
    """Load a head that drafts for `target`; the embedding is the target's own.

    Args:
        file: of the head.
        target: whose states it reads.
        num_positions: as `load_decoder`.

    Raises:
        UserError: shapes that differ from the target's, a missing weight, or a malformed draft
            vocabulary.
    """
    config = file.head
    _check_target(config, target, f"{file.path}")
    weights = Weights(file.folder, target.dtype, target.device, draft_linear)
    prefix = HEAD_LAYER[config.kind]
    rotary = RotaryTable(config, num_positions, target.dtype, target.device)
    norms = _load_norms(config, weights, prefix, config.kind)
    layer = _load_layer(config, weights, prefix, norms, kind=config.kind)
    tables = {name: weights.stored(name) for name in DRAFT_TABLES if name in weights}
    token_ids = draft_token_ids(tables, f"{file.folder}")
    if token_ids is not None:
        token_ids = token_ids.to(target.device)
    parts = config, target.embedding, weights.linear("fc"), layer, rotary
    if config.kind == "eagle2":
        return EagleHead(*parts, target.draft_lm_head(token_ids), token_ids)
    return Eagle3Head(
        *parts,
        weights.linear("lm_head"),
        token_ids,
        feature_layers=config.feature_layers,
        embedding_norm=norms["embedding_norm"],
        feature_norm=norms["feature_norm"],
        final_norm=_load_norm(config, weights, "norm"),
    )


def _check_target(config: HeadConfig, target: Decoder, where: str) -> None:
    for key in ("hidden_size", "vocab_size"):
        found, expected = getattr(config, key), getattr(target.config, key)
        if found != expected:
            raise UserError(
                "head does not fit its target",
                f"{where} {key} {found}, target {expected}",
                "train a head for this target",
            )
    check_feature_layers(config, target.config.num_layers, where)


def _load_layer(
    config: DecoderConfig,
    weights: Weights,
    prefix: str,
    norms: dict[str, Tensor],
    kind_of_layer: int = 0,
    kind: Kind = "decoder",
) -> DecoderLayer:
    for name in required_biases(config):
        weights.stored(f"{prefix}.{name}.bias")
    linears = {
        part: weights.linear(*(f"{prefix}.{name}" for name in names))
        for part, names in layer_linears(config, kind).items()
    }
    return DecoderLayer(
        config,
        norms.get("input_norm"),
        linears["qkv"],
        linears["out"],
        norms["mlp_norm"],
        linears["gate_up"],
        linears["down"],
        kind=kind_of_layer,
        query_norm=norms.get("query_norm"),
        key_norm=norms.get("key_norm"),
        attention_post_norm=norms.get("attention_post_norm"),
        mlp_post_norm=norms.get("mlp_post_norm"),
    )


def _load_norms(
    config: DecoderConfig, weights: Weights, prefix: str, kind: Kind = "decoder"
) -> dict[str, Tensor]:
    """A layer's norms by part."""
    return {
        part: _load_norm(config, weights, f"{prefix}.{name}")
        for part, (name, _) in layer_norms(config, kind).items()
    }


def _load_norm(config: DecoderConfig, weights: Weights, name: str) -> Tensor:
    weight = weights.dense(f"{name}.weight")
    return weight.float() + 1 if config.has_offset_norms else weight
