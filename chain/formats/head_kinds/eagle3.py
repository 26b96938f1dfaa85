"""EAGLE-3 heads, in the layout of EAGLE's own code.

EAGLE-3.1 norms each layer's part of what fc reads (`fc_norm`) and drafts on from the normed output
(`norm_output`). Both fields, `norm_before_fc` and `norm_before_residual` are those of speculators,
vLLM and SGLang.
"""

from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.decoder_config import HeadConfig, Shape
from polybasic.chain.formats.head_kinds.kind import Content, HeadKind

EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"
"""In the config.json of an EAGLE-3 head."""
NUM_FEATURE_LAYERS = 3
"""Layers of the verifier that an EAGLE-3 head reads."""
EAGLE_SECTION, LAYER_IDS = "eagle_config", "eagle_aux_hidden_state_layer_ids"
"""Where its config.json names them."""
NORM_EACH, NORM_ALL = "fc_norm", "norm_before_fc"
"""Whether it norms each layer's part of what fc reads, or all of it at once."""
NORM_RESIDUAL, NORM_OUTPUT = "norm_before_residual", "norm_output"
"""Whether its layer adds to the normed feature, and whether it drafts on from the normed output."""
VARIANTS = NORM_EACH, NORM_ALL, NORM_RESIDUAL, NORM_OUTPUT


def _layer_ids(content: Content) -> Any:
    section = content.get(EAGLE_SECTION)
    return section.get(LAYER_IDS) if isinstance(section, dict) else None


def _recognizes(content: Content) -> bool:
    is_named = EAGLE3_ARCHITECTURE in (content.get("architectures") or [])
    return is_named or _layer_ids(content) is not None


def eagle3_fields(content: Content, where: str) -> dict[str, Any]:
    """See `HeadKind.fields`."""
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
    if content.get(NORM_EACH) and content.get(NORM_ALL):
        raise UserError(
            "malformed head config", f"{where} {NORM_EACH} and {NORM_ALL} true", "keep one of them"
        )
    return {
        "feature_layers": tuple(layers),
        "feature_norms": NUM_FEATURE_LAYERS * bool(content.get(NORM_EACH))
        + bool(content.get(NORM_ALL)),
        "norms_residual": bool(content.get(NORM_RESIDUAL)),
        "norms_output": bool(content.get(NORM_OUTPUT)),
        # layers like those of Qwen3
        "has_head_norms": content.get("model_type") == "qwen3",
    }


def variants_of(config: HeadConfig) -> tuple[str, ...]:
    """Which of `VARIANTS` a head is, as its config.json says."""
    has = {
        NORM_EACH: config.feature_norms > 1,
        NORM_ALL: config.feature_norms == 1,
        NORM_RESIDUAL: config.norms_residual,
        NORM_OUTPUT: config.norms_output,
    }
    return tuple(key for key in VARIANTS if has[key])


def feature_norm_names(num_norms: int) -> list[str]:
    """Tensors of the norms of what fc reads: one for each layer, or one for all."""
    if num_norms == 1:
        return ["input_norm.weight"]
    return [f"fc_norm.{number}.weight" for number in range(num_norms)]


def eagle3_tensors(config: HeadConfig) -> dict[str, Shape]:
    """See `HeadKind.tensors`."""
    H = config.hidden_size
    norms = feature_norm_names(config.feature_norms)
    return {
        "fc.weight": (H, NUM_FEATURE_LAYERS * H),
        **{name: (NUM_FEATURE_LAYERS * H // len(norms),) for name in norms},
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
    tensors=eagle3_tensors,
    load="polybasic.chain.model.loading:load_head",
    drafter="polybasic.deploy.runtime.drafters.head:EagleDrafter",
    num_attended=2,
    has_lm_head=True,
    fields=eagle3_fields,
    recognizes=_recognizes,
)
