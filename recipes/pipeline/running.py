"""Run stages in order, each once: a folder with a stage's name is whole, anything else is not.

The state machine knows nothing about models. A stage writes into a temporary folder; when it is
done, its record `stage.json` is written there and the folder gets the stage's name. A record
whose digest equals that of today's inputs means that there is nothing to do.
"""

import functools
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.coordinator import broadcast_from_first, wait_for_first
from polybasic.chain.base.processes.place import place_in
from polybasic.chain.formats.files import (
    locked_folder,
    partial_path,
    read_json,
    sha256_of_object,
    whole_folder,
    write_json,
)
from polybasic.recipes.pipeline.disk import full_disk_is_an_oserror
from polybasic.recipes.pipeline.provenance import package_versions
from polybasic.recipes.schema.recipe import Recipe

RECORD_NAME = "stage.json"
_STARTED_NAME = "started.json"
NOTHING_EARLIER = "no earlier result"
"""Why a stage runs that was never whole here."""
_BEGINNING = {"run": "starting", "continue": "continuing"}


@dataclass(frozen=True)
class Record:
    """What a whole stage says about itself.

    Attributes:
        digest: of `inputs`.
        inputs: everything that the result depends on.
        identity: of the result; what later stages take as their input.
        summary: numbers for people.
        seconds: from the stage's start to its end, interruptions not counted.
    """

    digest: str
    inputs: dict[str, Any]
    identity: dict[str, Any]
    summary: dict[str, Any]
    seconds: float
    finished_at: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Workspace:
    """One run's recipe and output folder.

    Attributes:
        command: the command line, for records.
    """

    recipe: Recipe
    out: Path
    command: str = ""

    def folder(self, stage: str) -> Path:
        """Where the whole result of `stage` lies."""
        return self.out / stage

    def record(self, stage: str) -> Record | None:
        """The record of `stage`, or None where the stage is not whole.

        Raises:
            UserError: the record is damaged.
        """
        path = self.folder(stage) / RECORD_NAME
        if not path.is_file():
            return None
        try:
            return Record(**read_json(path, "stage record"))
        except TypeError as error:
            raise UserError(
                "stage record is not one of ours",
                str(path),
                f"remove {self.folder(stage)} and run again",
            ) from error

    def earlier_inputs(self, stage: str) -> list[dict[str, Any]]:
        """What `stage` was made from, and what one that was interrupted was started with."""
        record = self.record(stage)
        started = partial_path(self.folder(stage)) / _STARTED_NAME
        found = [] if record is None else [record.inputs]
        return [*found, read_json(started, "stage record")] if started.is_file() else found

    def identity(self, stage: str) -> dict[str, Any]:
        """What later stages depend on; `stage` must be whole."""
        record = self.record(stage)
        assert record is not None, f"{stage} is needed and not whole"
        return record.identity


@dataclass(frozen=True)
class PipelineStage:
    """One step of the pipeline.

    Attributes:
        name: also the name of its folder.
        needs: stages that must be whole before this one.
        inputs: exactly what the result depends on, as JSON content; called when `needs` are whole.
        run: does the work in the given folder, where `started_inputs` are what `inputs` returned,
            and returns the summary.
        identify: JSON content that identifies the result; called on the done folder.
        progress: patterns of the files in its folder that hold what an interrupted `run` did, from
            which the next one continues; None where it starts over.
        is_of_all: whether all processes that a launcher has started call `run`, in one folder, of
            which the first returns what counts; otherwise that one does the work alone.
    """

    name: str
    needs: tuple[str, ...]
    inputs: Callable[[Workspace], dict[str, Any]]
    run: Callable[[Workspace, Path], dict[str, Any]]
    identify: Callable[[Workspace, Path], dict[str, Any]]
    progress: tuple[str, ...] | None = None
    is_of_all: bool = False


@dataclass(frozen=True)
class StageState:
    """What running a stage would do now, and why."""

    action: Literal["skip", "continue", "run"]
    reason: str
    inputs: dict[str, Any] = field(default_factory=dict)


def started_inputs(folder: Path) -> dict[str, Any]:
    """The inputs that the stage which is running in `folder` was started with."""
    inputs: dict[str, Any] = read_json(folder / _STARTED_NAME, "stage record")
    return inputs


def closure(stages: Sequence[PipelineStage], only: Sequence[str] | None) -> list[PipelineStage]:
    """The stages of `only` with everything that they need, in order; all of them for None."""
    if only is None:
        return list(stages)
    wanted = set(only)
    for stage in reversed(stages):
        if stage.name in wanted:
            wanted.update(stage.needs)
    return [stage for stage in stages if stage.name in wanted]


def state_of(stage: PipelineStage, workspace: Workspace) -> StageState:
    """Compare today's inputs with the record; `stage.needs` must be whole."""
    inputs = stage.inputs(workspace)
    digest = sha256_of_object(inputs)
    record = workspace.record(stage.name)
    if record is not None and record.digest == digest:
        return StageState("skip", f"up to date (made {_minute(record.finished_at)})", inputs)
    started = partial_path(workspace.folder(stage.name)) / _STARTED_NAME
    if (
        stage.progress is not None
        and started.is_file()
        and sha256_of_object(read_json(started, "stage record")) == digest
    ):
        return StageState("continue", "interrupted earlier", inputs)
    if record is not None:
        names = [name for name, *_ in _changes(record.inputs, inputs)]
        return StageState("run", f"changed: {', '.join(names)}", inputs)
    return StageState("run", NOTHING_EARLIER, inputs)


def run_stages(
    stages: Sequence[PipelineStage],
    workspace: Workspace,
    only: Sequence[str] | None,
    say: Callable[[str], None],
) -> None:
    """Bring the stages of `only` and what they need to their whole state, in all processes.

    Args:
        stages: in order of execution.
        workspace: the run; its folder must be locked by the caller.
        only: names of stages, or None for all.
        say: takes one line for people.

    Raises:
        UserError: bad input, a full disk, or training that was interrupted with other inputs; what
            was whole and what was trained is kept.
    """
    for stage in closure(stages, only):
        if not stage.is_of_all:
            broadcast_from_first(functools.partial(_run_where_needed, stage, workspace, say))
            continue
        fields = broadcast_from_first(functools.partial(_next_state, stage, workspace, say))
        if fields is not None and place_in().is_first:
            _run_stage(stage, workspace, StageState(**fields), say)
        elif fields is not None:
            wait_for_first()  # it makes the folder
            stage.run(workspace, partial_path(workspace.folder(stage.name)))


def _run_where_needed(
    stage: PipelineStage, workspace: Workspace, say: Callable[[str], None]
) -> None:
    if (fields := _next_state(stage, workspace, say)) is not None:
        _run_stage(stage, workspace, StageState(**fields), say)


def _next_state(
    stage: PipelineStage, workspace: Workspace, say: Callable[[str], None]
) -> dict[str, Any] | None:
    """Of a stage that is not whole, the fields of its `StageState`, as JSON content."""
    finish_rename(workspace.folder(stage.name))
    state = state_of(stage, workspace)
    if state.action == "skip":
        say(f"{stage.name}: {state.reason}, skipped")
        return None
    if state.action == "run":
        _refuse_to_discard(stage, workspace, state.inputs)
    say(f"{stage.name}: {_BEGINNING[state.action]} ({state.reason})")
    return asdict(state)


def finish_rename(folder: Path) -> None:
    """Repair a run that was killed between a stage's last byte and its rename."""
    partial = partial_path(folder)
    replaced = folder.with_name(f".{folder.name}.replaced")
    if (partial / RECORD_NAME).is_file():
        shutil.rmtree(replaced, ignore_errors=True)
        (partial / _STARTED_NAME).unlink(missing_ok=True)
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
    elif replaced.exists() and not folder.exists():
        replaced.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def locked(out: Path) -> AbstractContextManager[None]:
    """Hold the output folder.

    Raises:
        UserError: another process holds it, or it cannot be written.
    """
    what = "another run is writing there"
    return locked_folder(out, what, "wait for it, or choose another folder with --out")


def _refuse_to_discard(stage: PipelineStage, workspace: Workspace, inputs: dict[str, Any]) -> None:
    """Refuse to start over where a run with other inputs was interrupted and could continue.

    Raises:
        UserError: what differs, and how to go on.
    """
    partial = partial_path(workspace.folder(stage.name))
    if not any(found for pattern in stage.progress or () for found in partial.glob(pattern)):
        return
    started = read_json(partial / _STARTED_NAME, "stage record")
    changes = [f"{name} was {was}, now {now}" for name, was, now in _changes(started, inputs)]
    raise UserError(
        f"{stage.name} was interrupted with other inputs",
        f"{partial} ({'; '.join(changes)})",
        "go back to the old ones to continue it, or remove that folder to start over",
    )


def _run_stage(
    stage: PipelineStage, workspace: Workspace, state: StageState, say: Callable[[str], None]
) -> None:
    folder, started_seconds = workspace.folder(stage.name), time.monotonic()
    if state.action == "run":
        shutil.rmtree(partial_path(folder), ignore_errors=True)
    with whole_folder(folder, keep_partial=stage.progress is not None) as partial:
        write_json(partial / _STARTED_NAME, state.inputs)
        if stage.is_of_all:
            wait_for_first()
        with full_disk_is_an_oserror(partial):
            summary = stage.run(workspace, partial)
        seconds = time.monotonic() - started_seconds
        record = Record(
            digest=sha256_of_object(state.inputs),
            inputs=state.inputs,
            identity=stage.identify(workspace, partial),
            summary=summary,
            seconds=round(seconds, 3),
            finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=package_versions(),
        )
        write_json(partial / RECORD_NAME, asdict(record))
        (partial / _STARTED_NAME).unlink(missing_ok=True)
    say(f"{stage.name}: done in {seconds:.1f} s")


def _minute(moment: str) -> str:
    """A moment as records have it, for people: "2026-11-23 23:34 UTC"."""
    return f"{datetime.fromisoformat(moment).astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _changes(before: Any, after: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """The leaves in which two inputs differ: name, value before, value after."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            change
            for key in sorted(before.keys() | after.keys())
            for change in _changes(before.get(key), after.get(key), f"{prefix}.{key}".lstrip("."))
        ]
    return [] if before == after else [(prefix, before, after)]
