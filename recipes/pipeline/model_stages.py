"""The stages that make members of a chain from a model: its draft head, and its 4-bit copy.

Heavy modules are imported where they run, so that a run with nothing to do answers at once.
"""

import shutil
from pathlib import Path
from typing import Any

from polybasic.chain.base.processes.coordinator import broadcast_from_first
from polybasic.chain.formats.checkpoints.checkpoint import (
    checkpoint_files,
    copy_files,
    resolve_head,
)
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.chain.formats.checkpoints.quantization import BITS
from polybasic.chain.formats.files import write_json
from polybasic.chain.formats.lineage import declare_trained_for
from polybasic.quantize.limits import group_size_of
from polybasic.quantize.settings import QuantizeSettings
from polybasic.recipes.pipeline.conversation_rows import (
    conversation_stages,
    encoded_rows,
    learned_from,
)
from polybasic.recipes.pipeline.dtypes import settle_dtype
from polybasic.recipes.pipeline.provenance import git_commit, package_versions
from polybasic.recipes.pipeline.running import PipelineStage, Workspace, started_inputs
from polybasic.recipes.pipeline.sources import (
    answers_of,
    checkpoint_of,
    head_stamp,
    model_digests,
    packed_target_of,
    tokenizer_of,
)
from polybasic.recipes.schema.recipe import Recipe
from polybasic.train.settings import DraftSettings

QUALITY_NAME = "quality.json"
_IMPORTED_NAME = "imported"
_FEATURES_NAME = "features"
_STEERED = "small_target"
"""The stage that gives the model which a steering biases."""
_IN_BLOCKS = {"blocks": "Q4_0"}
_HEAD_PROGRESS = ("checkpoints/*", "training.json")


def _identify_model(workspace: Workspace, folder: Path) -> dict[str, Any]:
    return model_digests(folder)


def head_stage(recipe: Recipe, name: str, source: str, copy: str) -> PipelineStage:
    """Train or import the draft head of the model that stage `source` gave.

    Args:
        recipe: decides on which stages the head depends.
        name: of the stage.
        source: the stage that gave the model.
        copy: the stage that makes the model's 4-bit copy.
    """
    draft = draft_settings(recipe, name)
    is_trained = draft.model == "train" or draft.adapt != "none"
    learns_from_copy = is_trained and recipe.train.features_from == "intermediate"
    steers = is_trained and recipe.train.kind == "steering"

    def inputs(workspace: Workspace) -> dict[str, Any]:
        settings = workspace.recipe.train
        training = {
            # as of one process: more of them round sums differently, no more
            "train": {**settings.decisive(), "num_processes": 1},
            **learned_from(workspace, source),
        }
        if learns_from_copy:
            training[copy] = workspace.identity(copy)
        if steers:
            training[_STEERED] = workspace.identity(_STEERED)
        if draft.model == "train":
            return settle_dtype(workspace, name, training, settings)
        ready: dict[str, Any] = {"draft": draft.model_dump(mode="json"), **head_stamp(draft.model)}
        if draft.adapt == "none":
            return {**ready, source: workspace.identity(source)}
        return settle_dtype(workspace, name, {**ready, **training}, settings)

    def run(workspace: Workspace, folder: Path) -> dict[str, Any]:
        summary = make(workspace, folder)
        if source == "target" and recipe.target.weights == "as_stored":
            packed = packed_target_of(workspace)
            broadcast_from_first(lambda: declare_trained_for(folder, packed))
        return summary

    def make(workspace: Workspace, folder: Path) -> dict[str, Any]:
        given: dict[str, Any] = {}
        if learns_from_copy:
            given["intermediate"] = workspace.folder(copy)
        if steers:
            given["drafter"] = checkpoint_of(workspace, _STEERED)
        if draft.model == "train":
            return _train(workspace, source, folder, **given)
        if draft.adapt == "none":
            return broadcast_from_first(lambda: _import(workspace, source, draft, folder))
        imported = folder / _IMPORTED_NAME
        summary = broadcast_from_first(lambda: _import(workspace, source, draft, imported))
        lora = draft.lora if draft.adapt == "lora" else None
        summary |= _train(workspace, source, folder, start=imported, lora=lora, **given)
        broadcast_from_first(lambda: shutil.rmtree(imported))
        return summary

    needs = conversation_stages(recipe, source) + ((copy,) if learns_from_copy else ())
    needs += (_STEERED,) if steers else ()
    return PipelineStage(name, needs, inputs, run, _identify_model, _HEAD_PROGRESS, is_of_all=True)


def draft_settings(recipe: Recipe, stage: str) -> DraftSettings:
    """Where the head of a stage comes from; a smaller model's is trained."""
    return recipe.draft if stage == "draft" else DraftSettings()


def _import(workspace: Workspace, source: str, draft: DraftSettings, out: Path) -> dict[str, Any]:
    from polybasic.chain.heads.importing import import_head

    return import_head(resolve_head(draft.model), checkpoint_of(workspace, source), out)


def _train(workspace: Workspace, source: str, out: Path, **given: Any) -> dict[str, Any]:
    from polybasic.chain.base.processes.launching import in_processes
    from polybasic.train.run.training import train_head

    recipe = workspace.recipe
    dtype = started_inputs(out)["train"]["dtype"]
    settings = recipe.train.model_copy(update={"dtype": dtype})
    if settings.features == "offline" and settings.features_folder is None:
        # outside of the stage's folder, which is made anew when a setting changes
        folder = str(workspace.out / _FEATURES_NAME / source)
        settings = settings.model_copy(update={"features_folder": folder})
    arguments = {
        "target": checkpoint_of(workspace, source),
        "conversations": answers_of(workspace),
        "data": recipe.data,
        "settings": settings,
        "seed": recipe.seed,
        "out": out,
        "tokenizer": tokenizer_of(workspace),
        "provenance": {
            "recipe": recipe.model_dump(mode="json"),
            "command": workspace.command,
            "git_commit": git_commit(),
            "package_versions": package_versions(),
        },
        **given,
    }
    summary: dict[str, Any] = in_processes(train_head, arguments, recipe.train.num_processes)
    return summary


def quantized_stage(recipe: Recipe, name: str, source: str) -> PipelineStage:
    """Make the 4-bit copy of the model that stage `source` gave: by AWQ, or without a section
    `quantize` in blocks, as `polybasic.recipes.pipeline.beside` has them."""

    def inputs(workspace: Workspace) -> dict[str, Any]:
        settings = workspace.recipe.quantize
        if settings is None:
            copied = {**_IN_BLOCKS, "for_a_head": recipe.small_has_head}
            return {"quantize": copied, **learned_from(workspace, source)}
        model = read_config(checkpoint_of(workspace, source))
        made = {"bits": BITS, "group_size": group_size_of(model, recipe.group_size)}
        chosen = settings.model_dump(mode="json")
        return {"quantize": {**chosen, **made}, **learned_from(workspace, source)}

    def run(workspace: Workspace, folder: Path) -> dict[str, Any]:
        from polybasic.quantize.quality import measure_quality

        model, training, heldout = checkpoint_of(workspace, source), *encoded_rows(workspace)
        settings = workspace.recipe.quantize or QuantizeSettings()
        if workspace.recipe.quantize is None:
            _write_in_few_bits(workspace, model, folder)
        else:
            from polybasic.quantize.awq import quantize_target

            quantize_target(model, training, settings, workspace.recipe.seed, folder)
        gained = {}
        if settings.distill is not None:
            from polybasic.quantize.distillation import distill_intermediate

            gained = distill_intermediate(
                target=model,
                intermediate=folder,
                training_token_ids=training,
                heldout_token_ids=heldout,
                settings=settings.distill,
                num_quality_tokens=settings.num_quality_tokens,
                seed=workspace.recipe.seed,
                out=folder,
                # the smaller model's copy has another cache than the member above it
                shares_cache=source == "target",
            )
        quality: dict[str, Any] = measure_quality(
            model, folder, heldout, settings.num_quality_tokens
        )
        quality |= {f"distillation_{key}": value for key, value in gained.items()}
        write_json(folder / QUALITY_NAME, quality)
        return quality

    return PipelineStage(name, conversation_stages(recipe, source), inputs, run, _identify_model)


def _write_in_few_bits(workspace: Workspace, model: Path, folder: Path) -> None:
    """The blocks of a GGUF file where these are few bits a weight, else all matrices in Q4_0.

    A head is for the weights that it learned from, and for a copy that was made of them.
    """
    from polybasic.quantize.blocks import is_in_few_bits, round_to_blocks

    recipe = workspace.recipe
    assert recipe.small is not None, "a target is copied by settings"
    source = model if recipe.small_has_head else resolve_model(recipe.small.model, as_stored=True)
    if is_in_few_bits(source):
        copy_files(source, folder, checkpoint_files(source), links_weights=True)
    else:
        round_to_blocks(source, folder)
