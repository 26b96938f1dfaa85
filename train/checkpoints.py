"""Checkpoints of a training run: whole folders named by step, the newest of which is resumed."""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polybasic.chain.errors import UserError
from polybasic.chain.files import read_json, whole_folder, write_json

_PREFIX = "step-"
_TAG = "engine"


@dataclass
class RunState:
    """What a run knows beside weights, optimizer and schedule.

    Batches and noise are functions of seed and step, so the step is the data's position and the
    generators' state.
    """

    identity: str
    step: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    best_step: int = 0
    best_accepted_length: float = 0.0
    best_accepted_by_depth: tuple[float, ...] = ()


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in `folder`; all that bear a final name are whole."""
    found = sorted(folder.glob(f"{_PREFIX}*")) if folder.is_dir() else []
    return found[-1] if found else None


def save_checkpoint(folder: Path, engine: Any, state: RunState, best: dict[str, Tensor]) -> Path:
    """Write a checkpoint whole, then remove the older ones.

    Raises:
        UserError: the disk is full; the older checkpoint is still there.
    """
    path = folder / f"{_PREFIX}{state.step:08d}"
    with whole_folder(path) as partial:
        engine.save_checkpoint(
            str(partial), tag=_TAG, save_latest=False, exclude_frozen_parameters=True
        )
        if best:
            save_file(best, partial / "best.safetensors")
        write_json(partial / "state.json", asdict(state))
    for other in folder.glob(f"{_PREFIX}*"):
        if other != path:
            shutil.rmtree(other)
    return path


def load_checkpoint(path: Path, engine: Any, identity: str) -> tuple[RunState, dict[str, Tensor]]:
    """Bring `engine` to where the checkpoint was taken; returns its state and best weights.

    Raises:
        UserError: the checkpoint is of another run (settings, data, target or seed differ).
    """
    state = RunState(**read_json(path / "state.json", "checkpoint state"))
    if state.identity != identity:
        raise UserError(
            "interrupted training with other settings, data, target or seed",
            str(path),
            f"restore them to continue it, or remove {path.parent} to start anew",
        )
    loaded, _ = engine.load_checkpoint(str(path), tag=_TAG, load_module_strict=False)
    if loaded is None:
        raise UserError("checkpoint is not complete", str(path), "remove it and run again")
    best = path / "best.safetensors"
    return state, load_file(best) if best.exists() else {}


def head_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """A copy on the CPU of what is trained (the frozen embedding is left out)."""
    return {
        name: parameter.detach().to("cpu", copy=True).contiguous()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
