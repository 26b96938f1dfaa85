"""Names and shapes of a layer's tensors, as the checkpoints of its family store them.

Shape legend: H hidden size, I intermediate size, A heads x head size, K key-value heads x head
size.
"""

from typing import NamedTuple, Protocol

from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig, Shape
from polybasic.chain.formats.checkpoints.kinds import Kind, is_head
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS

DRAFT_TABLES = ("d2t", "t2d")
"""Tables of a head that drafts among a part of the vocabulary; see draft_vocabulary.py."""


class Stored(Protocol):
    """Names of tensors."""

    def __contains__(self, name: str, /) -> bool: ...


class ModelNames(NamedTuple):
    """Names of what a decoder has beside its layers, and what those of a layer begin with.

    Attributes:
        layer: with a place for its number.
    """

    embedding: str
    norm: str
    layer: str


LM_HEAD = "lm_head.weight"
_DECODER = ModelNames("model.embed_tokens.weight", "model.norm.weight", "model.layers.{}")
_T5 = ModelNames("shared.weight", "decoder.final_layer_norm.weight", "decoder.block.{}")
T5_ENCODER = ModelNames("shared.weight", "encoder.final_layer_norm.weight", "encoder.block.{}")
T5_BIAS = "{}.layer.0.SelfAttention.relative_attention_bias.weight"
"""Of the first layer, by that layer's name; all others read it, too."""


def model_names(config: DecoderConfig) -> ModelNames:
    """Of the decoder."""
    return _DECODER if config.encoder is None else _T5


def has_lm_head(config: DecoderConfig, stored: Stored) -> bool:
    """Whether the output projection is a matrix of its own.

    Args:
        stored: names that the checkpoint has, which decide of an encoder-decoder.
    """
    return not config.tie_word_embeddings and (config.encoder is None or LM_HEAD in stored)


def layer_linears(config: DecoderConfig, kind: Kind = "decoder") -> dict[str, dict[str, Shape]]:
    """[out, in] of a layer's linears by name, grouped as `LayerWeights` has them.

    The members of a group lie side by side in their outputs, in this order.

    Args:
        kind: of head, whose attention may read several states side by side.
    """
    H, I = config.hidden_size, config.intermediate_size  # noqa: E741
    if config.encoder is not None:
        return encoder_linears(config, 2) | source_linears(config)
    read = HEAD_KINDS[kind].num_attended * H if is_head(kind) else H
    A, K = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv: dict[str, Shape] = {
        "self_attn.q_proj": (A, read),
        "self_attn.k_proj": (K, read),
        "self_attn.v_proj": (K, read),
    }
    gate_up: dict[str, Shape] = {"mlp.gate_proj": (I, H), "mlp.up_proj": (I, H)}
    if config.has_fused_projections:
        qkv, gate_up = {"self_attn.qkv_proj": (A + 2 * K, H)}, {"mlp.gate_up_proj": (2 * I, H)}
    return {
        "qkv": qkv,
        "out": {"self_attn.o_proj": (H, A)},
        "gate_up": gate_up,
        "down": {"mlp.down_proj": (H, I)},
    }


def encoder_linears(config: DecoderConfig, mlp: int = 1) -> dict[str, dict[str, Shape]]:
    """As `layer_linears`, of a layer of T5's encoder.

    Args:
        mlp: place of the MLP in a layer.
    """
    H, I = config.hidden_size, config.intermediate_size  # noqa: E741
    A = config.num_heads * config.head_dim
    attention, dense = "layer.0.SelfAttention", f"layer.{mlp}.DenseReluDense"
    return {
        "qkv": {f"{attention}.{part}": (A, H) for part in "qkv"},
        "out": {f"{attention}.o": (H, A)},
        "gate_up": {f"{dense}.wi_0": (I, H), f"{dense}.wi_1": (I, H)},
        "down": {f"{dense}.wo": (H, I)},
    }


def source_linears(config: DecoderConfig) -> dict[str, dict[str, Shape]]:
    """Of what a layer of T5's decoder has to read the source."""
    H, A = config.hidden_size, config.num_heads * config.head_dim
    attention = "layer.1.EncDecAttention"
    return {
        "source_query": {f"{attention}.q": (A, H)},
        "source_key_value": {f"{attention}.k": (A, H), f"{attention}.v": (A, H)},
        "source_out": {f"{attention}.o": (H, A)},
    }


def encoder_norms(config: DecoderConfig, mlp: int = 1) -> dict[str, tuple[str, Shape]]:
    """As `layer_norms`, of a layer of T5's encoder."""
    H = (config.hidden_size,)
    return {"input_norm": ("layer.0.layer_norm", H), "mlp_norm": (f"layer.{mlp}.layer_norm", H)}


def linear_shapes(config: DecoderConfig, kind: Kind = "decoder") -> dict[str, Shape]:
    """[out, in] of a layer's linears by name, as `layer_linears` groups them."""
    groups = layer_linears(config, kind).values()
    return {name: shape for group in groups for name, shape in group.items()}


def required_biases(config: DecoderConfig) -> list[str]:
    """Names of a layer's linears whose biases must be stored; others may be."""
    return [name for name in linear_shapes(config) if name.rpartition(".")[2] in config.biased]


def layer_norms(config: DecoderConfig, kind: Kind = "decoder") -> dict[str, tuple[str, Shape]]:
    """Name and shape of a layer's norms by their part in `LayerWeights`.

    Args:
        kind: the norms of a head's layer are its kind's; some are the head's own parts.
    """
    H = (config.hidden_size,)
    if config.encoder is not None:
        return encoder_norms(config, 2) | {"source_norm": ("layer.1.layer_norm", H)}
    norms: dict[str, tuple[str, Shape]] = {
        "input_norm": ("input_layernorm", H),
        "mlp_norm": ("post_attention_layernorm", H),
    }
    if is_head(kind):
        norms = {part: (name, H) for part, name in HEAD_KINDS[kind].norms.items()}
    elif config.has_post_norms:
        # the name that others give to the norm before the MLP stands for the one after attention
        norms["attention_post_norm"] = ("post_attention_layernorm", H)
        norms["mlp_norm"] = ("pre_feedforward_layernorm", H)
        norms["mlp_post_norm"] = ("post_feedforward_layernorm", H)
    if config.has_head_norms:
        norms["query_norm"] = ("self_attn.q_norm", (config.head_dim,))
        norms["key_norm"] = ("self_attn.k_norm", (config.head_dim,))
    return norms
