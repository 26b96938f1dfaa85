"""Names and shapes of a layer's tensors, as the checkpoints of its family store them.

Shape legend: H hidden size, I intermediate size, A heads x head size, K key-value heads x head
size.
"""

from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig, Shape
from polybasic.chain.formats.checkpoints.kinds import Kind, is_head
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS

DRAFT_TABLES = ("d2t", "t2d")
"""Tables of a head that drafts among a part of the vocabulary; see draft_vocabulary.py."""


def layer_linears(config: DecoderConfig, kind: Kind = "decoder") -> dict[str, dict[str, Shape]]:
    """[out, in] of a layer's linears by name, grouped as `LayerWeights` has them.

    The members of a group lie side by side in their outputs, in this order.

    Args:
        kind: of head, whose attention may read several states side by side.
    """
    H, I = config.hidden_size, config.intermediate_size  # noqa: E741
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
