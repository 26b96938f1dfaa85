"""Folders in the cache that are made once of something, and found again by what it was made of."""

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polybasic.chain.caching import CACHE_VARIABLE, cache_folder, private_folder
from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import disk_errors, sha256_of_object

MODELS, CHAINS = "models", "chains"
"""Kinds of folders, each in a folder of its own: checkpoints, and chains of them."""
DIGITS = 12
"""Of the digest in a folder's name."""


def kept_folder(kind: str, name: str, made_of: object, make: Callable[[Path], None]) -> Path:
    """The folder, made by `make` unless it is there; several processes make it once.

    Args:
        kind: one of the above.
        name: that it begins with, for people.
        made_of: JSON content that tells it from others.
        make: writes the folder that it is given, whole.

    Raises:
        UserError: nobody but its user may write the cache, and others can; or a full disk.
    """
    try:
        root = private_folder(cache_folder() / kind)
    except (OSError, RuntimeError) as error:
        raise UserError(
            "no cache folder",
            f"{error}",
            f"set {CACHE_VARIABLE} to a folder that only you can write",
        ) from error
    folder = root / f"{name}-{sha256_of_object(made_of)[:DIGITS]}"
    with disk_errors(folder), (root / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits for what the first one makes
        if not folder.is_dir():
            make(folder)
    return folder


def folder_stamp(folder: Path) -> dict[str, Any]:
    """A folder, with sizes and times of the files in it; hashing gigabytes takes too long."""
    folder = folder.resolve()
    files = {path.name: path.stat() for path in sorted(folder.iterdir()) if path.is_file()}
    return {
        "folder": str(folder),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in files.items()},
    }


def file_stamp(path: Path) -> list[object]:
    """What tells a file from another, or from what it was: place, size and time."""
    state = path.stat()
    return [str(path.resolve()), state.st_size, state.st_mtime_ns]
