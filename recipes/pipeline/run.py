"""A recipe's whole run: checks first, then the stages, under a lock."""

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from polybasic.chain.formats.files import whole_file
from polybasic.recipes.estimates.dry_run import check_disk, estimate
from polybasic.recipes.pipeline.running import Workspace, locked, run_stages
from polybasic.recipes.pipeline.stages import stages_of
from polybasic.recipes.schema.recipe import Recipe


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
        UserError: bad input, a missing extra, a full disk, or another run in `out`.
    """
    workspace = Workspace(recipe, out, command, hostfile)
    stages = stages_of(recipe)
    check_disk(estimate(stages, workspace, only), out)
    with locked(out):
        with whole_file(out / "recipe.yaml") as partial:
            partial.write_text(as_yaml(recipe), "utf-8")
        run_stages(stages, workspace, only, say)
    return workspace


def as_yaml(recipe: Recipe) -> str:
    """The resolved recipe, every key of it, as YAML that loads to the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def say(line: str) -> None:
    """Print a line for people; standard output is for results."""
    print(line, file=sys.stderr, flush=True)
