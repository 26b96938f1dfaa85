"""Checkpoints of a training run: whole folders named by step, the newest of which is resumed."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import (
    disk_errors,
    partial_path,
    read_json,
    whole_folder,
    write_json,
)
from polybasic.train.processes import is_first_process, num_processes, wait_for_all

RECORD_NAME = "run.json"
"""The record of the run, beside every checkpoint."""

_PREFIX = "step-"
_TAG = "engine"
_STATE_NAME = "state.json"
_BEST_NAME = "best.safetensors"


@dataclass
class RunState:
    """What a run knows beside weights, optimizer and schedule.

    Batches and noise are functions of seed and step, so the step is the data's position and the
    generators' state.
    """

    identity: str
    num_processes: int = 1
    step: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    best_step: int = 0
    best_accepted_length: float = 0.0
    best_accepted_by_depth: tuple[float, ...] = ()
    best_accepted_by_task: dict[str, float] = field(default_factory=dict)
    accepted_length: float | None = None
    initial_accepted_length: float | None = None


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in `folder`; all that bear a final name are whole."""
    found = sorted(folder.glob(f"{_PREFIX}*")) if folder.is_dir() else []
    return found[-1] if found else None


def save_checkpoint(
    folder: Path,
    engine: Any,
    state: RunState,
    best: dict[str, Tensor],
    record: dict[str, Any],
    keep_every_steps: int | None,
) -> Path:
    """Write a checkpoint whole, then remove older ones; all processes call this.

    Args:
        folder: of the run's checkpoints.
        engine: with weights, optimizer and schedule.
        state: the first process's.
        best: weights of the best evaluation; the first process's.
        record: what was run; `run.json` holds it with the step.
        keep_every_steps: checkpoints of its multiples stay; None: of no other step.

    Raises:
        UserError: the disk is full; the older checkpoint is still there.
    """
    path = folder / f"{_PREFIX}{state.step:08d}"
    with _folder_of_all(path) as partial:
        engine.save_checkpoint(
            str(partial), tag=_TAG, save_latest=False, exclude_frozen_parameters=True
        )
        if is_first_process():
            if best:
                save_file(best, partial / _BEST_NAME)
            write_json(partial / RECORD_NAME, {**record, "step": state.step})
            write_json(partial / _STATE_NAME, asdict(state))
    if is_first_process():
        for other in folder.glob(f"{_PREFIX}*"):
            if other != path and not _is_kept(other, keep_every_steps):
                shutil.rmtree(other)
    return path


def _is_kept(path: Path, keep_every_steps: int | None) -> bool:
    step = int(path.name.removeprefix(_PREFIX))
    return keep_every_steps is not None and step % keep_every_steps == 0


@contextmanager
def _folder_of_all(path: Path) -> Iterator[Path]:
    """`whole_folder` for all processes: the first one makes it, and renames it after the last."""
    if is_first_process():
        with whole_folder(path) as partial:
            wait_for_all()
            yield partial
            wait_for_all()
    else:
        wait_for_all()
        with disk_errors(path):
            yield partial_path(path)
        wait_for_all()


def load_checkpoint(path: Path, engine: Any, identity: str) -> tuple[RunState, dict[str, Tensor]]:
    """Bring `engine` to where the checkpoint was taken; returns its state and best weights.

    Raises:
        UserError: the checkpoint is of another run (settings, data, target or seed differ), or
            of another number of processes.
    """
    stored = read_json(path / _STATE_NAME, "checkpoint state")
    if stored["num_processes"] != num_processes():
        raise UserError(
            f"interrupted training in another number of processes than {num_processes()}",
            f"{path} (num_processes {stored['num_processes']})",
            f"set train.num_processes={stored['num_processes']} to continue it, or remove "
            f"{path.parent} to start over",
        )
    if stored["identity"] != identity:
        raise UserError(
            "interrupted training with other settings, data, target or seed",
            str(path),
            f"restore them to continue it, or remove {path.parent} to start anew",
        )
    loaded, _ = engine.load_checkpoint(str(path), tag=_TAG, load_module_strict=False)
    if loaded is None:
        raise UserError("checkpoint is not complete", str(path), "remove it and run again")
    best = path / _BEST_NAME
    return RunState(**stored), load_file(best) if best.exists() else {}
