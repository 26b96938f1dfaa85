"""A recipe's whole run: checks first, then the stages, under a lock."""

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import LOCK_NAME, disk_errors, whole_file
from polybasic.recipes.estimates.dry_run import check_disk, estimate
from polybasic.recipes.pipeline.running import (
    RECORD_NAME,
    Stage,
    Workspace,
    closure,
    locked,
    run_stages,
)
from polybasic.recipes.pipeline.stages import stages_of
from polybasic.recipes.schema.recipe import Recipe

_RECIPE_NAME = "recipe.yaml"


def run_recipe(
    recipe: Recipe,
    out: Path,
    command: str,
    only: Sequence[str] | None = None,
    hostfile: Path | None = None,
) -> Workspace:
    """Run what is not whole yet of a recipe; continue where an earlier run stopped.

    Args:
        recipe: what to do.
        out: the output folder; each stage has a folder of its name in it.
        command: the command line, for the chain's provenance.
        only: names of stages; they and what they need are run. None is all.
        hostfile: of the machines that train heads together.

    Returns:
        The workspace, whose stages of `only` are whole.

    Raises:
        UserError: bad input, a missing extra, a full disk, another run in `out`, or something there
            that no run wrote.
    """
    workspace = Workspace(recipe, out, command, hostfile)
    stages = stages_of(recipe)
    with disk_errors(out):
        _refuse_replacing(workspace, closure(stages, only))
        check_disk(estimate(stages, workspace, only), out)
    with locked(out):
        with whole_file(out / _RECIPE_NAME) as partial:
            partial.write_text(as_yaml(recipe), "utf-8")
        run_stages(stages, workspace, only, say)
    return workspace


def _refuse_replacing(workspace: Workspace, stages: Sequence[Stage]) -> None:
    """Refuse to write over what no run wrote: folders without a record, the user's own recipe.

    Raises:
        UserError: such a thing lies in the output folder, which is left as it is.
    """
    folders = [workspace.folder(stage.name) for stage in stages]
    marks = {folder: folder / RECORD_NAME for folder in folders}
    marks[workspace.out / _RECIPE_NAME] = workspace.out / LOCK_NAME
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
    print(line, file=sys.stderr, flush=True)
