"""The config.json of an EAGLE-2 head, in the style of the Llama family as EAGLE's own."""

from typing import Any, Protocol

from polybasic.chain.config import LayerSizes


class HeadSizes(LayerSizes, Protocol):
    """What the file says of a head's layer; a `DecoderConfig` says it."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def context_tokens(self) -> int: ...
    @property
    def rope(self) -> dict[str, Any]: ...


def eagle_config(sizes: HeadSizes, has_qkv_biases: bool, dtype: str) -> dict[str, Any]:
    """The content of config.json for a head that is stored with an `fc.bias`.

    Args:
        sizes: of the head's one layer.
        has_qkv_biases: whether the file holds biases of queries, keys and values.
        dtype: of the weights.
    """
    scaling = {name: value for name, value in sizes.rope.items() if name != "rope_theta"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bias": True,
        "qkv_bias": has_qkv_biases,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope["rope_theta"],
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "max_position_embeddings": sizes.context_tokens,
        "vocab_size": sizes.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
