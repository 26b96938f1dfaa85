"""Heads like EAGLE-2's but for names, a norm before attention and an lm_head of their own.

The record knows no torch: what loads and drafts is imported when a head is loaded.
"""

from dataclasses import replace

from polybasic.chain.formats.head_kinds.eagle2 import EAGLE2

KIND = replace(
    EAGLE2,
    name="toy",
    title="Toy",
    layer="block",
    norms={"input_norm": "norm_before", "mlp_norm": "norm_between"},
    tensors=lambda config: {
        "join.weight": (config.hidden_size, 2 * config.hidden_size),
        "lm_head.weight": (config.num_draft_tokens, config.hidden_size),
    },
    has_lm_head=True,
    load="toy.drafting:load_toy_head",
    drafter="toy.drafting:ToyDrafter",
    fields=lambda content, where: {"feature_layers": tuple(content.get("toy_layers", ()))},
)
