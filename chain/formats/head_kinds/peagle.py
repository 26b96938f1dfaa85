"""P-EAGLE heads: EAGLE-3 heads that give all positions of a draft in one pass (arXiv 2602.01469).

After the last token's row come rows that read a mask token and a learned input in place of the
verifier's layers, one for each further position. The first layer is EAGLE-3's, those after it are
Llama's. Names and fields are those of speculators 0.9.0 (speculators/models/peagle) and SpecForge
0.2.0 (specforge/modeling/draft/peagle.py); heads are trained with an embedding of their own.
"""

from dataclasses import replace
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.decoder_config import HeadConfig, Shape
from polybasic.chain.formats.head_kinds.block import NUM_POSITIONS
from polybasic.chain.formats.head_kinds.eagle3 import (
    EAGLE3,
    NUM_FEATURE_LAYERS,
    eagle3_fields,
    eagle3_tensors,
)
from polybasic.chain.formats.head_kinds.kind import MAX_POSITIONS, Content, is_whole

PEAGLE_ARCHITECTURE = "PEagleDraftModel"
MASK_TOKEN, MASK_FEATURE = "mask_token_id", "mask_hidden"
"""In its config.json, and the tensor that stands for the inputs of the verifier's layers."""


def _fields(content: Content, where: str) -> dict[str, Any]:
    vocab_size, found = content.get("vocab_size"), {}
    tokens = range(vocab_size if isinstance(vocab_size, int) else 1)
    for key, allowed in ((MASK_TOKEN, tokens), (NUM_POSITIONS, range(2, MAX_POSITIONS + 1))):
        value = found[key] = content.get(key)
        if not is_whole(value, allowed):
            raise UserError(
                "malformed head config",
                f"{where} {key} {value!r}, wanted {allowed.start} to {allowed.stop - 1}",
                "import the head again",
            )
    return eagle3_fields(content, where) | found


def _tensors(config: HeadConfig) -> dict[str, Shape]:
    width = NUM_FEATURE_LAYERS * config.hidden_size
    return {**eagle3_tensors(config), MASK_FEATURE: (1, 1, width)}


PEAGLE = replace(
    EAGLE3,
    name="peagle",
    title="P-EAGLE",
    layer="layers.{}",
    # a block-parallel head's are Llama's
    further="block",
    tensors=_tensors,
    fields=_fields,
    reads_own_embedding=True,
    recognizes=lambda content: PEAGLE_ARCHITECTURE in (content.get("architectures") or []),
)
