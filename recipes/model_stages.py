"""The stages that make members of a chain from a model: its draft head, and its 4-bit copy.

Heavy modules are imported where they run, so that a run with nothing to do answers at once.
"""

import shutil
from pathlib import Path
from typing import Any

from polybasic.chain.checkpoint import resolve_head
from polybasic.chain.files import write_json
from polybasic.recipes.conversation_rows import encoded_rows, learned_from
from polybasic.recipes.pipeline import Stage, Workspace
from polybasic.recipes.schema import Recipe
from polybasic.recipes.sources import (
    checkpoint_of,
    conversations_of,
    head_stamp,
    model_digests,
    tokenizer_of,
)
from polybasic.train.settings import DraftSettings

QUALITY_NAME = "quality.json"
_IMPORTED_NAME = "imported"


def _identify_model(workspace: Workspace, folder: Path) -> dict[str, Any]:
    return model_digests(folder)


def _head_stage(name: str, source: str) -> Stage:
    """Train or import the draft head of the model that stage `source` gave."""

    def inputs(workspace: Workspace) -> dict[str, Any]:
        draft = draft_settings(workspace.recipe, name)
        settings = workspace.recipe.train
        training = {
            "train": settings.model_dump(mode="json", exclude={"save_every_steps", "log"}),
            **learned_from(workspace, source),
        }
        if draft.model == "train":
            return training
        ready: dict[str, Any] = {"draft": draft.model_dump(mode="json"), **head_stamp(draft.model)}
        if draft.adapt == "none":
            return {**ready, source: workspace.identity(source)}
        return {**ready, **training}

    def run(workspace: Workspace, folder: Path) -> dict[str, Any]:
        draft = draft_settings(workspace.recipe, name)
        if draft.model == "train":
            return _train(workspace, source, folder)
        if draft.adapt == "none":
            return _import(workspace, source, draft, folder)
        imported = folder / _IMPORTED_NAME
        summary = _import(workspace, source, draft, imported)
        summary |= _train(workspace, source, folder, start=imported, lora=draft.lora)
        shutil.rmtree(imported)
        return summary

    return Stage(name, ("data", source), inputs, run, _identify_model, resumes=True)


def draft_settings(recipe: Recipe, stage: str) -> DraftSettings:
    """Where the head of a stage comes from; a smaller model's is trained."""
    return recipe.draft if stage == "draft" else DraftSettings()


def _import(workspace: Workspace, source: str, draft: DraftSettings, out: Path) -> dict[str, Any]:
    from polybasic.chain.eagle_import import import_head

    return import_head(resolve_head(draft.model), checkpoint_of(workspace, source), out)


def _train(workspace: Workspace, source: str, out: Path, **start: Any) -> dict[str, Any]:
    from polybasic.train.launch import train_head_in_processes

    recipe = workspace.recipe
    return train_head_in_processes(
        recipe.train.num_processes,
        target=checkpoint_of(workspace, source),
        conversations=conversations_of(workspace),
        data=recipe.data,
        settings=recipe.train,
        seed=recipe.seed,
        out=out,
        tokenizer=tokenizer_of(workspace),
        **start,
    )


def _quantized_stage(name: str, source: str) -> Stage:
    """Make the 4-bit copy of the model that stage `source` gave."""

    def inputs(workspace: Workspace) -> dict[str, Any]:
        return {
            "quantize": workspace.recipe.quantize.model_dump(mode="json"),
            **learned_from(workspace, source),
        }

    def run(workspace: Workspace, folder: Path) -> dict[str, Any]:
        from polybasic.quantize.awq import quantize_target
        from polybasic.quantize.quality import measure_quality

        recipe, model = workspace.recipe, checkpoint_of(workspace, source)
        settings = recipe.quantize
        training, heldout = encoded_rows(workspace)
        quantize_target(model, training, settings, recipe.seed, folder)
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
                seed=recipe.seed,
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

    return Stage(name, ("data", source), inputs, run, _identify_model)


DRAFT = _head_stage("draft", "target")
INTERMEDIATE = _quantized_stage("intermediate", "target")
SMALL = _quantized_stage("small", "small_target")
SMALL_DRAFT = _head_stage("small_draft", "small_target")
