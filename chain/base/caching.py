"""What was made for this machine is kept in a cache that nobody but its user can write.

Who can write there chooses what is loaded and run as the caller. Hence nothing is read from where
others can write; what would lie there is made again.
"""

import errno
import functools
import json
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "POLYBASIC_CACHE"
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ANY_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """The folder for what was made for this machine: $POLYBASIC_CACHE, else in the user's cache.

    Raises:
        RuntimeError: there is no home folder.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "polybasic"


def private_folder(path: Path) -> Path:
    """The folder without links in its path, made where it is missing so that its user can write.

    Raises:
        OSError: it cannot be made, or others can write into it or replace it.
    """
    path = path.resolve()
    for folder in reversed([path, *path.parents]):
        # one by one: `parents=True` would make the upper ones as open as the umask allows
        if not folder.exists():
            folder.mkdir(mode=0o755, exist_ok=True)
        elif not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    check_private(path)
    return path


def check_private(path: Path) -> None:
    """Refuse a file or folder without links in its path that others could have written.

    It and all folders above it must belong to the caller or to root, and it must be closed to
    others. A folder above may be open if it is sticky, as /tmp is, where nobody replaces what is
    not theirs, or if it lies in a folder that nobody but the caller can enter.

    Raises:
        OSError: it is missing, or others can write into it or replace it.
    """
    is_shut = False
    for place in reversed([path, *path.parents]):
        found = place.lstat()
        may_be_open = place != path and (is_shut or found.st_mode & stat.S_ISVTX)
        if found.st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, f"{place} belongs to another user")
        if found.st_mode & _OTHERS and not may_be_open:
            raise PermissionError(errno.EPERM, f"others can write {place}: chmod go-w it")
        is_shut |= found.st_uid == os.geteuid() and not found.st_mode & _ANY_OF_OTHERS


def close_to_others(path: Path) -> None:
    """Take the right to write a file from all but its user, whatever the umask is."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS)


def read_cached(file: Path, without: str) -> Any:
    """Read JSON that `write_cached` wrote; None if it is missing, damaged or open to others.

    Args:
        file: in the cache folder.
        without: what happens where it cannot be read, for a warning.
    """
    try:
        check_private(file.resolve())
        return json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _warn_once(f"{without}: {file} cannot be read ({error})")
        return None


def write_cached(file: Path, content: Any, without: str) -> None:
    """Write JSON for later processes, whole; several processes may do so at once.

    Args:
        file: in the cache folder.
        content: of the file.
        without: what happens where it cannot be written, for a warning.
    """
    try:
        parent = private_folder(file.parent)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=parent) as folder:
            written = Path(folder) / file.name
            written.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
            close_to_others(written)
            written.replace(file)
    except OSError as error:
        _warn_once(f"{without}: {file} cannot be written ({error})")


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning("%s", message)
