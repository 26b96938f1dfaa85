"""Target and intermediate as transformers models in float32, for calibration and measurement."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from polybasic.chain.awq import QuantizedWeight, dequantize, read_quantization_config
from polybasic.chain.checkpoint import load_tensors
from polybasic.chain.files import read_json
from polybasic.chain.reference_model import load_reference_model, require_all_weights

Item = TypeVar("Item")

ONE_PLUS_NORMS = (Gemma2RMSNorm, Gemma3RMSNorm)
"""Norms that multiply by 1 + weight."""


def load_target(folder: Path) -> PreTrainedModel:
    """The target in float32.

    Raises:
        UserError: as `load_reference_model`.
    """
    return load_reference_model(folder, torch.float32)


def load_dequantized(folder: Path) -> PreTrainedModel:
    """Load an AutoAWQ checkpoint with its 4-bit linears dequantized.

    Raises:
        UserError: as `load_target`, or another quantization.
    """
    config = read_json(folder / "config.json", "model config")
    read_quantization_config(config, folder / "config.json")
    del config["quantization_config"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    tensors = _dequantized_tensors(load_tensors(folder))
    missing = set(model.load_state_dict(tensors, strict=False).missing_keys)
    require_all_weights(missing - set(model.all_tied_weights_keys), folder)
    return model.eval()


def norm_factor(norm: nn.Module) -> Tensor:
    """What a norm multiplies its channels by [hidden size]."""
    weight: Tensor = norm.get_parameter("weight").detach()
    return 1 + weight if isinstance(norm, ONE_PLUS_NORMS) else weight


def tracked(items: Iterable[Item], description: str, total: int) -> Iterator[Item]:
    """Iterate with a progress bar on stderr."""
    console = Console(stderr=True)
    yield from track(items, description, total=total, console=console)


def packed_weight(tensors: Mapping[str, Tensor], linear: str) -> QuantizedWeight:
    """The 4-bit weight of a linear from a checkpoint's tensors.

    Raises:
        UserError: tensors that are not in AutoAWQ's GEMM format.
    """
    packed = (tensors[f"{linear}.{part}"] for part in ("qweight", "qzeros", "scales"))
    return QuantizedWeight.unpack(*packed, name=linear)


def _dequantized_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    dense = {}
    for name, tensor in tensors.items():
        linear, _, part = name.rpartition(".")
        if part == "qweight":
            dense[f"{linear}.weight"] = dequantize(packed_weight(tensors, linear))
        elif part not in ("qzeros", "scales"):
            dense[name] = tensor.float()
    return dense
