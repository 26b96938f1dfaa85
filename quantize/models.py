"""Target and intermediate as transformers models in float32, for calibration and measurement."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from polybasic.chain.model import dequantized
from polybasic.chain.model.reference import load_reference_model

ONE_PLUS_NORMS = (Gemma2RMSNorm, Gemma3RMSNorm)
"""Norms that multiply by 1 + weight."""


def load_target(folder: Path) -> PreTrainedModel:
    """The target in float32.

    Raises:
        UserError: as `load_reference_model`.
    """
    return load_reference_model(folder, torch.float32)


def load_dequantized(folder: Path) -> PreTrainedModel:
    """An AutoAWQ checkpoint in float32, its 4-bit linears dequantized.

    Raises:
        UserError: as `polybasic.chain.model.dequantized.load_dequantized`.
    """
    return dequantized.load_dequantized(folder, torch.float32)


def norm_factor(norm: nn.Module) -> Tensor:
    """The factors by which a norm multiplies its channels [hidden size]."""
    weight: Tensor = norm.get_parameter("weight").detach()
    return 1 + weight if isinstance(norm, ONE_PLUS_NORMS) else weight
