"""A recipe's whole run: checks first, then the stages, under a lock."""

import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import yaml

from polybasic.chain.base import terminal
from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.coordinator import broadcast_from_first, wait_for_all
from polybasic.chain.base.processes.joining import joined
from polybasic.chain.formats.files import LOCK_NAME, disk_errors, whole_file
from polybasic.recipes.estimates.dry_run import check_disk, estimate
from polybasic.recipes.pipeline.running import (
    RECORD_NAME,
    PipelineStage,
    Workspace,
    closure,
    locked,
    run_stages,
)
from polybasic.recipes.pipeline.stages import stages_of
from polybasic.recipes.schema.recipe import Recipe

RECIPE_NAME = "recipe.yaml"
_SEEN_SECONDS, _POLL_SECONDS = 60.0, 0.1  # network disks show a file late


def run_recipe(
    recipe: Recipe,
    out: Path,
    command: str,
    only: Sequence[str] | None = None,
) -> Workspace:
    """Run what is not whole yet of a recipe; continue where an earlier run stopped.

    Where a launcher has started several processes all of them call this, with the same recipe. The
    first one does what is not shared out, while the others wait.

    Args:
        recipe: what to do.
        out: the output folder; each stage has a folder of its name in it. All processes see it;
            the first one's counts.
        command: the command line, for the chain's provenance.
        only: names of stages; they and what they need are run. None is all.

    Returns:
        The workspace, whose stages of `only` are whole.

    Raises:
        UserError: bad input, a missing extra, a full disk, another run in `out`, something there
            that no run wrote, or processes with different recipes or disks.
    """
    with joined() as place, ExitStack() as held:
        if place.world_size > 1:  # they may have been started in different folders
            out = Path(broadcast_from_first(lambda: str(out.absolute())))
        workspace = Workspace(recipe, out, command)
        stages = stages_of(recipe)
        _check_same_recipe(recipe)
        written_at = broadcast_from_first(lambda: _begin(workspace, stages, only, held))
        _check_same_disk(out / RECIPE_NAME, written_at)
        wait_for_all()
        run_stages(stages, workspace, only, say)
    return workspace


def _begin(
    workspace: Workspace,
    stages: Sequence[PipelineStage],
    only: Sequence[str] | None,
    held: ExitStack,
) -> int:
    """Check what can be checked before the work, lock the folder and write the recipe.

    Returns:
        When its file was written, in nanoseconds.
    """
    out = workspace.out
    with disk_errors(out):
        _refuse_replacing(workspace, closure(stages, only))
        check_disk(estimate(stages, workspace, only), out)
    held.enter_context(locked(out))
    with whole_file(out / RECIPE_NAME) as partial:
        partial.write_text(as_yaml(workspace.recipe), "utf-8")
    return (out / RECIPE_NAME).stat().st_mtime_ns


def _check_same_recipe(recipe: Recipe) -> None:
    """Refuse processes that would do different work, before one of them does any.

    Raises:
        UserError: another recipe than the first process's.
    """
    own = as_yaml(recipe)
    first = broadcast_from_first(lambda: own)
    if own != first:
        pairs = zip(own.splitlines(), first.splitlines(), strict=False)
        line, other = next((pair for pair in pairs if pair[0] != pair[1]), ("shorter", "longer"))
        raise UserError(
            "processes have different recipes",
            f"{line.strip()} on {socket.gethostname()}, {other.strip()} in the first process",
            "give all of them the same one",
        )
    wait_for_all()


def _check_same_disk(recipe: Path, written_at: int) -> None:
    """Refuse processes that do not see the first one's output.

    Raises:
        UserError: they do not, even after a while.
    """
    deadline = time.monotonic() + _SEEN_SECONDS
    while not recipe.exists() or recipe.stat().st_mtime_ns != written_at:
        if time.monotonic() > deadline:
            raise UserError(
                "process does not see what the first one writes",
                f"{recipe} on {socket.gethostname()}",
                "write to a folder that all hosts share, under the same name",
            )
        time.sleep(_POLL_SECONDS)


def _refuse_replacing(workspace: Workspace, stages: Sequence[PipelineStage]) -> None:
    """Refuse to write over what no run wrote: folders without a record, the user's own recipe.

    Raises:
        UserError: such a thing lies in the output folder, which is left as it is.
    """
    folders = [workspace.folder(stage.name) for stage in stages]
    marks = {folder: folder / RECORD_NAME for folder in folders}
    marks[workspace.out / RECIPE_NAME] = workspace.out / LOCK_NAME
    for path, mark in marks.items():
        is_empty = path.is_dir() and not any(path.iterdir())
        if path.exists() and not is_empty and not mark.exists():
            raise UserError(
                "would replace what no run has written",
                str(path),
                "choose another folder with --out, or move that away",
            )


def as_yaml(recipe: Recipe) -> str:
    """The resolved recipe, every key of it, as YAML that loads to the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def say(line: str) -> None:
    """Print a line for people; standard output is for results."""
    terminal.say(line)
