"""Where the inputs of stages lie, and digests that change with them."""

from pathlib import Path
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import (
    TOKENIZER_FILES,
    resolve_adapter,
    resolve_head,
)
from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.chain.formats.files import sha256_of_file
from polybasic.chain.formats.kept import folder_stamp
from polybasic.recipes.pipeline.running import Workspace
from polybasic.recipes.schema.recipe import Recipe

CONVERSATIONS_NAME = "conversations.jsonl"
REGENERATED = "regenerated"
"""The stage in which the target answers the conversations again."""
SELF_PROMPTED = "self_prompted"
"""The stage in which the target writes questions."""
MERGED_NAME = "merged"
TOKENIZER_NAME = "tokenizer"
SOURCE_STAGES = ("target", "small_target")
"""Stages that give the models that all others are made from."""
_MODEL_PATTERNS = ("*.safetensors", "*.bin", "config.json", "tokenizer*.json", "*.jinja")


def answers_of(workspace: Workspace) -> str:
    """The source of what heads and 4-bit copies learn: regenerated answers, or those given."""
    if workspace.recipe.data.regenerate is None:
        return workspace.recipe.data.conversations
    return str(workspace.folder(REGENERATED) / CONVERSATIONS_NAME)


def checkpoint_of(workspace: Workspace, stage: str) -> Path:
    """The folder of the checkpoint that one of SOURCE_STAGES gave; the stage must be whole."""
    if stage == "target" and workspace.recipe.target.adapter is not None:
        return workspace.folder(stage) / MERGED_NAME
    return Path(workspace.identity(stage)["folder"])


def packed_target_of(workspace: Workspace) -> Path:
    """The folder of the chain's target: `checkpoint_of`, or a GGUF file's blocks as they are."""
    target = workspace.recipe.target
    if target.weights == "as_stored":
        return resolve_model(target.model, as_stored=True)
    return checkpoint_of(workspace, "target")


def tokenizer_of(workspace: Workspace) -> Path:
    """The folder of the chain's tokenizer: as the target stage prepared it, else the target's own.

    A smaller model has the target's vocabulary and learns from what this tokenizer encodes, which
    is what the runtime asks it with. The target stage must be whole.
    """
    prepared = workspace.folder("target") / TOKENIZER_NAME
    return prepared if prepared.is_dir() else checkpoint_of(workspace, "target")


def tokenizer_identity(workspace: Workspace) -> dict[str, Any]:
    """What identifies the chain's tokenizer; the target stage must be whole."""
    identity = workspace.identity("target")
    if "tokenizer" in identity:
        prepared: dict[str, Any] = identity["tokenizer"]
        return prepared
    files = identity.get("files", identity)
    return {name: files[name] for name in TOKENIZER_FILES if name in files}


def chat_template_of(recipe: Recipe) -> str | None:
    """The Jinja text of `target.chat_template`.

    Raises:
        UserError: it names a file that cannot be read.
    """
    named = recipe.target.chat_template
    if named is None or "{{" in named or "{%" in named:
        return named
    try:
        return Path(named).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(
            "chat template not found",
            f"target.chat_template = {named} ({reason})",
            "name a .jinja file, or write the Jinja text itself",
        ) from error


def source_digest(source: str) -> str:
    """SHA-256 that names conversations: of a file's bytes, or of a hub id with its commit.

    Raises:
        UserError: they do not exist.
    """
    from polybasic.train.data.conversations import data_digest

    return data_digest(source)


def checkpoint_stamp(model: str) -> dict[str, Any]:
    """Where a checkpoint lies and how its files look: hashing gigabytes at each start is too slow.

    Raises:
        UserError: there is none, or it cannot be downloaded.
    """
    return folder_stamp(resolve_model(model))


def adapter_stamp(adapter: str) -> dict[str, Any]:
    """As `checkpoint_stamp`, of a LoRA adapter."""
    return folder_stamp(resolve_adapter(adapter))


def head_stamp(head: str) -> dict[str, Any]:
    """As `checkpoint_stamp`, of a ready draft head."""
    return folder_stamp(resolve_head(head))


def model_digests(folder: Path) -> dict[str, Any]:
    """SHA-256 of the files that make a model which was written here what it is."""
    paths = {path for pattern in _MODEL_PATTERNS for path in folder.glob(pattern)}
    return {path.name: sha256_of_file(path) for path in sorted(paths)}
