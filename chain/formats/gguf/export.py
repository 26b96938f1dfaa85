"""The models of a chain as GGUF files, side by side in a folder."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES
from polybasic.chain.formats.checkpoints.kinds import MODEL_KINDS
from polybasic.chain.formats.files import whole_folder
from polybasic.chain.formats.gguf.tensors import TYPES
from polybasic.chain.formats.gguf.writing import write_gguf
from polybasic.chain.formats.manifest import Manifest, Member
from polybasic.chain.formats.verify import check_chain

_SUFFIX = ".gguf"


@dataclass(frozen=True)
class ExportedFiles:
    """The result of an export.

    Attributes:
        folder: that holds the files and nothing else.
        files: by the member's name, the target's first.
        warnings: one line for each thing that llama.cpp does otherwise.
    """

    folder: Path
    files: dict[str, Path]
    warnings: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """A server of what was written; a copy drafts for the first."""
        first, *others = self.files.values()
        words = ["llama-server", "--model", str(first)]
        return shlex.join([*words, *(["--model-draft", str(others[0])] if others else [])])


def export_gguf(
    chain: Path, member: str | None = None, out: Path | None = None, target: str | None = None
) -> ExportedFiles:
    """Write models of a chain for llama.cpp, each into a file with the chain's tokenizer.

    Args:
        chain: folder of the chain.
        member: name of one model; default: the target and all intermediates.
        out: folder to write, whole; default: `MEMBER-gguf`, in the current folder. An export that
            is there is replaced.
        target: the folder or hub id that the chain's target is taken from; None for what the chain
            says.

    Raises:
        UserError: a broken chain, no such model, one that llama.cpp does not compute or a tokenizer
            that it does not have, something else at `out`, or a full disk.
    """
    checked = check_chain(chain, target=target)
    members = _members(checked.manifest, member)
    folder = out or Path(f"{members[0].name}-gguf")
    _refuse_replacing(folder)
    name = checked.manifest.provenance.recipe.get("name") or chain.absolute().name
    files: dict[str, Path] = {}
    warnings: dict[str, None] = {}
    with whole_folder(folder) as partial:
        for model in members:
            file = f"{model.name}-{_type_name(model)}{_SUFFIX}"
            said = write_gguf(
                checked.members[model.name],
                partial / file,
                tokenizer=checked.tokenizer,
                name=f"{name} {model.name}",
            )
            files[model.name] = folder / file
            warnings |= dict.fromkeys(said)
    return ExportedFiles(folder, files, tuple(warnings))


def _type_name(member: Member) -> str:
    """GGML's name of the type of most of its weights."""
    if member.kind == "awq":
        return "Q4_1"
    return member.dtype if member.dtype in BLOCK_TYPES else TYPES[getattr(torch, member.dtype)].name


def _members(manifest: Manifest, name: str | None) -> list[Member]:
    if name is None:
        return list(manifest.verifying)
    models = {member.name: member for member in manifest.members if member.kind in MODEL_KINDS}
    if name not in models:
        names = ", ".join(models)
        raise UserError("no such model", f"{name}; the chain's: {names}", "name one with --member")
    return [models[name]]


def _refuse_replacing(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir() or any(path.suffix != _SUFFIX for path in folder.iterdir()):
        raise UserError(
            "would replace something that is no export", f"{folder}", "choose another with --out"
        )
