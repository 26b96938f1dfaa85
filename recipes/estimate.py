"""`--dry-run`: what a run would do before it does it, and the checks that precede every run."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from polybasic.chain.errors import UserError
from polybasic.deploy.prompts import read_questions
from polybasic.recipes.costs import Shapes, StageEstimate, estimate_stage
from polybasic.recipes.disk import check_free, free_bytes
from polybasic.recipes.pipeline import Stage, StageState, Workspace, closure, state_of
from polybasic.recipes.schema import Recipe
from polybasic.recipes.sizes import is_downloaded, shape_of_small, shape_of_target
from polybasic.recipes.sources import SOURCE_STAGES, model_named

_MODULES = {
    "data": ("train", ("datasets", "zstandard")),
    "target": ("train", ("datasets",)),
    "draft": ("train", ("datasets", "deepspeed")),
    "intermediate": ("quantize", ("awq",)),
    "small_target": ("train", ("datasets",)),
    "small": ("quantize", ("awq",)),
    "small_draft": ("train", ("datasets", "deepspeed")),
}
_FILE_SUFFIXES = (".json", ".jsonl", ".gz", ".zst")


def check_inputs(recipe: Recipe, stages: Sequence[Stage]) -> None:
    """Refuse a run whose inputs or packages are missing, before anything is written.

    Raises:
        UserError: a file or an extra is missing, or the prompts are malformed.
    """
    conversations = recipe.data.conversations
    if conversations.endswith(_FILE_SUFFIXES):
        _check_file(Path(conversations))
    for prompts in (recipe.plan.prompts, recipe.bench.prompts):
        if prompts != "embedded":
            read_questions(Path(prompts))
    for stage in stages:
        extra, modules = _MODULES.get(stage.name, ("", ()))
        for module in modules:
            if importlib.util.find_spec(module) is None:
                raise UserError(
                    "package not installed",
                    f"{module}, needed by stage {stage.name}",
                    f"pip install 'polybasic[{extra}]'",
                )


def foresee(stages: Sequence[Stage], workspace: Workspace) -> dict[str, StageState]:
    """What each stage would do, without doing it.

    Where a stage before it will run, a stage's inputs are not known yet: then it counts as
    running, although it may turn out to be whole.
    """
    states: dict[str, StageState] = {}
    for stage in stages:
        waits_for = [need for need in stage.needs if states[need].action != "skip"]
        if waits_for:
            states[stage.name] = StageState("run", f"after {', '.join(waits_for)}")
        elif stage.name in SOURCE_STAGES and _must_be_downloaded(workspace.recipe, stage.name):
            states[stage.name] = StageState("run", "to be downloaded")
        else:
            states[stage.name] = state_of(stage, workspace)
    return states


def estimate(
    stages: Sequence[Stage], workspace: Workspace, only: Sequence[str] | None
) -> list[StageEstimate]:
    """One row for each stage of `only` and what it needs.

    Raises:
        UserError: an input is missing, or the config of a model cannot be read.
    """
    recipe, wanted = workspace.recipe, closure(stages, only)
    check_inputs(recipe, wanted)
    target = shape_of_target(recipe)
    shapes = Shapes(target, shape_of_small(recipe, target))
    states = foresee(wanted, workspace)
    return [estimate_stage(stage.name, states[stage.name], recipe, shapes) for stage in wanted]


def check_disk(estimates: Sequence[StageEstimate], out: Path) -> None:
    """Refuse a run whose output will not fit.

    Raises:
        UserError: too little is free.
    """
    check_free(out, int(sum(row.disk_bytes for row in estimates if row.state.action != "skip")))


def print_estimates(estimates: Sequence[StageEstimate], out: Path, console: Console) -> None:
    """Print the table of a dry run, and its totals."""
    table = Table("stage", "would", "why", "parameters", "memory", "disk", "time")
    for column in table.columns[3:]:
        column.justify = "right"
    for row in estimates:
        table.add_row(
            row.name,
            row.state.action,
            row.state.reason,
            f"{row.num_parameters / 1e6:,.1f} M" if row.num_parameters else "",
            _size(row.memory_bytes),
            _size(row.disk_bytes),
            _duration(row.seconds),
        )
    console.print(table)
    runs = [row for row in estimates if row.state.action != "skip"]
    console.print(
        f"{len(runs)} of {len(estimates)} stages would run: about "
        f"{_duration(sum(row.seconds for row in runs))}, "
        f"{_size(max((row.memory_bytes for row in runs), default=0))} of memory, "
        f"{_size(sum(row.disk_bytes for row in runs))} of disk in {out} "
        f"({_size(free_bytes(out))} free)"
    )
    console.print("times are estimates for two AVX-512 cores, from counted operations")


def _must_be_downloaded(recipe: Recipe, stage: str) -> bool:
    model = model_named(recipe, stage)
    return model != "scratch" and not is_downloaded(model)


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise UserError(
            "conversation file not found",
            f"data.conversations = {path}",
            f"check the path; it starts from {Path.cwd()}",
        )


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
