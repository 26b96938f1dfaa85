"""Names and shapes of a layer's tensors, as the checkpoints of its family store them.

Shape legend: H hidden size, I intermediate size, A heads x head size, K key-value heads x head
size.
"""

from polybasic.chain.formats.config import DecoderConfig
from polybasic.chain.formats.manifest import HeadKind, Kind

Shape = tuple[int, ...]


DRAFT_TABLES = ("d2t", "t2d")
"""Tables of a head that drafts among a part of the vocabulary; see draft_vocabulary.py."""
HEAD_LAYER: dict[HeadKind, str] = {"eagle2": "layers.0", "eagle3": "midlayer"}
"""What the names of a head's layer begin with."""


def layer_linears(config: DecoderConfig, kind: Kind = "decoder") -> dict[str, dict[str, Shape]]:
    """[out, in] of a layer's linears by name, grouped as a `DecoderLayer` multiplies them.

    The members of a group lie side by side in their outputs, in this order.

    Args:
        kind: attention of an EAGLE-3 head's layer reads embedding and feature side by side.
    """
    H, I = config.hidden_size, config.intermediate_size  # noqa: E741
    read = 2 * H if kind == "eagle3" else H
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


def required_biases(config: DecoderConfig) -> list[str]:
    """Names of a layer's linears whose biases must be stored; others may be."""
    groups = layer_linears(config).values()
    return [name for group in groups for name in group if name.rpartition(".")[2] in config.biased]


def layer_norms(config: DecoderConfig, kind: Kind = "decoder") -> dict[str, tuple[str, Shape]]:
    """Name and shape of a layer's norms by their part in a `DecoderLayer`.

    Args:
        kind: the layer of an EAGLE-2 head has no norm before attention; that of an EAGLE-3 head
            has one of the embedding and one of the feature, which are the head's own parts.
    """
    H = (config.hidden_size,)
    if kind == "eagle2":
        return {"mlp_norm": ("post_attention_layernorm", H)}
    if kind == "eagle3":
        return {
            "embedding_norm": ("input_layernorm", H),
            "feature_norm": ("hidden_norm", H),
            "mlp_norm": ("post_attention_layernorm", H),
        }
    norms: dict[str, tuple[str, Shape]] = {
        "input_norm": ("input_layernorm", H),
        "mlp_norm": ("post_attention_layernorm", H),
    }
    if config.has_post_norms:
        # the name that others give to the norm before the MLP stands for the one after attention
        norms["attention_post_norm"] = ("post_attention_layernorm", H)
        norms["mlp_norm"] = ("pre_feedforward_layernorm", H)
        norms["mlp_post_norm"] = ("post_feedforward_layernorm", H)
    if config.has_head_norms:
        norms["query_norm"] = ("self_attn.q_norm", (config.head_dim,))
        norms["key_norm"] = ("self_attn.k_norm", (config.head_dim,))
    return norms
