"""The 4-bit intermediate in the target's place: what a head learns where that verifies it."""

from pathlib import Path

import torch

from polybasic.chain.formats.tokenizer import load_tokenizer
from polybasic.chain.model.dequantized import load_dequantized
from polybasic.train.features.target import Target, checked_target


def load_intermediate(
    folder: Path, tokenizer: Path, device: torch.device, dtype: torch.dtype
) -> Target:
    """Load a 4-bit copy of a target, dequantized, as one whose states a head can learn.

    Its embedding and output projection are the target's as the copy stores them, in float16.

    Args:
        folder: of an AutoAWQ checkpoint.
        tokenizer: folder of the tokenizer, with a chat template.
        device: for its weights, which lie there whole.
        dtype: of its passes; the target's own is what a chain is served in.

    Raises:
        UserError: as `polybasic.chain.model.dequantized.load_dequantized`, or as
            `polybasic.train.features.target.load_target`.
    """
    model = load_dequantized(folder, dtype, device)
    return checked_target(model, load_tokenizer(tokenizer, "target's tokenizer"), folder)
