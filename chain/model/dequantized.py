"""A 4-bit checkpoint as a transformers model with dequantized linears."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.quantization import read_quantization_config
from polybasic.chain.model.reference import load_reference_model


def load_dequantized(
    folder: Path, dtype: torch.dtype, device: torch.device | None = None
) -> PreTrainedModel:
    """Load an AutoAWQ checkpoint.

    Args:
        folder: of the checkpoint.
        dtype: of all its weights.
        device: of all its weights; default: the CPU.

    Raises:
        UserError: it is not quantized, or as `load_reference_model`.
    """
    config = read_config(folder)
    read_quantization_config(config.content, config.path)
    return load_reference_model(folder, dtype, device)
