"""A 4-bit checkpoint as a transformers model with dequantized linears."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from polybasic.chain.formats.awq import QuantizedWeight, dequantize
from polybasic.chain.formats.checkpoint import load_tensors
from polybasic.chain.formats.config import read_config
from polybasic.chain.formats.quantization import read_quantization_config
from polybasic.chain.model.reference import require_all_weights


def load_dequantized(
    folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Load an AutoAWQ checkpoint.

    Args:
        folder: of the checkpoint.
        dtype: of all its weights.
        device: of all its weights.

    Raises:
        UserError: no config, another quantization, no weights, a damaged file, or a weight that
            the model needs is missing.
    """
    config = read_config(folder).content
    read_quantization_config(config, folder / "config.json")
    del config["quantization_config"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    tensors = _dequantized_tensors(load_tensors(folder), dtype)
    missing = set(model.load_state_dict(tensors, strict=False).missing_keys)
    require_all_weights(missing - set(model.all_tied_weights_keys), folder)
    return model.to(device).eval()


def packed_weight(tensors: Mapping[str, Tensor], linear: str) -> QuantizedWeight:
    """The 4-bit weight of a linear from a checkpoint's tensors.

    Raises:
        UserError: tensors that are not in AutoAWQ's GEMM format.
    """
    packed = (tensors[f"{linear}.{part}"] for part in ("qweight", "qzeros", "scales"))
    return QuantizedWeight.unpack(*packed, name=linear)


def _dequantized_tensors(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    dense = {}
    for name, tensor in tensors.items():
        linear, _, part = name.rpartition(".")
        if part == "qweight":
            dense[f"{linear}.weight"] = dequantize(packed_weight(tensors, linear)).to(dtype)
        elif part not in ("qzeros", "scales"):
            dense[name] = tensor.to(dtype)
    return dense
