"""The folder of offline features: a manifest, and safetensors shards of whole conversations.

A shard holds its conversations one after another, N tokens in all: the tensors of their `Features`
without a batch dimension, by the attributes' names, and of each of its C conversations the length
in `lengths` int64 [C] and the SHA-256 of its token ids in `keys` uint8 [C, 32]. A conversation is
found by its token ids alone, whatever file, order or batch it comes from.
"""

import hashlib
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import locked_folder, read_json, whole_file, write_json
from polybasic.train.features.states import Features

MANIFEST = "features.json"
KEY_BYTES = 32
_SCHEMA = "polybasic.features/2"
_SHARD = re.compile(r"features-\d{5,}\.safetensors")


def conversation_key(token_ids: Sequence[int]) -> bytes:
    """SHA-256 of token ids, the key of a conversation's features."""
    return hashlib.sha256(array("i", token_ids).tobytes()).digest()


@dataclass(frozen=True)
class FeatureShard:
    """Features of some conversations, mapped from their file.

    Attributes:
        features: of N tokens, without a batch dimension.
        lengths: tokens of each conversation.
        keys: of each conversation.
    """

    features: Features
    lengths: list[int]
    keys: list[bytes]


def shard_path(folder: Path, index: int) -> Path:
    """The file of a shard, counted from 0."""
    return folder / f"features-{index:05d}.safetensors"


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a folder, in order; all that bear a final name are whole."""
    found = folder.iterdir() if folder.is_dir() else []
    return sorted(path for path in found if _SHARD.fullmatch(path.name))


def write_shard(path: Path, features: Features, lengths: list[int], keys: list[bytes]) -> None:
    """Write a shard whole.

    Args:
        path: an older shard of this name is replaced; who has mapped it keeps it.
        features: of N tokens, without a batch dimension.
        lengths: of its conversations.
        keys: of its conversations.

    Raises:
        UserError: the disk is full or not writable.
    """
    tensors = {
        **features.tensors(),
        "lengths": torch.tensor(lengths),
        "keys": torch.tensor([list(key) for key in keys], dtype=torch.uint8),
    }
    with whole_file(path) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})


def open_shard(path: Path) -> FeatureShard:
    """Map a shard; of its features nothing is read yet.

    Raises:
        UserError: the file is damaged.
    """
    try:
        with safe_open(path, "pt") as opened:
            names = set(opened.keys()) - {"lengths", "keys"}
            keys = bytes(opened.get_tensor("keys").flatten().tolist())
            return FeatureShard(
                Features(**{name: opened.get_tensor(name) for name in names}),
                opened.get_tensor("lengths").tolist(),
                [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)],
            )
    except SafetensorError as error:
        raise UserError(
            "damaged feature shard", f"{path} ({error})", "remove it and run again"
        ) from error


def check_identity(folder: Path, identity: Mapping[str, Any]) -> None:
    """Make sure that a folder is absent, empty, or of this identity.

    Raises:
        UserError: it holds features of another identity (what differs is named), or other files.
    """
    if not (folder / MANIFEST).exists():
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        found = [name for name in found if not name.startswith(".")]
        if found:
            raise UserError(
                "folder for offline features is in use",
                f"{folder} ({found[0]}, and no {MANIFEST})",
                "set train.features_folder to a folder of its own",
            )
        return
    manifest = read_manifest(folder)
    differing = [
        f"{name} {manifest.get(name)!r}, not {identity.get(name)!r}"
        for name in sorted({*manifest, *identity})
        if manifest.get(name) != identity.get(name)
    ]
    if differing:
        raise UserError(
            "offline features of another run",
            f"{folder} ({'; '.join(differing)})",
            "set train.features_folder to another folder, or remove this one",
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The identity of the features in a folder.

    Raises:
        UserError: there are none, or they are of another version of polybasic.
    """
    content = read_json(folder / MANIFEST, "manifest of offline features")
    if content.get("schema") != _SCHEMA:
        raise UserError(
            "unknown schema of offline features",
            f"{folder / MANIFEST} (schema {content.get('schema')!r}, expected {_SCHEMA!r})",
            "remove the folder and run again",
        )
    return {name: value for name, value in content.items() if name != "schema"}


@contextmanager
def folder_to_write(folder: Path, identity: Mapping[str, Any]) -> Iterator[None]:
    """Hold a folder for writing, with its manifest in place; call in the first process.

    Raises:
        UserError: another run is writing there, or the disk is full or not writable.
    """
    what = "offline features are being written by another run"
    do = "wait for it, or set train.features_folder to another folder"
    with locked_folder(folder, what, do):
        if not (folder / MANIFEST).exists():
            write_json(folder / MANIFEST, {"schema": _SCHEMA, **identity})
        yield
