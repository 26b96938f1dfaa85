"""The stages that give the models which all others are made from: target and smaller model.

Heavy modules are imported where they run, so that a run with nothing to do answers at once.
"""

from pathlib import Path
from typing import Any, TypeVar

from polybasic.chain.formats.checkpoint import resolve_adapter, weight_files
from polybasic.chain.formats.files import sha256_of_file
from polybasic.chain.formats.models import resolve_model
from polybasic.recipes.pipeline.conversation_rows import conversations_input, split_rows
from polybasic.recipes.pipeline.dtypes import settle_dtype
from polybasic.recipes.pipeline.running import Stage, Workspace, started_inputs
from polybasic.recipes.pipeline.small import check_small
from polybasic.recipes.pipeline.sources import (
    MERGED_NAME,
    TOKENIZER_NAME,
    adapter_stamp,
    chat_template_of,
    checkpoint_of,
    checkpoint_stamp,
    is_made_here,
    model_digests,
    model_named,
    tokenizer_of,
)
from polybasic.train.settings import ScratchModelSettings

ScratchT = TypeVar("ScratchT", bound=ScratchModelSettings)

_SCRATCH_PROGRESS = ("training_state.pt", "training.json")


def _target_inputs(workspace: Workspace) -> dict[str, Any]:
    target = workspace.recipe.target
    if target.model == "scratch":
        inputs = {
            "scratch": target.scratch.model_dump(exclude={"num_embedded_conversations"}),
            **conversations_input(workspace),
        }
        return settle_dtype(workspace, "target", inputs, "scratch", target.scratch)
    inputs = {"model": target.model, **checkpoint_stamp(target.model)}
    if target.adapter is not None:
        inputs["adapter"] = adapter_stamp(target.adapter)
    if target.chat_template is not None:
        inputs["chat_template"] = chat_template_of(workspace.recipe)
    return inputs


def _run_target(workspace: Workspace, folder: Path) -> dict[str, Any]:
    recipe = workspace.recipe
    if recipe.target.model == "scratch":
        from polybasic.train.scratch import train_scratch_target

        training, heldout = split_rows(workspace)
        settings = _settled(recipe.target.scratch, folder)
        found = train_scratch_target(training, settings, recipe.seed, folder, heldout)
        return {"model": "scratch", **found}
    from polybasic.chain.formats.tokenizer import needs_preparation, prepare_tokenizer

    checkpoint = resolve_model(recipe.target.model)
    summary: dict[str, Any] = {"model": recipe.target.model}
    weight_files(checkpoint)
    if recipe.target.adapter is not None:
        from polybasic.train.adapters import merge_adapter

        merged = folder / MERGED_NAME
        adapter = resolve_adapter(recipe.target.adapter)
        summary["adapter"] = merge_adapter(checkpoint, adapter, merged)
        checkpoint = merged
    template, tokenizer = chat_template_of(recipe), checkpoint
    if needs_preparation(checkpoint, template):
        tokenizer = folder / TOKENIZER_NAME
        prepare_tokenizer(checkpoint, template, tokenizer)
    _check_tokenizer(tokenizer)
    return summary


def _check_tokenizer(folder: Path) -> None:
    """Refuse a chat template that is of no use, before hours of training."""
    from polybasic.chain.formats.tokenizer import load_tokenizer
    from polybasic.train.data.chat import check_chat_template

    check_chat_template(load_tokenizer(folder))


def _identify_target(workspace: Workspace, folder: Path) -> dict[str, Any]:
    target, tokenizer = workspace.recipe.target, folder / TOKENIZER_NAME
    if target.model == "scratch":
        return model_digests(folder)
    if is_made_here(workspace.recipe, "target"):
        identity = model_digests(folder / MERGED_NAME)
    else:
        identity = checkpoint_stamp(target.model)
    if tokenizer.is_dir():
        files = sorted(path for path in tokenizer.iterdir() if path.is_file())
        identity["tokenizer"] = {path.name: sha256_of_file(path) for path in files}
    return identity


def _small_target_inputs(workspace: Workspace) -> dict[str, Any]:
    small = workspace.recipe.small
    assert small is not None
    inputs = {"target": workspace.identity("target")}
    if small.model != "scratch":
        # both decide whether a checkpoint is refused
        settings = small.model_dump(include={"quantize", "role", "train_head"})
        return {"model": small.model, **checkpoint_stamp(small.model), **settings, **inputs}
    inputs |= {"scratch": small.scratch.model_dump(), **conversations_input(workspace)}
    return settle_dtype(workspace, "small_target", inputs, "scratch", small.scratch)


def _run_small_target(workspace: Workspace, folder: Path) -> dict[str, Any]:
    recipe, target = workspace.recipe, checkpoint_of(workspace, "target")
    assert recipe.small is not None
    if recipe.small.model != "scratch":
        check_small(recipe.small, target, tokenizer_of(workspace), folder / TOKENIZER_NAME)
        return {"model": recipe.small.model}
    from polybasic.train.scratch import train_scratch_small

    training, heldout = split_rows(workspace)
    settings = _settled(recipe.small.scratch, folder)
    return train_scratch_small(training, settings, target, recipe.seed, folder, heldout)


def _settled(settings: ScratchT, folder: Path) -> ScratchT:
    """With the dtype that the stage in `folder` was started with."""
    dtype = started_inputs(folder)["scratch"]["dtype"]
    return settings.model_copy(update={"dtype": dtype})


def _identify_small_target(workspace: Workspace, folder: Path) -> dict[str, Any]:
    model = model_named(workspace.recipe, "small_target")
    return model_digests(folder) if model == "scratch" else checkpoint_stamp(model)


TARGET = Stage(
    "target", ("data",), _target_inputs, _run_target, _identify_target, _SCRATCH_PROGRESS
)
SMALL_TARGET = Stage(
    "small_target",
    ("data", "target"),
    _small_target_inputs,
    _run_small_target,
    _identify_small_target,
    _SCRATCH_PROGRESS,
)
