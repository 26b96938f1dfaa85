"""Where the numbers of a run go: metrics.jsonl always, wandb or tensorboard when asked."""

import json
from pathlib import Path
from typing import Any, Literal, Protocol

from polybasic.chain.formats.files import disk_errors, whole_file


class Tracker(Protocol):
    """What shows numbers elsewhere; a run of wandb is one."""

    def log(self, numbers: dict[str, float], step: int) -> Any:
        """Take the numbers of a step."""

    def finish(self) -> Any:
        """No number follows."""


class MetricsLog:
    """JSON lines, each with a `step`; a resumed run drops the lines after its checkpoint.

    Args:
        path: the file.
        resume_step: lines up to this step stay; 0 starts anew.
        tracker: gets the same numbers, one by one: `agreement/2` is the second of a list,
            `accepted_by_task/math` the entry of a mapping.
    """

    def __init__(self, path: Path, resume_step: int, tracker: Tracker | None) -> None:
        kept: list[str] = []
        if resume_step and path.exists():
            lines = path.read_text("utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= resume_step]
        with whole_file(path) as partial:
            partial.write_text("".join(line + "\n" for line in kept), "utf-8")
        self._path = path
        self._tracker = tracker

    def write(self, step: int, numbers: dict[str, Any]) -> None:
        """Append one line.

        Raises:
            UserError: the disk is full.
        """
        with disk_errors(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")
        if self._tracker is not None:
            self._tracker.log(_one_by_one(numbers), step=step)

    def finish(self) -> None:
        """No line follows."""
        if self._tracker is not None:
            self._tracker.finish()


def start_tracker(
    kind: Literal["none", "wandb", "tensorboard"],
    folder: Path,
    run_id: str,
    settings: dict[str, Any],
    resume_step: int,
) -> Tracker | None:
    """Start or continue what `train.log` names.

    Args:
        kind: wandb (WANDB_MODE and the like apply), or tensorboard, whose events are written to
            `tensorboard` in the folder.
        folder: of the run.
        run_id: wandb's name of the run, by which it is continued.
        settings: shown by wandb.
        resume_step: tensorboard hides what an earlier process logged of later steps.
    """
    if kind == "wandb":
        import wandb

        return wandb.init(
            project="polybasic",
            dir=str(folder),
            id=run_id,
            resume="allow",
            config=settings,
            settings=wandb.Settings(silent=True, console="off"),
        )
    if kind == "tensorboard":
        return _Tensorboard(folder / "tensorboard", resume_step)
    return None


class _Tensorboard:
    """A tracker that writes tensorboard's event files."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def log(self, numbers: dict[str, float], step: int) -> None:
        """See `Tracker`."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """See `Tracker`."""
        self._writer.close()


def _one_by_one(numbers: dict[str, Any]) -> dict[str, float]:
    """Lists and mappings as single numbers; a list's are counted from 1."""
    single: dict[str, float] = {}
    for name, value in numbers.items():
        if isinstance(value, dict):
            single |= {f"{name}/{key}": each for key, each in value.items()}
        elif isinstance(value, list):
            single |= {f"{name}/{number}": each for number, each in enumerate(value, 1)}
        else:
            single[name] = value
    return single


def _step_of(line: str) -> float:
    """The step of a line; a line that a kill cut short counts as after every step."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")
