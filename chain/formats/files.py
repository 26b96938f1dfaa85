"""Files and folders are absent or whole: written under a temporary name, then renamed."""

import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.terminal import say

LOCK_NAME = ".lock"
"""Lies in every folder that `locked_folder` has held."""

_READ_BYTES = 1 << 20
_UNUSABLE = (
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)
"""Errors of a path that cannot be written: a file where a folder would be, a name too long."""
MAX_TEXT_BYTES = 100_000_000
"""Of a file that is read as a whole."""
MAX_NESTING = 100
"""Of lists and mappings in a file."""
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_TOO_DEEP = f"nested deeper than {MAX_NESTING}"


def lies_anywhere(path: Path) -> bool:
    """Whether there is such a path; one that is too long for the system, or holds NUL, is none."""
    return os.path.exists(path)  # noqa: PTH110  pathlib's own raises


def partial_path(path: Path) -> Path:
    """The temporary name under which `path` is written; one name, so that leftovers are found."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Report a full, read-only or forbidden disk, and an impossible path, in one line.

    Raises:
        UserError: for ENOSPC, EDQUOT and `_UNUSABLE` while writing `path`.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                "disk full",
                f"{path} ({free_bytes(path) / 1e6:.0f} MB free)",
                "free some space and run the same command again; what was whole is kept",
            ) from error
        if error.errno in _UNUSABLE:
            raise UserError(
                "cannot write", f"{path} ({error.strerror})", "choose another folder with --out"
            ) from error
        raise


def free_bytes(path: Path) -> int:
    """Free bytes of the disk on which `path` lies or would lie."""
    return shutil.disk_usage(existing(path)).free


def existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.absolute().parent
    return path


@contextmanager
def locked_folder(path: Path, what: str, do: str) -> Iterator[None]:
    """Hold a folder, made where it is missing; the lock ends with the process, however it ends.

    Args:
        path: the folder.
        what: is wrong where another process holds it.
        do: what to do then.

    Raises:
        UserError: another process holds it, or it cannot be written.
    """
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / LOCK_NAME).open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(what, str(path), do) from error
        yield


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; when the block ends without an exception it becomes `path`.

    Raises:
        UserError: the disk is full or not writable.
    """
    partial = partial_path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            with partial.open("rb") as written:
                os.fsync(written.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextmanager
def whole_folder(path: Path, keep_partial: bool = False) -> Iterator[Path]:
    """Yield a temporary folder; when the block ends without an exception it replaces `path`.

    Args:
        path: the folder to write; an older one of this name is replaced in the last step.
        keep_partial: start from what an interrupted run left, and leave it for the next one on
            failure (for stages that resume); otherwise leftovers are removed.

    Raises:
        UserError: the disk is full or not writable.
    """
    partial = partial_path(path)
    with disk_errors(path):
        if not keep_partial:
            shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            _open_to_readers(partial)
            if path.exists():
                replaced = path.with_name(f".{path.name}.replaced")
                shutil.rmtree(replaced, ignore_errors=True)
                path.rename(replaced)
                partial.rename(path)
                # a link is to where the user wanted the older one
                replaced.unlink() if replaced.is_symlink() else shutil.rmtree(replaced)
            else:
                partial.rename(path)
        except BaseException:
            if not keep_partial:
                shutil.rmtree(partial, ignore_errors=True)
            raise


def write_json(path: Path, content: Any, indent: int | None = 2) -> None:
    """Write `content` as JSON, whole; indented unless `indent` is None.

    Raises:
        UserError: the disk is full or not writable.
    """
    with whole_file(path) as partial:
        partial.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", "utf-8")


def read_json(path: Path, what: str) -> Any:
    """Read JSON from `path`; `what` names the thing in errors ("manifest").

    Raises:
        UserError: the file is missing or too large, or as `parse_json`.
    """
    return parse_json(read_text(path, what), what, str(path))


def read_text(path: Path, what: str) -> str:
    """The text of a file; `what` names the thing in errors.

    Raises:
        UserError: the file is missing, a folder, larger than `MAX_TEXT_BYTES`, or not UTF-8.
    """
    try:
        if (num_bytes := path.stat().st_size) > MAX_TEXT_BYTES:
            raise UserError(
                f"{what} is too large",
                f"{path} ({num_bytes:,} bytes)",
                f"up to {MAX_TEXT_BYTES:,} bytes are read; write it again",
            )
        return path.read_text("utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{what} not found", str(path), "check the path") from error
    except IsADirectoryError as error:
        raise UserError(f"{what} is a folder", str(path), "name the file itself") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{what} is not UTF-8 text", str(path), "write it again") from error


def read_secret(path: Path, what: str) -> str:
    """As `read_text`, with `warn_of_readers`."""
    text = read_text(path, what)
    warn_of_readers(path, what)
    return text


def warn_of_readers(path: Path, what: str) -> None:
    """Say on stderr where every user of the machine may read a secret file; `what` names it."""
    if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        shown = shlex.quote(str(path))
        say(f"warning: {what} open to every user of this machine: {path}; chmod o= {shown}")


def parse_json(text: str | bytes, what: str, where: str, line: int | None = None) -> Any:
    """Read JSON; `what` names the thing in errors, and `where` its place.

    Args:
        line: that the text is, of a file of many.

    Raises:
        UserError: no JSON (line and column are named), or as `check_content`.
    """
    with json_errors(what, where, line):
        content = json.loads(text)
    check_content(content, what, where if line is None else f"{where} line {line}")
    return content


@contextmanager
def json_errors(what: str, where: str, line: int | None = None) -> Iterator[None]:
    """Report what a JSON decoder does not read in one line; arguments as for `parse_json`.

    Raises:
        UserError: no JSON, a number of too many digits, or nesting that is too deep.
    """
    try:
        yield
    except json.JSONDecodeError as error:
        place = f"{where} line {line or error.lineno} column {error.colno}"
        raise _not_json(what, place, error.msg) from error
    except RecursionError as error:
        raise _not_json(what, where, _TOO_DEEP) from error
    except ValueError as error:  # digits; bytes that are no text
        raise _not_json(what, where, str(error).partition(";")[0]) from error


def check_content(content: Any, what: str, where: str) -> None:
    """Check what was read of JSON or YAML.

    Raises:
        UserError: it is nested deeper than `MAX_NESTING`, or a text holds half a surrogate pair.
    """
    level = [content]
    for _ in range(MAX_NESTING):
        keys = [key for value in level if isinstance(value, dict) for key in value]
        values = [
            value.values() if isinstance(value, dict) else value
            for value in level
            if _is_nest(value)
        ]
        level = [*keys, *itertools.chain.from_iterable(values)]
        if any(isinstance(value, str) and _HALF_PAIR.search(value) for value in level):
            raise _not_json(what, where, "half of a surrogate pair")
        if not (level := [value for value in level if _is_nest(value)]):
            return
    raise _not_json(what, where, _TOO_DEEP)


def sha256_of_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while chunk := content.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_of_object(content: Any) -> str:
    """Hex SHA-256 of `content` as canonical JSON (sorted keys, no white space)."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _is_nest(content: Any) -> bool:
    return isinstance(content, dict | list)


def _not_json(what: str, where: str, reason: str) -> UserError:
    return UserError(f"{what} is not JSON", f"{where} ({reason})", "repair it or write it again")


def _open_to_readers(folder: Path) -> None:
    """Give every file the mode of a file that was opened for writing; some writers use 0600."""
    mode = opened_mode()
    for path in folder.rglob("*"):
        # a hard link's mode is also that of the file elsewhere
        if path.is_file() and path.stat().st_nlink == 1:
            path.chmod(mode)


def opened_mode() -> int:
    """The mode that files get here that are opened for writing: 0o644 by the usual umask."""
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
