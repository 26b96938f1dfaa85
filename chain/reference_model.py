"""A checkpoint as transformers runs it: for training, for quantizing, and to compare with."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from polybasic.chain.checkpoint import weight_files
from polybasic.chain.errors import UserError
from polybasic.chain.files import read_json


def load_reference_model(
    folder: Path, dtype: torch.dtype | str, device: torch.device | None = None
) -> PreTrainedModel:
    """Load a causal language model; code in the folder is never run.

    Args:
        dtype: of the weights; "auto" keeps them as they are stored.
        device: default: the CPU.

    Raises:
        UserError: no config or weights, a weight that the model needs is missing, or what
            transformers refuses.
    """
    read_json(folder / "config.json", "model config")
    weight_files(folder)
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    try:
        with quiet_transformers():
            model, report = load(
                folder,
                dtype=dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            "cannot load the target",
            f"{folder} ({str(error).strip().splitlines()[0]})",
            "name a folder that transformers' AutoModelForCausalLM loads",
        ) from error
    require_all_weights(report["missing_keys"], folder)
    return model.eval() if device is None else model.eval().to(device)


def require_all_weights(missing: Iterable[str], folder: Path) -> None:
    """Refuse weights that transformers would leave at random.

    Raises:
        UserError: the first of `missing`.
    """
    for name in sorted(missing):
        raise UserError("weight missing", f"{name} in {folder}", "write the checkpoint again")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bars for files that are read or written in a moment, and nothing on stdout."""
    if not torch.cuda.is_available():
        # transformers imports DeepSpeed when it saves, which tells stdout that it took the CPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows_bars:
            logging.enable_progress_bar()
