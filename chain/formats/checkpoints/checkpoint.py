"""Checkpoints of others: found in a folder or on the hub, read without running their code."""

import re
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.block_types import typed_name
from polybasic.chain.formats.checkpoints.hub import snapshot
from polybasic.chain.formats.checkpoints.packages import PACKAGE, path_in_package
from polybasic.chain.formats.files import disk_errors, lies_anywhere, opened_mode, read_json

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
WEIGHT_SUFFIXES = (".safetensors", ".bin")
_READABLE = 0o444
_CONFIG_FILES = ("config.json", "generation_config.json", "quantize_config.json")
_LICENSE_PATTERNS = ("LICENSE*", "NOTICE*", "USE_POLICY*")

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_PICKLES = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
_SINGLE_THEN_SHARDED = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
SMALL_HEADS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.pt")
"""How Medusa's and Hydra's own code name what they write."""


@dataclass(frozen=True)
class _Layout:
    """What is fetched of one kind of repository; nothing else, and nothing of its folders.

    Attributes:
        config: the file that every such folder has.
        otherwise: what a folder without it is called.
        files: patterns of what is fetched in any case.
        safetensors: pattern of the weights.
        pickles: patterns of the weights where there are no safetensors.
    """

    config: str
    otherwise: str
    files: tuple[str, ...]
    safetensors: str
    pickles: tuple[str, ...]


_CHECKPOINT = _Layout(
    "config.json",
    "not a checkpoint",
    ("*.json", "*.jinja", "*.txt", "*.model", *_LICENSE_PATTERNS),
    "model*.safetensors",
    _PICKLES,
)
_ADAPTER = _Layout(
    "adapter_config.json",
    "not an adapter",
    ("adapter_config.json", *TOKENIZER_FILES, *_LICENSE_PATTERNS),
    "adapter_model.safetensors",
    ("adapter_model.bin",),
)
_HEAD = _Layout(
    "config.json",
    "not a draft head",
    ("config.json", *SMALL_HEADS, *_LICENSE_PATTERNS),
    "model*.safetensors",
    _PICKLES,
)


def resolve_checkpoint(reference: str, revision: str | None = None, weights: bool = True) -> Path:
    """The folder of a checkpoint; a hub id is downloaded into the hub's cache unless it is there.

    Args:
        reference: a folder that holds config.json, or a hub id `org/name[@revision]`. A folder of
            that name wins over the hub.
        revision: commit, tag or branch of a hub id.
        weights: False fetches only what is beside them.

    Raises:
        UserError: no such folder or repository, no config.json, gated, offline, disk full.
    """
    return _resolved(_CHECKPOINT, reference, revision, weights)


def resolve_adapter(reference: str, revision: str | None = None) -> Path:
    """The folder of a peft adapter, given as a folder or as a hub id `org/name[@revision]`.

    Raises:
        UserError: as `resolve_checkpoint`, for a missing adapter_config.json; no weights.
    """
    folder = _resolved(_ADAPTER, reference, revision)
    names = (_ADAPTER.safetensors, *_ADAPTER.pickles)
    if not any((folder / name).is_file() for name in names):
        raise UserError("no weights", f"{folder} holds no {' or '.join(names)}", "fetch it again")
    return folder


def resolve_head(reference: str, revision: str | None = None) -> Path:
    """The folder of a draft head as others publish it: a folder, one in an installed package as
    `package:name/FOLDER`, or a hub id.

    Raises:
        UserError: as `resolve_checkpoint`, `weight_files` or `path_in_package`.
    """
    if reference.startswith(PACKAGE):
        reference = f"{path_in_package(reference, 'draft head')}"
    folder = _resolved(_HEAD, reference, revision)
    weight_files(folder)
    return folder


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
    for name in SMALL_HEADS:
        if (folder / name).is_file():
            return [folder / name]
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


def copy_files(
    source: Path, destination: Path, names: list[str], links_weights: bool = False
) -> None:
    """Copy `names` (links are followed) with the permissions that new files get here.

    Args:
        links_weights: make hard links of weight files, which take no room, where the system does
            and whoever may read new files may read them.

    Raises:
        UserError: the disk is full or not writable.
    """
    with disk_errors(destination):
        destination.mkdir(parents=True, exist_ok=True)
        for name in names:
            is_linked = links_weights and name.endswith(WEIGHT_SUFFIXES)
            if is_linked and _linked(source / name, destination / name):
                continue
            # not copy2: autoawq writes its files with mode 0600
            shutil.copyfile(source / name, destination / name)


def _linked(source: Path, destination: Path) -> bool:
    """Whether a hard link could be made: not to another disk, nor to a file of someone else.

    Of a file that is shut to readers of new files none is made: its mode would be the link's, too.
    """
    try:
        if opened_mode() & _READABLE & ~source.stat().st_mode:
            return False
        destination.hardlink_to(source.resolve())
    except OSError:
        return False
    return True


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


def load_tensors(folder: Path, dtype: "torch.dtype | None" = None) -> "dict[str, torch.Tensor]":
    """All tensors of a checkpoint by name, memory-mapped on the CPU.

    Args:
        dtype: that tensors in blocks are dequantized to; None for bfloat16.

    Raises:
        UserError: as `tensor_files`.
    """
    import torch

    from polybasic.chain.formats.checkpoints.blocks import BlockWeight

    tensors: dict[str, torch.Tensor] = {}
    for stored_name, tensor in stored_tensors(folder).items():
        name, blocks = typed_name(stored_name)
        if blocks is not None:
            tensor = BlockWeight(blocks, tensor).dequantized(dtype or torch.bfloat16)
        tensors[name] = tensor
    return tensors


def stored_tensors(folder: Path) -> "dict[str, torch.Tensor]":
    """As `load_tensors`, with tensors in blocks as bytes, under the names that files give them."""
    paths = sorted(set(tensor_files(folder).values()))
    return {name: tensor for path in paths for name, tensor in read_tensors(path).items()}


def has_blocks(folder: Path) -> bool:
    """Whether a checkpoint holds tensors in the blocks of a GGUF file.

    Raises:
        UserError: as `tensor_files`.
    """
    return any(typed_name(name)[1] for name in tensor_files(folder))


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor of a checkpoint, by the tensor's name.

    Raises:
        UserError: no weights, a damaged file, a pickle that holds more than tensors, or a tensor
            that two files hold.
    """
    files: dict[str, Path] = {}
    for path in weight_files(folder):
        for name in _tensor_names(path):
            if name in files:
                raise UserError(
                    "tensor in two files", f"{name} in {path}", "download the checkpoint again"
                )
            files[name] = path
    return files


def read_tensors(path: Path, names: Sequence[str] | None = None) -> "dict[str, torch.Tensor]":
    """Tensors of one weight file, all of them or `names`, on the CPU.

    They are views of a mapping of the file that lives as long as any of them. A pickle written by a
    torch older than 1.6 cannot be mapped and is read whole.

    Raises:
        UserError: a damaged file, or a pickle that holds more than tensors.
    """
    if path.suffix != ".safetensors":
        content = _read_pickle(path)
        return content if names is None else {name: content[name] for name in names}
    with _opened_safetensors(path) as opened:
        return {
            name: opened.get_tensor(name) for name in (opened.keys() if names is None else names)
        }


def _tensor_names(path: Path) -> list[str]:
    if path.suffix != ".safetensors":
        return list(_read_pickle(path))
    with _opened_safetensors(path) as opened:
        return list(opened.keys())


@contextmanager
def _opened_safetensors(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
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


def _resolved(layout: _Layout, reference: str, revision: str | None, weights: bool = True) -> Path:
    folder = Path(reference).expanduser()
    if not lies_anywhere(folder):
        repository, revision = split_hub_id(reference, revision)
        patterns = (*layout.files, layout.safetensors) if weights else layout.files
        folder = snapshot(repository, revision, patterns)
        if weights and not list(folder.glob(layout.safetensors)):
            folder = snapshot(repository, revision, patterns + layout.pickles)
    return folder_with(folder, layout.config, layout.otherwise)


def folder_with(folder: Path, name: str, otherwise: str) -> Path:
    """A folder that holds a file of this name.

    Args:
        otherwise: what is wrong with one that does not.

    Raises:
        UserError: it does not.
    """
    if not (folder / name).is_file():
        found = f"no {name} in it" if folder.is_dir() else "no folder"
        raise UserError(otherwise, f"{folder} ({found})", f"name a folder that holds {name}")
    return folder
