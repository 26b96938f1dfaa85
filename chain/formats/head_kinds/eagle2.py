"""EAGLE-2 heads, in the layout of EAGLE's own code; EAGLE-1's are the same."""

from polybasic.chain.formats.head_kinds.kind import HeadKind

EAGLE2 = HeadKind(
    name="eagle2",
    title="EAGLE-2",
    layer="layers.0",
    # there is none before attention
    norms={"mlp_norm": "post_attention_layernorm"},
    tensors=lambda config: {"fc.weight": (config.hidden_size, 2 * config.hidden_size)},
    load="polybasic.chain.model.loading:load_head",
    drafter="polybasic.deploy.runtime.drafters.head:EagleDrafter",
)
