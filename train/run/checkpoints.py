"""Checkpoints of a training run: whole folders named by step, the newest of which is resumed."""

import math
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.group import is_first_process, wait_for_all
from polybasic.chain.formats.files import read_json, whole_folder, write_json
from polybasic.train.engine import engine_state, set_engine_state

RECORD_NAME = "run.json"
"""The record of the run, beside every checkpoint."""

_PREFIX = "step-"
_LEARNED_NAME = "learned.safetensors"
_STATE_NAME = "state.json"
_BEST_NAME = "best.safetensors"
_SMOOTHING = 0.1  # share of the latest loss in the smoothed one
_EXPLOSION = 10.0  # times the first loss


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
    first_loss: float = float("nan")
    smoothed_loss: float = float("nan")
    best_step: int = 0
    best_accepted_length: float = 0.0
    best_accepted_by_depth: tuple[float, ...] = ()
    best_accepted_by_task: dict[str, float] = field(default_factory=dict)
    accepted_length: float | None = None
    initial_accepted_length: float | None = None

    def follow(self, loss: float) -> None:
        """Take the loss of a step."""
        self.loss = loss
        if math.isnan(self.first_loss):
            self.first_loss = self.smoothed_loss = loss
        self.smoothed_loss += _SMOOTHING * (loss - self.smoothed_loss)

    @property
    def has_exploded(self) -> bool:
        """Whether the smoothed loss is ten times the first one."""
        return self.smoothed_loss > _EXPLOSION * self.first_loss


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
        engine: whose weights and optimizer are saved whole, for any number of processes.
        state: the first process's.
        best: weights of the best evaluation; the first process's.
        record: what was run; `run.json` holds it with the step.
        keep_every_steps: checkpoints of its multiples stay; None: of no other step.

    Raises:
        UserError: the disk is full; the older checkpoint is still there.
    """
    path = folder / f"{_PREFIX}{state.step:08d}"
    learned = engine_state(engine)
    if is_first_process():
        with whole_folder(path) as partial:
            save_file(learned, partial / _LEARNED_NAME)
            if best:
                save_file(best, partial / _BEST_NAME)
            write_json(partial / RECORD_NAME, {**record, "step": state.step})
            write_json(partial / _STATE_NAME, asdict(state))
        for other in folder.glob(f"{_PREFIX}*"):
            if other != path and not _is_kept(other, keep_every_steps):
                shutil.rmtree(other)
    wait_for_all()
    return path


def _is_kept(path: Path, keep_every_steps: int | None) -> bool:
    step = int(path.name.removeprefix(_PREFIX))
    return keep_every_steps is not None and step % keep_every_steps == 0


def load_checkpoint(path: Path, engine: Any, identity: str) -> tuple[RunState, dict[str, Tensor]]:
    """Bring `engine` to where the checkpoint was taken; returns its state and best weights.

    The number of processes may be another one than then. All of them call this.

    Raises:
        UserError: the checkpoint is of another run (settings, data, target or seed differ).
    """
    stored = read_json(path / _STATE_NAME, "checkpoint state")
    if stored["identity"] != identity:
        raise UserError(
            "interrupted training with other settings, data, target or seed",
            str(path),
            f"restore them to continue it, or remove {path.parent} to start anew",
        )
    set_engine_state(engine, path / _LEARNED_NAME, stored["step"])
    best = path / _BEST_NAME
    return RunState(**stored), load_file(best) if best.exists() else {}
