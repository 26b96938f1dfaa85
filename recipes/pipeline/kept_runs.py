"""Runs whose folders lie side by side: what they hold, and how one is removed."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import LOCK_NAME, disk_errors
from polybasic.recipes.pipeline.run import RECIPE_NAME
from polybasic.recipes.pipeline.running import RECORD_NAME, locked
from polybasic.recipes.pipeline.stages import stages_of
from polybasic.recipes.schema.loading import load_recipe


@dataclass(frozen=True)
class KeptRun:
    """A run's folder.

    Attributes:
        recipe: its name; None where this version does not read the recipe.
        whole: names of its whole stages, in the order of their folders' names.
        left: stages of the recipe that are not whole; empty where that is not read.
        num_bytes: of all files; one that lies there by several hard links counts once.
        changed: when a stage was whole or the recipe written last, in seconds since 1970.
    """

    folder: Path
    recipe: str | None
    whole: tuple[str, ...]
    left: tuple[str, ...]
    num_bytes: int
    changed: float


def runs_in(folder: Path) -> list[KeptRun]:
    """The runs whose folders lie in `folder`, by name; what is no run is left out.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        raise UserError("no runs", f"{folder} (no such folder)", "name the folder of your runs")
    return [kept_run(path) for path in sorted(folder.iterdir()) if _is_run(path)]


def kept_run(folder: Path) -> KeptRun:
    """What a run's folder holds.

    Raises:
        UserError: no run has written it.
    """
    if not _is_run(folder):
        found = "no such folder" if not folder.is_dir() else f"no {RECIPE_NAME} of a run in it"
        raise UserError("not a run", f"{folder} ({found})", "`polybasic runs ls` lists runs")
    records = list(_records(folder))
    whole = tuple(record.parent.name for record in records)
    try:
        recipe = load_recipe(str(folder / RECIPE_NAME))
        name: str | None = recipe.name
        left = tuple(stage.name for stage in stages_of(recipe) if stage.name not in whole)
    except UserError:
        name, left = None, ()
    sizes = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            state = path.stat()
            sizes[state.st_dev, state.st_ino] = state.st_size
    changed = max(path.stat().st_mtime for path in (folder / RECIPE_NAME, *records))
    return KeptRun(folder, name, whole, left, sum(sizes.values()), changed)


def remove_run(folder: Path) -> None:
    """Remove a run's folder with all that lies in it.

    Whole stages stop being whole first: an interrupted removal leaves a run of which none is.

    Raises:
        UserError: no run has written it, one is at work in it, or it cannot be removed.
    """
    if not _is_run(folder):
        kept_run(folder)
    marks = (RECIPE_NAME, LOCK_NAME)
    with disk_errors(folder), locked(folder):
        for record in list(_records(folder)):
            record.unlink()
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in marks:
                path.unlink()
        shutil.rmtree(folder)


def _is_run(folder: Path) -> bool:
    """Whether a run has written a folder, which is no link to one."""
    marks = (folder / RECIPE_NAME, folder / LOCK_NAME)
    return not folder.is_symlink() and all(mark.is_file() for mark in marks)


def _records(folder: Path) -> Iterator[Path]:
    """Those of whole stages."""
    return (path for path in sorted(folder.glob(f"*/{RECORD_NAME}")) if path.parent.name[0] != ".")
