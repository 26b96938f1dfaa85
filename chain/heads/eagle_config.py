"""The config.json of a draft head, in Llama style like EAGLE's own."""

from collections.abc import Sequence
from typing import Any, Protocol

from polybasic.chain.formats.checkpoints.decoder_config import LayerSizes, ModelSizes
from polybasic.chain.formats.head_kinds.block import MARKOV_RANK, NUM_POSITIONS
from polybasic.chain.formats.head_kinds.eagle3 import (
    EAGLE3_ARCHITECTURE,
    EAGLE_SECTION,
    LAYER_IDS,
)
from polybasic.chain.formats.head_kinds.kind import model_config


class HeadSizes(LayerSizes, ModelSizes, Protocol):
    """The sizes in the file, as a `DecoderConfig` has them."""

    @property
    def rope(self) -> dict[str, Any]: ...


def eagle_config(
    sizes: HeadSizes, has_qkv_biases: bool, dtype: str, draft_vocab_size: int | None = None
) -> dict[str, Any]:
    """The content of config.json for an EAGLE-2 head stored with an `fc.bias`.

    Args:
        sizes: of the head's one layer.
        has_qkv_biases: whether the file holds biases of queries, keys and values.
        dtype: of the weights.
        draft_vocab_size: tokens that the head can draft; None for all.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "bias": True,
        "qkv_bias": has_qkv_biases,
        **layer_config(sizes, dtype, draft_vocab_size),
    }


def block_config(
    sizes: HeadSizes,
    has_qkv_biases: bool,
    dtype: str,
    num_layers: int,
    num_positions: int,
    markov_rank: int,
    draft_vocab_size: int | None = None,
) -> dict[str, Any]:
    """The content of config.json for a block-parallel head, but for the section of its origin.

    Args:
        sizes, has_qkv_biases, dtype, draft_vocab_size: as `eagle_config`.
        num_layers, num_positions, markov_rank: as `HeadConfig` has them.
    """
    return eagle_config(sizes, has_qkv_biases, dtype, draft_vocab_size) | {
        "architectures": ["BlockParallelHead"],
        "bias": False,
        "num_hidden_layers": num_layers,
        NUM_POSITIONS: num_positions,
        MARKOV_RANK: markov_rank,
    }


def eagle3_config(
    sizes: HeadSizes,
    has_qkv_biases: bool,
    dtype: str,
    feature_layers: Sequence[int],
    draft_vocab_size: int | None = None,
    variants: Sequence[str] = (),
) -> dict[str, Any]:
    """The content of config.json for an EAGLE-3 head, which is as wide as its verifier.

    Args:
        sizes, has_qkv_biases, dtype, draft_vocab_size: as `eagle_config`.
        feature_layers: the verifier's layers whose inputs the head reads.
        variants: those of `polybasic.chain.formats.head_kinds.eagle3.VARIANTS` that it has.
    """
    return {
        "architectures": [EAGLE3_ARCHITECTURE],
        "bias": False,
        "qkv_bias": has_qkv_biases,
        "target_hidden_size": sizes.hidden_size,
        EAGLE_SECTION: {"use_aux_hidden_state": True, LAYER_IDS: list(feature_layers)},
        **dict.fromkeys(variants, True),
        **layer_config(
            sizes, dtype, sizes.vocab_size if draft_vocab_size is None else draft_vocab_size
        ),
    }


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers of a verifier whose inputs an EAGLE-3 head reads by default.

    They are EAGLE-3's own (Li et al., 2025): 2, the middle, and the third from the end; with few
    layers, the nearest to these, in order.
    """
    wanted = (2, num_layers // 2, num_layers - 3)
    first, middle, last = sorted(min(max(layer, 0), num_layers - 1) for layer in wanted)
    return first, middle, last


def layer_config(
    sizes: HeadSizes, dtype: str, draft_vocab_size: int | None = None
) -> dict[str, Any]:
    """What a config.json says of one layer of Llama's."""
    scaling = {name: value for name, value in sizes.rope.items() if name != "rope_theta"}
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "rope_theta": sizes.rope["rope_theta"],
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "tie_word_embeddings": False,
        **model_config(sizes, dtype, draft_vocab_size),
    }
