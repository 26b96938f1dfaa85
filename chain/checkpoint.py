"""Checkpoints of others: found in a folder or on the hub, read without running their code."""

import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polybasic.chain.errors import UserError
from polybasic.chain.files import disk_errors, read_json
from polybasic.chain.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    import torch

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_CONFIG_FILES = ("config.json", "generation_config.json", "quantize_config.json")
_LICENSE_PATTERNS = ("LICENSE*", "NOTICE*", "USE_POLICY*")

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_SAFETENSORS_PATTERNS = ["model*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*"]
_PICKLE_PATTERNS = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
_SINGLE_THEN_SHARDED = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


def resolve_checkpoint(reference: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint; a hub id is downloaded into the hub's cache unless it is there.

    Args:
        reference: a folder that holds config.json, or a hub id `org/name[@revision]`. A folder of
            that name wins over the hub.
        revision: commit, tag or branch of a hub id.

    Raises:
        UserError: no such folder or repository, no config.json, gated, offline, disk full.
    """
    folder = Path(reference).expanduser()
    if folder.exists():
        return _folder_with(folder, "config.json", "not a checkpoint")
    folder = _snapshot(reference, revision, _SAFETENSORS_PATTERNS)
    if not list(folder.glob("*.safetensors")):
        folder = _snapshot(reference, revision, _SAFETENSORS_PATTERNS + _PICKLE_PATTERNS)
    return _folder_with(folder, "config.json", "not a checkpoint")


def resolve_chain(reference: str, revision: str | None = None) -> Path:
    """The folder of a chain, given as a folder or as a hub id `org/name[@revision]`.

    Raises:
        UserError: as `resolve_checkpoint`, for a missing chain.json.
    """
    folder = Path(reference).expanduser()
    if not folder.exists():
        folder = _snapshot(reference, revision, None)
    return _folder_with(folder, MANIFEST_NAME, "not a chain")


def split_hub_id(reference: str, revision: str | None = None) -> tuple[str, str | None]:
    """("org/name@revision") -> ("org/name", "revision").

    Raises:
        UserError: no hub id, or two revisions that differ.
    """
    repository, _, written = reference.partition("@")
    if not _HUB_ID.fullmatch(repository):
        raise UserError(
            "checkpoint not found",
            f"{reference} is neither a folder nor a hub id",
            "name an existing folder or org/name[@revision]",
        )
    if written and revision and written != revision:
        raise UserError(
            "two revisions", f"{reference} with revision {revision}", "give only one of them"
        )
    return repository, revision or written or None


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's tensors, sorted by name; safetensors win over pickles.

    Raises:
        UserError: there are none, the index is malformed, or a shard is missing.
    """
    for single, index in _SINGLE_THEN_SHARDED:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return _shards(folder / index)
    raise UserError(
        "no weights",
        f"{folder} holds neither model.safetensors nor pytorch_model.bin (nor an index of either)",
        "download the checkpoint again or name another folder",
    )


def model_files(folder: Path) -> list[str]:
    """Names of the files that define the model: configs, weights and their index."""
    weights = weight_files(folder)
    names = [name for name in _CONFIG_FILES if (folder / name).is_file()]
    for single, index in _SINGLE_THEN_SHARDED:
        if weights[0].suffix == Path(single).suffix and weights[0].name != single:
            names.append(index)
    return names + [path.name for path in weights]


def tokenizer_files(folder: Path) -> list[str]:
    """Names of the tokenizer's files in `folder`.

    Raises:
        UserError: there is no tokenizer.json.
    """
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            "no tokenizer",
            f"{folder} holds no tokenizer.json",
            "write one with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    return [name for name in TOKENIZER_FILES if (folder / name).is_file()]


def copy_files(source: Path, destination: Path, names: list[str]) -> None:
    """Copy `names` (links are followed) with the permissions that new files get here.

    Raises:
        UserError: the disk is full or not writable.
    """
    with disk_errors(destination):
        destination.mkdir(parents=True, exist_ok=True)
        for name in names:
            # not copy2: autoawq writes its files with mode 0600
            shutil.copyfile(source / name, destination / name)


def checkpoint_files(folder: Path) -> list[str]:
    """Names of all that belongs to a checkpoint: model, tokenizer if there, licences."""
    names = model_files(folder)
    names += [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    for pattern in _LICENSE_PATTERNS:
        names += sorted(path.name for path in folder.glob(pattern) if path.is_file())
    return names


def copy_checkpoint(source: Path, destination: Path) -> None:
    """Copy what belongs to the checkpoint in `source` into the folder `destination`.

    Raises:
        UserError: no weights in `source`; the disk is full or not writable.
    """
    copy_files(source, destination, checkpoint_files(source))


def load_tensors(folder: Path) -> "dict[str, torch.Tensor]":
    """All tensors of a checkpoint by name, memory-mapped on the CPU.

    Raises:
        UserError: no weights, a damaged file, a pickle that holds more than tensors, or a tensor
            that two files hold.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        read = _read_safetensors if path.suffix == ".safetensors" else _read_pickle
        for name, tensor in read(path).items():
            if name in tensors:
                raise UserError(
                    "tensor in two files", f"{name} in {path}", "download the checkpoint again"
                )
            tensors[name] = tensor
    return tensors


def _read_safetensors(path: Path) -> "dict[str, torch.Tensor]":
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as content:
            return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise _damaged(path, str(error)) from error


def _read_pickle(path: Path) -> "dict[str, torch.Tensor]":
    import pickle

    import torch

    try:
        # files older than torch 1.6 are no zip archives and cannot be mapped
        content = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except pickle.UnpicklingError as error:
        raise _unsafe(path) from error
    except (RuntimeError, EOFError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(content, dict) or not all(
        isinstance(value, torch.Tensor) for value in content.values()
    ):
        raise _unsafe(path)
    return content


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(
        "damaged weight file",
        f"{path} ({reason.splitlines()[0] if reason else 'empty'})",
        "fetch or write it again",
    )


def _unsafe(path: Path) -> UserError:
    return UserError(
        "pickle refused",
        f"{path} holds something other than tensors and could run code",
        "convert the checkpoint to safetensors where you trust it",
    )


def _shards(index: Path) -> list[Path]:
    content: Any = read_json(index, "weight index")
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("malformed weight index", f"no weight_map in {index}", "fetch it again")
    names = sorted(set(map(str, weight_map.values())))
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    for name in names:
        if Path(name).name != name or Path(name).suffix != suffix:
            raise UserError(
                "malformed weight index",
                f"{name!r} in {index} is no {suffix} file beside it",
                "fetch it again",
            )
        if not (index.parent / name).is_file():
            raise UserError(
                "missing shard", f"{index.parent / name}", "download the checkpoint again"
            )
    return [index.parent / name for name in names]


def _folder_with(folder: Path, name: str, otherwise: str) -> Path:
    if not (folder / name).is_file():
        found = f"no {name} in it" if folder.is_dir() else "no folder"
        raise UserError(otherwise, f"{folder} ({found})", f"name a folder that holds {name}")
    return folder


def _snapshot(reference: str, revision: str | None, patterns: list[str] | None) -> Path:
    """Download `patterns` of a repository (top folder only; all of it for None)."""
    repository, revision = split_hub_id(reference, revision)
    from huggingface_hub import constants, errors, snapshot_download

    where = repository if revision is None else f"{repository}@{revision}"
    page = f"https://huggingface.co/{repository}"
    download: Callable[..., str] = snapshot_download
    try:
        with disk_errors(Path(constants.HF_HUB_CACHE)):
            return Path(
                download(
                    repository,
                    revision=revision,
                    allow_patterns=patterns,
                    ignore_patterns=None if patterns is None else ["*/*"],
                )
            )
    except errors.GatedRepoError as error:
        raise UserError(
            "gated checkpoint", where, f"accept its terms at {page}, then `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            "checkpoint not found",
            f"{where} is neither a folder here nor a repository that you may read",
            "check the spelling; for a private one `hf auth login`",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            "revision not found", where, f"see {page}/commits for what exists"
        ) from error
    except errors.HFValidationError as error:
        raise UserError("not a hub id", where, "name a folder or org/name[@revision]") from error
    except errors.LocalEntryNotFoundError as error:
        raise UserError(
            "hub not reached",
            f"{where} is no folder here and not whole in the hub's cache",
            "connect (unset HF_HUB_OFFLINE) and run again, or name a folder",
        ) from error
    except (errors.HTTPError, ConnectionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError("download failed", f"{where} ({reason})", "run again to resume") from error
