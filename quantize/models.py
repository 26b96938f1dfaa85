"""Target and intermediate as transformers models in float32, for calibration and measurement."""

from collections.abc import Iterable, Iterator
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
        UserError: no config or weights, or a weight that the model needs is missing or of
            another shape.
    """
    read_json(folder / "config.json", "model config")
    weight_files(folder)
    return _load(folder, folder, None)


def load_dequantized(folder: Path) -> PreTrainedModel:
    """Load an AutoAWQ checkpoint with its 4-bit linears dequantized.

    Raises:
        UserError: as `load_target`, or another quantization.
    """
    config = read_json(folder / "config.json", "model config")
    read_quantization_config(config, folder / "config.json")
    del config["quantization_config"]
    return _load(folder, None, config, _dequantized_tensors(load_tensors(folder)))


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


def _load(
    where: Path,
    folder: Path | None,
    config: dict[str, Any] | None,
    tensors: dict[str, Tensor] | None = None,
) -> PreTrainedModel:
    with _without_loading_bar():
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=None if config is None else AutoConfig.for_model(**config),
            state_dict=tensors,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    # transformers would go on with random weights in their place
    unusable = sorted({*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])})
    if unusable:
        raise UserError(
            "weight missing or of another shape",
            f"{unusable[0]} in {where} ({len(unusable)} in all)",
            "write or fetch the checkpoint again",
        )
    return model.eval()


@contextmanager
def _without_loading_bar() -> Iterator[None]:
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
