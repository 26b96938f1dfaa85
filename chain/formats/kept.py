"""What is made once of files, kept in the cache, and found again by what it was made of."""

import fcntl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from polybasic.chain.base.caching import (
    CACHE_VARIABLE,
    cache_folder,
    private_folder,
    read_cached,
    write_cached,
)
from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import disk_errors, sha256_of_file, sha256_of_object

T = TypeVar("T")

MODELS, CHAINS = "models", "chains"
"""Kinds of folders, each in a folder of its own: checkpoints, and chains of them."""
KNOWN = "files"
"""Folder of what is known of large files."""
DIGITS = 12
"""Of the digest in a folder's name."""
_LARGE = 1 << 22
"""Bytes of a file that takes longer to read than what is known of it."""
_SETTLED = 2.0
"""Seconds after a change of a file within which another one may leave it the same times."""


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


def known(path: Path, what: str, find: Callable[[Path], T]) -> T:
    """What `find` returns of a file; of a large one it is kept until that changes.

    Whether it did is told by its place, inode, size and both times, of which a program can set but
    one.

    Args:
        what: is found, for the name of the kept file.
        find: reads nothing but the file, and returns a number or a text.

    Raises:
        UserError, OSError: as `find`.
    """
    state = path.stat()
    if state.st_size < _LARGE:
        return find(path)
    stamp = [*file_stamp(path), state.st_ctime_ns, state.st_ino]
    try:
        kept = cache_folder() / KNOWN / f"{what}-{sha256_of_object(stamp[0])[:DIGITS]}.json"
    except RuntimeError:  # there is no home folder
        return find(path)
    without = "large files are read through at each start"
    content = read_cached(kept, without)
    if isinstance(content, dict) and content.get("stamp") == stamp:
        return cast(T, content[what])
    begun = time.time()
    found = find(path)
    if state.st_ctime < begun - _SETTLED:
        write_cached(kept, {"stamp": stamp, what: found}, without)
    return found


def known_sha256(path: Path) -> str:
    """`sha256_of_file`, which takes as long as the file is large, once."""
    return known(path, "sha256", sha256_of_file)
