"""Medusa's heads (Cai et al., arXiv 2401.10774) and Hydra's (Ankner et al., arXiv 2402.05109).

A folder holds several small heads, one for each place of a path. Config.json and names are those
with which vLLM reads Medusa's; Hydra's are spelled alike.
"""

from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.decoder_config import HeadConfig, Shape
from polybasic.chain.formats.head_kinds.kind import MAX_POSITIONS, Content, HeadKind, is_whole

NUM_HEADS, NUM_BLOCKS = "num_heads", "num_hidden_layers"
"""In config.json: tokens of a path, and residual blocks of each head."""


def _has_type(name: str, content: Content) -> bool:
    return content.get("model_type") == name or f"{name}_num_heads" in content


def _fields(content: Content, where: str) -> dict[str, Any]:
    found = {key: content.get(key) for key in (NUM_HEADS, NUM_BLOCKS)}
    for key, value in found.items():
        if not is_whole(value, range(1, MAX_POSITIONS + 1)):
            raise UserError(
                "malformed head config",
                f"{where} {key} {value!r}, wanted 1 to {MAX_POSITIONS}",
                "import the head with `polybasic run ... draft.model=FOLDER`, or write it again",
            )
    return {"num_positions": found[NUM_HEADS], "num_blocks": found[NUM_BLOCKS]}


def _medusa_tensors(config: HeadConfig) -> dict[str, Shape]:
    H, shapes = config.hidden_size, dict[str, Shape]()
    for head in range(config.num_positions or 0):
        for block in range(config.num_blocks):
            shapes[f"blocks.{head}.layers.{block}.weight"] = (H, H)
        shapes[f"lm_heads.{head}.weight"] = (config.num_draft_tokens, H)
    return shapes


def _hydra_tensors(config: HeadConfig) -> dict[str, Shape]:
    """The first block of a head reads the state and the embeddings of the path side by side."""
    H, shapes = config.hidden_size, _medusa_tensors(config)
    for head in range(config.num_positions or 0):
        for name in ("layers.0", "residual"):
            shapes[f"blocks.{head}.{name}.weight"] = (H, (head + 2) * H)
    return shapes


MEDUSA = HeadKind(
    name="medusa",
    title="Medusa",
    tensors=_medusa_tensors,
    load="polybasic.chain.model.medusa:load_medusa",
    drafter="polybasic.deploy.runtime.drafters.head:EagleDrafter",
    has_lm_head=True,
    fields=_fields,
    recognizes=lambda content: _has_type("medusa", content),
)
HYDRA = HeadKind(
    name="hydra",
    title="Hydra",
    tensors=_hydra_tensors,
    load="polybasic.chain.model.medusa:load_medusa",
    drafter="polybasic.deploy.runtime.drafters.head:EagleDrafter",
    has_lm_head=True,
    fields=_fields,
    recognizes=lambda content: _has_type("hydra", content),
)
