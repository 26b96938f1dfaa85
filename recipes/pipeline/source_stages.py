"""The stages that give the models which all others are made from: target and smaller model.

Heavy modules are imported where they run, so that a run with nothing to do answers at once.
"""

from pathlib import Path
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.terminal import say
from polybasic.chain.formats.checkpoints.checkpoint import has_blocks, resolve_adapter, weight_files
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.chain.formats.files import sha256_of_file
from polybasic.chain.formats.kept import folder_stamp
from polybasic.recipes.pipeline.running import PipelineStage, Workspace
from polybasic.recipes.pipeline.small import check_small
from polybasic.recipes.pipeline.sources import (
    MERGED_NAME,
    TOKENIZER_NAME,
    adapter_stamp,
    chat_template_of,
    checkpoint_of,
    checkpoint_stamp,
    model_digests,
    packed_target_of,
    tokenizer_of,
)


def _target_inputs(workspace: Workspace) -> dict[str, Any]:
    target = workspace.recipe.target
    inputs = {"model": target.model, **_target_stamp(workspace)}
    if target.adapter is not None:
        inputs["adapter"] = adapter_stamp(target.adapter)
    if target.chat_template is not None:
        inputs["chat_template"] = chat_template_of(workspace.recipe)
    return inputs


def _target_stamp(workspace: Workspace) -> dict[str, Any]:
    """Of the model that is learned from, and of the chain's where that is another form of it."""
    target = workspace.recipe.target
    stamp = checkpoint_stamp(target.model)
    if target.weights == "as_stored":
        stamp["weights"] = folder_stamp(packed_target_of(workspace))
    return stamp


def _run_target(workspace: Workspace, folder: Path) -> dict[str, Any]:
    from polybasic.chain.formats.tokenizer import needs_preparation, prepare_tokenizer

    recipe = workspace.recipe
    checkpoint = resolve_model(recipe.target.model)
    summary: dict[str, Any] = {"model": recipe.target.model}
    weight_files(checkpoint)
    config = read_config(checkpoint)
    if recipe.quantize is not None and config.in_4_bits:
        raise UserError(
            "target.model is quantized already",
            f"quantization_config in {config.path}, and quantize is not null",
            "set quantize=null, or name the unquantized checkpoint",
        )
    if recipe.target.weights == "as_stored" and not has_blocks(packed_target_of(workspace)):
        say(f"{recipe.target.model} holds other types than are multiplied as stored: converted")
    if recipe.target.adapter is not None:
        from polybasic.train.adapters import merge_adapter

        merged = folder / MERGED_NAME
        adapter = resolve_adapter(recipe.target.adapter)
        summary["adapter"] = merge_adapter(checkpoint, adapter, merged)
        checkpoint = merged
    is_encoder_decoder = config.decoder.encoder is not None
    if is_encoder_decoder and recipe.has_head:
        raise UserError(
            "an encoder-decoder gets no draft head",
            f"train.kind = {recipe.train.kind}, {config.path}",
            "set train.kind=none: smaller models and n-grams draft",
        )
    template, tokenizer = chat_template_of(recipe), checkpoint
    if needs_preparation(checkpoint, template):
        tokenizer = folder / TOKENIZER_NAME
        prepare_tokenizer(checkpoint, template, tokenizer)
    if not is_encoder_decoder:
        _check_tokenizer(tokenizer)
    return summary


def _check_tokenizer(folder: Path) -> None:
    """Refuse a chat template that is of no use, before hours of training."""
    from polybasic.chain.formats.tokenizer import load_tokenizer
    from polybasic.train.data.chat import check_chat_template

    check_chat_template(load_tokenizer(folder))


def _identify_target(workspace: Workspace, folder: Path) -> dict[str, Any]:
    target, tokenizer = workspace.recipe.target, folder / TOKENIZER_NAME
    if target.adapter is not None:
        identity = model_digests(folder / MERGED_NAME)
    else:
        identity = _target_stamp(workspace)
    if tokenizer.is_dir():
        files = sorted(path for path in tokenizer.iterdir() if path.is_file())
        identity["tokenizer"] = {path.name: sha256_of_file(path) for path in files}
    return identity


def _small_target_inputs(workspace: Workspace) -> dict[str, Any]:
    small = workspace.recipe.small
    assert small is not None
    return {
        "model": small.model,
        **checkpoint_stamp(small.model),
        # these and the target decide whether a checkpoint is refused
        **small.model_dump(include={"quantize", "role", "train_head"}),
        "target": workspace.identity("target"),
    }


def _run_small_target(workspace: Workspace, folder: Path) -> dict[str, Any]:
    recipe, target = workspace.recipe, checkpoint_of(workspace, "target")
    assert recipe.small is not None
    check_small(recipe.small, target, tokenizer_of(workspace), folder / TOKENIZER_NAME)
    return {"model": recipe.small.model}


def _identify_small_target(workspace: Workspace, folder: Path) -> dict[str, Any]:
    small = workspace.recipe.small
    assert small is not None
    return checkpoint_stamp(small.model)


TARGET = PipelineStage("target", (), _target_inputs, _run_target, _identify_target)
SMALL_TARGET = PipelineStage(
    "small_target",
    ("target",),
    _small_target_inputs,
    _run_small_target,
    _identify_small_target,
)
