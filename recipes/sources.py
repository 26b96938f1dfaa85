"""Where the inputs of stages lie, and digests that tell when they changed."""

from importlib import resources
from pathlib import Path
from typing import Any

from polybasic.chain.files import sha256_of_file, sha256_of_object
from polybasic.recipes.pipeline import Workspace
from polybasic.recipes.schema import Recipe

CONVERSATIONS_NAME = "conversations.jsonl"
PROMPTS_NAME = "prompts.jsonl"
SOURCE_STAGES = ("target", "small_target")
"""Stages that give the models that all others are made from."""
_MODEL_PATTERNS = ("*.safetensors", "*.bin", "config.json", "tokenizer*.json", "*.jinja")


def conversations_of(workspace: Workspace) -> str:
    """The source of conversations: the generated file, or what the recipe names."""
    source = workspace.recipe.data.conversations
    if source == "embedded":
        return str(workspace.folder("data") / CONVERSATIONS_NAME)
    return source


def prompts_of(workspace: Workspace) -> Path:
    """The file of benchmark prompts."""
    prompts = workspace.recipe.bench.prompts
    if prompts == "embedded":
        return workspace.folder("data") / PROMPTS_NAME
    return Path(prompts)


def write_calibration_prompts(path: Path, num_per_task: int, seed: int) -> None:
    """Write embedded prompts to plan on, others than those of a report with the same seed.

    A plan is not judged on what it was chosen by.
    """
    from polybasic.recipes.embedded.conversations import write_prompts

    write_prompts(path, num_per_task, seed + 1)


def model_named(recipe: Recipe, stage: str) -> str:
    """What the recipe says of a model that it starts from: 'scratch', a folder or a hub id.

    Args:
        recipe: the recipe; it has a section `small` where that model is asked for.
        stage: one of SOURCE_STAGES.
    """
    if stage == "target":
        return recipe.target.model
    assert recipe.small is not None, f"no stage {stage} without section small"
    return recipe.small.model


def checkpoint_of(workspace: Workspace, stage: str) -> Path:
    """The folder of the checkpoint that one of SOURCE_STAGES gave; the stage must be whole."""
    if model_named(workspace.recipe, stage) == "scratch":
        return workspace.folder(stage)
    return Path(workspace.identity(stage)["folder"])


def source_digest(source: str) -> str:
    """SHA-256 that names conversations: of a file's bytes, or of a hub id with its commit.

    Raises:
        UserError: they do not exist.
    """
    from polybasic.train.conversations import data_digest

    return data_digest(source)


def checkpoint_stamp(model: str) -> dict[str, Any]:
    """Where a checkpoint lies and how its files look: hashing gigabytes at each start is too slow.

    Raises:
        UserError: there is none, or it cannot be downloaded.
    """
    from polybasic.chain.checkpoint import resolve_checkpoint

    folder = resolve_checkpoint(model).resolve()
    files = {path.name: path.stat() for path in sorted(folder.iterdir()) if path.is_file()}
    return {
        "folder": str(folder),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in files.items()},
    }


def model_digests(folder: Path) -> dict[str, Any]:
    """SHA-256 of the files that make a trained or quantized model what it is."""
    paths = {path for pattern in _MODEL_PATTERNS for path in folder.glob(pattern)}
    return {path.name: sha256_of_file(path) for path in sorted(paths)}


def generator_digest() -> str:
    """SHA-256 of the embedded generator's own code: a changed generator writes again."""
    folder = Path(str(resources.files("polybasic.recipes.embedded")))
    return sha256_of_object({path.name: sha256_of_file(path) for path in folder.glob("*.py")})
