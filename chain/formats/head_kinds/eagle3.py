"""EAGLE-3 heads, in the layout of EAGLE's own code."""

from typing import Any

from polybasic.chain.errors import UserError
from polybasic.chain.formats.decoder_config import HeadConfig, Shape
from polybasic.chain.formats.head_kinds.kind import Content, HeadKind

EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"
"""In the config.json of an EAGLE-3 head."""
NUM_FEATURE_LAYERS = 3
"""Layers of the verifier that an EAGLE-3 head reads."""
EAGLE_SECTION, LAYER_IDS = "eagle_config", "eagle_aux_hidden_state_layer_ids"
"""Where its config.json names them."""


def _layer_ids(content: Content) -> Any:
    section = content.get(EAGLE_SECTION)
    return section.get(LAYER_IDS) if isinstance(section, dict) else None


def _recognizes(content: Content) -> bool:
    is_named = EAGLE3_ARCHITECTURE in (content.get("architectures") or [])
    return is_named or _layer_ids(content) is not None


def _fields(content: Content, where: str) -> dict[str, Any]:
    layers = _layer_ids(content)
    if (
        not isinstance(layers, list)
        or len(layers) != NUM_FEATURE_LAYERS
        or not all(isinstance(layer, int) and layer >= 0 for layer in layers)
    ):
        raise UserError(
            "malformed head config",
            f"{where} {EAGLE_SECTION}.{LAYER_IDS} {layers}",
            f"name the {NUM_FEATURE_LAYERS} layers whose inputs the head reads",
        )
    return {"feature_layers": tuple(layers)}


def _tensors(config: HeadConfig) -> dict[str, Shape]:
    H = config.hidden_size
    return {
        "fc.weight": (H, NUM_FEATURE_LAYERS * H),
        "norm.weight": (H,),
        "lm_head.weight": (config.num_draft_tokens, H),
    }


EAGLE3 = HeadKind(
    name="eagle3",
    title="EAGLE-3",
    layer="midlayer",
    norms={
        "embedding_norm": "input_layernorm",
        "feature_norm": "hidden_norm",
        "mlp_norm": "post_attention_layernorm",
    },
    tensors=_tensors,
    load="polybasic.chain.model.loading:load_head",
    drafter="polybasic.deploy.drafters.head:EagleDrafter",
    num_attended=2,
    has_lm_head=True,
    fields=_fields,
    recognizes=_recognizes,
)
