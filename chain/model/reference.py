"""Checkpoints as transformers models: for training, for quantizing, and as a reference."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.utils import logging

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.awq import dequantized_tensors
from polybasic.chain.formats.checkpoints.checkpoint import has_blocks, load_tensors
from polybasic.chain.formats.checkpoints.config import read_config


def load_reference_model(
    folder: Path, dtype: torch.dtype | str, device: torch.device | None = None
) -> PreTrainedModel:
    """Load a causal language model or an encoder-decoder; code in the folder is never run.

    Weights go straight to the device and dtype. On the CPU, weights stored in `dtype` stay mapped
    and are not copied; while others are converted, at most one file is mapped besides. Weights in
    4 to 8 bits are dequantized.

    Args:
        dtype: of the weights; "auto" keeps them as they are stored, dequantized ones in the dtype
            that the config names.
        device: default: the CPU.

    Raises:
        UserError: no config or weights, a damaged file, a pickle that holds more than tensors, a
            missing weight, or anything else that transformers refuses.
    """
    file = read_config(folder)
    is_in_few_bits = has_blocks(folder) or file.group_size is not None
    # PyTorch's fused attention has no soft-capping of scores
    attention = "eager" if file.content.get("model_type") == "gemma2" else "sdpa"
    is_on_cpu = device is None or device.type == "cpu"
    is_t5 = file.content.get("model_type") == "t5"
    kind: Any = AutoModelForSeq2SeqLM if is_t5 else AutoModelForCausalLM
    load: Callable[..., Any] = kind.from_pretrained
    try:
        with quiet_transformers():
            source: Path | None = folder
            given: dict[str, Any] = {}
            if is_in_few_bits:
                named = AutoConfig.from_pretrained(folder, local_files_only=True)
                dtype = getattr(torch, file.dtype) if isinstance(dtype, str) else dtype
                dense = load_tensors(folder, dtype)
                if file.in_4_bits:
                    del named.quantization_config
                    dense = dequantized_tensors(dense, dtype)
                source, given = None, {"config": named, "state_dict": dense}
                kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(named)]
                load = kind.from_pretrained
            model, report = load(
                source,
                **given,
                dtype="auto" if is_on_cpu and not is_in_few_bits else dtype,
                device_map=None if is_on_cpu else {"": device},
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise UserError(
            "cannot load the target",
            f"{folder} ({str(error).strip().splitlines()[0]})",
            f"name a folder that transformers' {kind.__name__} loads",
        ) from error
    require_all_weights(report["missing_keys"], folder)
    if is_on_cpu and isinstance(dtype, torch.dtype):
        _convert(model, dtype)
    return model.eval()


def require_all_weights(missing: Iterable[str], folder: Path) -> None:
    """Refuse missing weights, which transformers would initialise at random.

    Raises:
        UserError: the first of `missing`.
    """
    for name in sorted(missing):
        raise UserError("weight missing", f"{name} in {folder}", "write the checkpoint again")


def _convert(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert the weights, not the buffers: rotary frequencies are float32 in models of any dtype.

    In order of their addresses, because a file is unmapped with the last of its weights.
    """
    for parameter in sorted(model.parameters(), key=torch.Tensor.data_ptr):
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars for files that take a moment, and nothing on stdout."""
    if not torch.cuda.is_available():
        # transformers imports DeepSpeed to save, which prints to stdout that it chose the CPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows_bars:
            logging.enable_progress_bar()
