"""Where the GGUF file lies that a reference names. Neither torch nor gguf in here."""

import re
from pathlib import Path

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.hub import snapshot
from polybasic.chain.formats.checkpoints.packages import PACKAGE, path_in_package
from polybasic.chain.formats.files import lies_anywhere

SUFFIX = ".gguf"
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Name of one of several files that are one model."""
_ON_HUB = re.compile(
    r"(?P<repository>[\w][\w.-]*/[\w][\w.-]*)/(?P<file>[^@]+\.gguf)(@(?P<revision>.+))?"
)
_FORMS = f"NAME{SUFFIX}, a folder with one, org/name/NAME{SUFFIX}, or {PACKAGE}name/NAME{SUFFIX}"


def names_gguf(reference: str) -> bool:
    """Whether a reference names a GGUF file, there or not: by its form, or a folder with one."""
    if reference.startswith(PACKAGE) or reference.partition("@")[0].endswith(SUFFIX):
        return True
    folder = Path(reference).expanduser()
    if not lies_anywhere(folder) or not folder.is_dir() or (folder / "config.json").is_file():
        return False
    return bool(_models_in(folder))


def find_gguf(reference: str, revision: str | None = None) -> Path:
    """The file that a reference names; one on the hub is downloaded unless it is in its cache.

    Of a model in several files it is the first.

    Args:
        reference: of which `names_gguf` is true: a file, a folder with one model,
            `org/name/FILE.gguf[@revision]`, or `package:name/FILE.gguf` of an installed package,
            none of whose code is run.
        revision: commit, tag or branch of a hub id.

    Raises:
        UserError: there is no such file, the folder holds several models, or the path leaves the
            package.
    """
    if reference.startswith(PACKAGE):
        reference = f"{path_in_package(reference, 'GGUF file')}"
    path = Path(reference).expanduser()
    if lies_anywhere(path):
        return _in_folder(path) if path.is_dir() else path
    if (found := on_hub(reference)) is None:
        raise UserError("GGUF file not found", reference, f"name {_FORMS}")
    repository, file, written = found
    return _downloaded(repository, file, revision or written)


def on_hub(reference: str) -> tuple[str, str, str | None] | None:
    """Repository, file and revision, of a reference to a file on the hub; None for others."""
    found = _ON_HUB.fullmatch(reference)
    if found is None or lies_anywhere(Path(reference).expanduser()):
        return None
    return found["repository"], found["file"], found["revision"]


def _downloaded(repository: str, file: str, revision: str | None) -> Path:
    named = PART.fullmatch(file)
    pattern = file if named is None else f"{named['stem']}-*-of-{named['count']}{SUFFIX}"
    path = snapshot(repository, revision, [pattern]) / file
    if not path.is_file():
        raise UserError("GGUF file not found", f"{file} in {repository}", "see its list of files")
    return path


def _in_folder(folder: Path) -> Path:
    found = _models_in(folder)
    if len(found) != 1:
        names = ", ".join(path.name for path in found)
        raise UserError("several models in a folder", f"{folder} ({names})", "name one of them")
    return found[0]


def _models_in(folder: Path) -> list[Path]:
    """GGUF files in a folder, of a model in several files the first."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        part = PART.fullmatch(path.name)
        if path.is_file() and (part is None or int(part["number"]) == 1):
            found.append(path)
    return found
