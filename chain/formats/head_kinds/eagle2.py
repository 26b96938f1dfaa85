"""EAGLE-2 heads, in the layout of EAGLE's own code; EAGLE-1's are the same."""

from polybasic.chain.formats.decoder_config import HeadConfig, Shape
from polybasic.chain.formats.head_kinds.kind import HeadKind


def _tensors(config: HeadConfig) -> dict[str, Shape]:
    return {"fc.weight": (config.hidden_size, 2 * config.hidden_size)}


EAGLE2 = HeadKind(
    name="eagle2",
    title="EAGLE-2",
    layer="layers.0",
    # there is none before attention
    norms={"mlp_norm": "post_attention_layernorm"},
    tensors=_tensors,
    load="polybasic.chain.model.loading:load_head",
    drafter="polybasic.deploy.drafters.head:EagleDrafter",
)
