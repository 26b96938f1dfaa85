"""The stages that make a chain's models: what each depends on and does.

Heavy modules are imported where they run, so that a run with nothing to do answers at once.
"""

from pathlib import Path
from typing import Any

from polybasic.chain.files import write_json
from polybasic.recipes.pipeline import Stage, Workspace
from polybasic.recipes.small import check_small
from polybasic.recipes.sources import (
    checkpoint_of,
    checkpoint_stamp,
    conversations_of,
    model_digests,
    model_named,
)
from polybasic.train.settings import DataSettings

QUALITY_NAME = "quality.json"


def _target_inputs(workspace: Workspace) -> dict[str, Any]:
    recipe = workspace.recipe
    if recipe.target.model != "scratch":
        return {"model": recipe.target.model, **checkpoint_stamp(recipe.target.model)}
    return {
        "scratch": recipe.target.scratch.model_dump(exclude={"num_embedded_conversations"}),
        **_conversations_input(workspace),
    }


def _run_target(workspace: Workspace, folder: Path) -> dict[str, Any]:
    recipe = workspace.recipe
    if recipe.target.model != "scratch":
        return {"model": recipe.target.model}
    from polybasic.train.scratch import train_scratch_target

    training, _ = _split(workspace)
    train_scratch_target(training, recipe.target.scratch, recipe.seed, folder)
    return {"model": "scratch"}


def _small_target_inputs(workspace: Workspace) -> dict[str, Any]:
    small = workspace.recipe.small
    assert small is not None
    inputs = {"target": workspace.identity("target")}
    if small.model != "scratch":
        # both decide whether a checkpoint is refused
        settings = small.model_dump(include={"quantize", "role", "train_head"})
        return {"model": small.model, **checkpoint_stamp(small.model), **settings, **inputs}
    return {
        "scratch": small.scratch.model_dump(),
        **_conversations_input(workspace),
        **inputs,
    }


def _run_small_target(workspace: Workspace, folder: Path) -> dict[str, Any]:
    recipe, target = workspace.recipe, checkpoint_of(workspace, "target")
    assert recipe.small is not None
    if recipe.small.model != "scratch":
        check_small(recipe.small, target)
        return {"model": recipe.small.model}
    from polybasic.train.scratch import train_scratch_small

    training, _ = _split(workspace)
    return train_scratch_small(training, recipe.small.scratch, target, recipe.seed, folder)


def _identify_target(workspace: Workspace, folder: Path) -> dict[str, Any]:
    return _identify_source(workspace.recipe.target.model, folder)


def _identify_small_target(workspace: Workspace, folder: Path) -> dict[str, Any]:
    return _identify_source(model_named(workspace.recipe, "small_target"), folder)


def _identify_source(model: str, folder: Path) -> dict[str, Any]:
    return model_digests(folder) if model == "scratch" else checkpoint_stamp(model)


def _identify_model(workspace: Workspace, folder: Path) -> dict[str, Any]:
    return model_digests(folder)


def _head_stage(name: str, source: str) -> Stage:
    """Train the draft head of the model that stage `source` gave."""

    def inputs(workspace: Workspace) -> dict[str, Any]:
        settings = workspace.recipe.train
        return {
            "train": settings.model_dump(mode="json", exclude={"save_every_steps", "log"}),
            **_learned_from(workspace, source),
        }

    def run(workspace: Workspace, folder: Path) -> dict[str, Any]:
        from polybasic.train.head_training import train_head

        recipe = workspace.recipe
        return train_head(
            target=checkpoint_of(workspace, source),
            conversations=conversations_of(workspace),
            data=recipe.data,
            settings=recipe.train,
            seed=recipe.seed,
            out=folder,
        )

    return Stage(name, ("data", source), inputs, run, _identify_model, resumes=True)


def _quantized_stage(name: str, source: str) -> Stage:
    """Make the 4-bit copy of the model that stage `source` gave."""

    def inputs(workspace: Workspace) -> dict[str, Any]:
        return {
            "quantize": workspace.recipe.quantize.model_dump(mode="json"),
            **_learned_from(workspace, source),
        }

    def run(workspace: Workspace, folder: Path) -> dict[str, Any]:
        from transformers import AutoTokenizer

        from polybasic.quantize.awq import quantize_target
        from polybasic.quantize.quality import measure_quality

        recipe, model = workspace.recipe, checkpoint_of(workspace, source)
        tokenizer = AutoTokenizer.from_pretrained(model)
        training, heldout = _split(workspace)
        samples = _token_ids(tokenizer, training, recipe.data)
        quantize_target(model, samples, recipe.quantize, recipe.seed, folder)
        quality = measure_quality(
            model,
            folder,
            _token_ids(tokenizer, heldout, recipe.data),
            recipe.quantize.num_quality_tokens,
        )
        write_json(folder / QUALITY_NAME, quality)
        return quality

    return Stage(name, ("data", source), inputs, run, _identify_model)


TARGET = Stage("target", ("data",), _target_inputs, _run_target, _identify_target, resumes=True)
DRAFT = _head_stage("draft", "target")
INTERMEDIATE = _quantized_stage("intermediate", "target")
SMALL_TARGET = Stage(
    "small_target",
    ("data", "target"),
    _small_target_inputs,
    _run_small_target,
    _identify_small_target,
    resumes=True,
)
SMALL = _quantized_stage("small", "small_target")
SMALL_DRAFT = _head_stage("small_draft", "small_target")


def _conversations_input(workspace: Workspace) -> dict[str, Any]:
    recipe = workspace.recipe
    return {
        "data": recipe.data.model_dump(include={"limit", "num_heldout"}),
        "seed": recipe.seed,
        "conversations": workspace.identity("data")["conversations"],
    }


def _learned_from(workspace: Workspace, source: str) -> dict[str, Any]:
    recipe = workspace.recipe
    return {
        "data": recipe.data.model_dump(exclude={"conversations"}),
        "seed": recipe.seed,
        "conversations": workspace.identity("data")["conversations"],
        source: workspace.identity(source),
    }


def _split(workspace: Workspace) -> tuple[Any, Any]:
    from polybasic.train.conversations import load_conversations, split_conversations

    data = workspace.recipe.data
    dataset = load_conversations(conversations_of(workspace), data.limit)
    return split_conversations(dataset, data.num_heldout)


def _token_ids(tokenizer: Any, rows: Any, data: DataSettings) -> list[list[int]]:
    from polybasic.train.chat import encode_conversation

    return [
        encode_conversation(tokenizer, row["messages"], data.max_tokens).input_ids for row in rows
    ]
