"""Target and intermediate as transformers models in float32, for calibration and measurement."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from polybasic.chain.awq import QuantizedWeight, dequantize, read_quantization_config
from polybasic.chain.checkpoint import load_tensors, weight_files
from polybasic.chain.errors import UserError
from polybasic.chain.files import read_json

Item = TypeVar("Item")


def load_target(folder: Path) -> PreTrainedModel:
    """Load a checkpoint with transformers.

    Raises:
        UserError: no config or weights, or a weight that the model needs is missing.
    """
    read_json(folder / "config.json", "model config")
    weight_files(folder)
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    with _without_loading_bar():
        model, report = load(
            folder,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    _require_all_weights(report["missing_keys"], folder)
    return model.eval()


def load_dequantized(folder: Path) -> PreTrainedModel:
    """Load an AutoAWQ checkpoint with its 4-bit linears dequantized.

    Raises:
        UserError: as `load_target`, or another quantization.
    """
    config = read_json(folder / "config.json", "model config")
    read_quantization_config(config, folder / "config.json")
    del config["quantization_config"]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=torch.float32, attn_implementation="sdpa"
    )
    tensors = _dequantized_tensors(load_tensors(folder))
    missing = set(model.load_state_dict(tensors, strict=False).missing_keys)
    _require_all_weights(missing - set(model.all_tied_weights_keys), folder)
    return model.eval()


def tracked(items: Iterable[Item], description: str, total: int) -> Iterator[Item]:
    """Iterate with a progress bar on stderr."""
    console = Console(stderr=True)
    yield from track(items, description, total=total, console=console)


def _dequantized_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    dense = {}
    for name, tensor in tensors.items():
        linear, _, part = name.rpartition(".")
        if part == "qweight":
            packed = (tensors[f"{linear}.{part}"] for part in ("qweight", "qzeros", "scales"))
            dense[f"{linear}.weight"] = dequantize(QuantizedWeight.unpack(*packed, name=linear))
        elif part not in ("qzeros", "scales"):
            dense[name] = tensor.float()
    return dense


def _require_all_weights(missing: Iterable[str], folder: Path) -> None:
    # transformers would go on with random weights in their place
    for name in sorted(missing):
        raise UserError("weight missing", f"{name} in {folder}", "write the checkpoint again")


@contextmanager
def _without_loading_bar() -> Iterator[None]:
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
