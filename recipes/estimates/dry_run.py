"""`--dry-run`: what a run would do before it does it, and the checks that precede every run."""

import importlib.util
from collections.abc import Iterable, Sequence, Set
from pathlib import Path

from polybasic.chain.base.console import Console
from polybasic.chain.base.errors import UserError
from polybasic.chain.base.tables import Table, print_table
from polybasic.chain.formats.checkpoints.checkpoint import (
    resolve_adapter,
    resolve_head,
    split_hub_id,
)
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.packages import PACKAGE
from polybasic.chain.formats.files import existing, free_bytes, lies_anywhere, partial_path
from polybasic.deploy.planner.prompts import read_questions
from polybasic.quantize.limits import check_quantizable, check_rows
from polybasic.recipes.estimates.costs import StageEstimate, estimate_stage
from polybasic.recipes.estimates.hardware_profiles import CPU, Hardware
from polybasic.recipes.estimates.memory import Case, Shapes, check_divides
from polybasic.recipes.estimates.sizes import (
    config_folder,
    has_weights,
    shape_of_small,
    shape_of_target,
    shapes_of_intermediates,
)
from polybasic.recipes.pipeline.disk import check_free
from polybasic.recipes.pipeline.prompts import bench_prompts, plan_prompts
from polybasic.recipes.pipeline.running import (
    NOTHING_EARLIER,
    PipelineStage,
    StageState,
    Workspace,
    closure,
    state_of,
)
from polybasic.recipes.pipeline.sources import chat_template_of
from polybasic.recipes.schema.recipe import Recipe
from polybasic.train.settings import TO_BE_GIVEN

_MODULES = {
    "data": ("train", ("datasets", "pyarrow")),
    "target": ("train", ()),
    "self_prompted": ("train", ("datasets",)),
    "regenerated": ("train", ("datasets", "openai")),
    "draft": ("train", ("datasets", "deepspeed")),
    "intermediate": ("quantize", ("awq",)),
    "small": ("quantize", ("awq",)),
    "small_draft": ("train", ("datasets", "deepspeed")),
}


def check_inputs(recipe: Recipe, stages: Sequence[PipelineStage]) -> None:
    """Refuse a run whose inputs or packages are missing, before anything is written.

    Raises:
        UserError: a value, a file or an extra is missing, or the prompts are malformed.
    """
    _check_given(recipe)
    for stage in stages:
        extra, modules = _MODULES.get(stage.name, ("", ()))
        for module in (*modules, *_peft(recipe, stage.name)):
            if importlib.util.find_spec(module) is None:
                raise UserError(
                    "package not installed",
                    f"{module}, needed by stage {stage.name}",
                    f"pip install 'polybasic[{extra}]'",
                )
    _check_conversations(recipe.data.conversations)
    for source in (
        plan_prompts(recipe.plan, recipe.data.conversations),
        bench_prompts(recipe.bench, recipe.data.conversations),
    ):
        if source.file is not None:
            read_questions(source.file)
    chat_template_of(recipe)
    for name, resolve in (
        (recipe.target.adapter, resolve_adapter),
        (None if recipe.draft.model == "train" else recipe.draft.model, resolve_head),
    ):
        if name is not None:
            # a hub id is only read: a dry run downloads nothing
            is_here = name.startswith(PACKAGE) or Path(name).expanduser().exists()
            resolve(name) if is_here else split_hub_id(name)


def _check_given(recipe: Recipe) -> None:
    """Refuse a recipe of which values are still to be given, as `own-model`'s."""
    values = {
        "target.model": recipe.target.model,
        "data.conversations": recipe.data.conversations,
        "small.model": recipe.small.model if recipe.small else None,
    }
    if missing := [key for key, value in values.items() if value == TO_BE_GIVEN]:
        raise UserError(
            "value is to be given",
            f"{' and '.join(missing)} of recipe {recipe.name}",
            f"add {' '.join(f'{key}=...' for key in missing)}",
        )


def foresee(stages: Sequence[PipelineStage], workspace: Workspace) -> dict[str, StageState]:
    """What each stage would do, without doing it.

    Where a stage before it will run, or something must be downloaded, a stage's inputs are not
    known yet: then it counts as running, although it may turn out to be whole.
    """
    states: dict[str, StageState] = {}
    for stage in stages:
        waits_for = [need for need in stage.needs if states[need].action != "skip"]
        if waits_for:
            states[stage.name] = StageState("run", f"after {', '.join(waits_for)}")
        elif _waits_for_download(workspace.recipe, stage.name):
            states[stage.name] = StageState("run", "to be downloaded")
        elif not _was_started(workspace, stage.name):
            states[stage.name] = StageState("run", NOTHING_EARLIER)
        else:
            states[stage.name] = state_of(stage, workspace)
    return states


def estimate(
    stages: Sequence[PipelineStage],
    workspace: Workspace,
    only: Sequence[str] | None,
    hardware: Hardware = CPU,
) -> list[StageEstimate]:
    """One row for each stage of `only` and what it needs; `hardware` decides on the seconds alone.

    Raises:
        UserError: an input is missing, or the config of a model cannot be read.
    """
    recipe, wanted = workspace.recipe, closure(stages, only)
    check_inputs(recipe, wanted)
    target = shape_of_target(recipe)
    shapes = Shapes(target, shape_of_small(recipe), shapes_of_intermediates(recipe))
    case = Case(recipe, shapes, hardware, _copies_target(recipe, workspace.out))
    if not {"plan", "report"}.isdisjoint(stage.name for stage in wanted):
        check_divides(case)
    _check_copies(recipe, {stage.name for stage in wanted})
    states = foresee(wanted, workspace)
    return [estimate_stage(stage.name, states[stage.name], case) for stage in wanted]


def _check_copies(recipe: Recipe, wanted: Set[str]) -> None:
    """Refuse models that no 4-bit copy can be made of, before hours of other stages."""
    models = [("intermediate", "target.model", recipe.target.model)]
    if recipe.small is not None:
        models.append(("small", "small.model", recipe.small.model))
    for stage, key, model in models:
        if stage in wanted:
            config = read_config(config_folder(model, key))
            if recipe.quantize is None:
                check_rows(config)
            else:
                check_quantizable(config, recipe.quantize)


def _copies_target(recipe: Recipe, out: Path) -> bool:
    """Whether the chain gets a target that takes room, which hard links do not."""
    chosen = recipe.package.copy_target
    if chosen != "auto" or recipe.target.adapter is not None:
        return chosen is True
    model = Path(recipe.target.model).expanduser()
    return lies_anywhere(model) and model.stat().st_dev != existing(out).stat().st_dev


def check_disk(estimates: Sequence[StageEstimate], out: Path) -> None:
    """Refuse a run whose output will not fit.

    Raises:
        UserError: too little is free.
    """
    check_free(out, int(sum(row.disk_bytes for row in estimates if row.state.action != "skip")))


def print_estimates(
    estimates: Sequence[StageEstimate], out: Path, hardware: Hardware, reason: str, console: Console
) -> None:
    """Print the table of a dry run, its totals, and which machine the times are for.

    Args:
        estimates: one a stage.
        out: the output folder.
        hardware: that the estimates were made for.
        reason: why that one.
        console: to print on.
    """
    rows = [
        [
            row.name,
            f"{row.num_parameters / 1e6:,.1f} M" if row.num_parameters else "",
            _memory(row),
            _size(row.disk_bytes),
            _duration(row.seconds),
            f"{row.state.action}: {row.state.reason}",
        ]
        for row in estimates
    ]
    header = ["stage", "parameters", "memory", "disk", "time", "would"]
    print_table(Table("", header, rows, wraps=True), console)
    runs = [row for row in estimates if row.state.action != "skip"]
    console.print(
        f"{len(runs)} of {len(estimates)} stages would run: about "
        f"{_duration(sum(row.seconds for row in runs))}, "
        f"{_peak(runs, hardware)}, "
        f"{_size(sum(row.disk_bytes for row in runs))} of disk in {out} "
        f"({_size(free_bytes(out))} free)"
    )
    console.print(
        f"times are for {hardware.name}, {hardware.description} ({reason}): estimates from counted "
        "operations"
    )
    for row in runs:
        most = hardware.memory_bytes
        if most is not None and not row.is_on_host and row.memory_bytes > most:
            console.print(
                f"{row.name} needs {_size(row.memory_bytes)} of a device that has {_size(most)}"
            )


def _memory(row: StageEstimate) -> str:
    """Of every rank."""
    if row.num_ranks == 1:
        return _size(row.memory_bytes)
    if row.other_rank_bytes == row.memory_bytes:
        return f"{row.num_ranks} x {_size(row.memory_bytes)}"
    times = f"{row.num_ranks - 1} x " if row.num_ranks > 2 else ""
    return f"{_size(row.memory_bytes)} + {times}{_size(row.other_rank_bytes)}"


def _peft(recipe: Recipe, stage: str) -> tuple[str, ...]:
    """peft, where the stage trains or merges a LoRA."""
    uses_lora = {
        "target": recipe.target.adapter is not None,
        "draft": recipe.draft.adapt == "lora",
        "intermediate": recipe.distills,
        "small": recipe.distills,
    }
    return ("peft",) if uses_lora.get(stage) else ()


def _waits_for_download(recipe: Recipe, stage: str) -> bool:
    """Whether a stage starts from something on the hub that is not on this machine."""
    if stage == "data":
        return _is_hub_file_to_fetch(recipe.data.conversations)
    named: dict[str, tuple[str | None, ...]] = {
        "target": (recipe.target.model, recipe.target.adapter),
        "small_target": (recipe.small.model if recipe.small else None,),
        "draft": (recipe.draft.model,),
    }
    return any(
        name not in (None, "train") and not has_weights(name) for name in named.get(stage, ())
    )


def _is_hub_file_to_fetch(conversations: str) -> bool:
    from polybasic.train.data.conversation_sources import HubData, is_cached, parse_source

    data = parse_source(conversations)
    return isinstance(data, HubData) and data.path is not None and not is_cached(data)


def _was_started(workspace: Workspace, stage: str) -> bool:
    folder = workspace.folder(stage)
    return folder.exists() or partial_path(folder).exists()


def _check_conversations(conversations: str) -> None:
    from polybasic.train.data.conversation_sources import parse_source

    source = parse_source(conversations)
    if isinstance(source, Path) and not source.is_file():
        raise UserError(
            "conversation file not found",
            f"data.conversations = {source}",
            f"check the path; it starts from {Path.cwd()}",
        )


def _peak(rows: Sequence[StageEstimate], hardware: Hardware) -> str:
    def most(chosen: Iterable[StageEstimate]) -> str:
        return _size(max((row.memory_bytes for row in chosen), default=0))

    if hardware.memory_bytes is None:
        return f"{most(rows)} of memory"
    on_device = most(row for row in rows if not row.is_on_host)
    on_host = most(row for row in rows if row.is_on_host)
    return f"{on_device} of device memory, {on_host} of host memory"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _duration(seconds: float) -> str:
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
