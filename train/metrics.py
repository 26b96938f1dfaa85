"""Where the numbers of a run go: metrics.jsonl always, wandb when asked, a bar on stderr."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from polybasic.chain.files import disk_errors, whole_file


class MetricsLog:
    """JSON lines, each with a `step`; a resumed run drops the lines after its checkpoint.

    Args:
        path: the file.
        resume_step: lines up to this step stay; 0 starts anew.
        wandb_run: a run of wandb, which gets the same numbers.
    """

    def __init__(self, path: Path, resume_step: int, wandb_run: Any | None) -> None:
        kept: list[str] = []
        if resume_step and path.exists():
            lines = path.read_text("utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= resume_step]
        with whole_file(path) as partial:
            partial.write_text("".join(line + "\n" for line in kept), "utf-8")
        self._path = path
        self._wandb_run = wandb_run

    def write(self, step: int, numbers: dict[str, Any]) -> None:
        """Append one line.

        Raises:
            UserError: the disk is full.
        """
        with disk_errors(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")
        if self._wandb_run is not None:
            self._wandb_run.log(numbers, step=step)

    def finish(self) -> None:
        """No line follows."""
        if self._wandb_run is not None:
            self._wandb_run.finish()


def start_wandb(folder: Path, run_id: str, settings: dict[str, Any]) -> Any:
    """Start or continue the wandb run of this id; WANDB_MODE and the like apply."""
    import wandb

    return wandb.init(
        project="polybasic",
        dir=str(folder),
        id=run_id,
        resume="allow",
        config=settings,
        settings=wandb.Settings(silent=True, console="off"),
    )


class TrainingBar:
    """A progress bar with loss, tokens a second and time left; evaluations get a line each."""

    def __init__(self, description: str, total: int, done: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task: TaskID = self._progress.add_task(
            description, total=total, completed=done, state=""
        )

    def advance(self, loss: float, tokens_per_second: float) -> None:
        """One step is done."""
        state = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s"
        self._progress.update(self._task, advance=1, state=state)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(line, highlight=False)

    def __enter__(self) -> "TrainingBar":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


def _step_of(line: str) -> float:
    """The step of a line; a line that a kill cut short counts as after every step."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")
