"""What lies in the cache folder: named, measured and removed, by the names that we give alone.

Anything else in a folder that the environment names as the cache is not ours, and stays.
"""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from polybasic.chain.base.caching import cache_folder
from polybasic.chain.formats.kept import CHAINS, DIGITS, KNOWN, MODELS

_DIGEST = "[0-9a-f]" * DIGITS
_KINDS = {
    "kernels": ("compiled CPU kernels", ("*.so", ".building-*")),
    "products": ("choices of GPU kernels", ("*.json", ".writing-*")),
    "product_times": ("times of PyTorch's products", ("*.json", ".writing-*")),
    MODELS: ("models read from GGUF files", (f"*-{_DIGEST}", ".*.partial")),
    CHAINS: ("chains of models alone", (f"*-{_DIGEST}", ".*.partial")),
    KNOWN: ("digests and sizes of large files", (f"*-{_DIGEST}.json", ".writing-*")),
    "zig": ("files of the compiler ziglang", ("b", "h", "o", "p", "tmp", "z")),
}
"""Folder -> what lies in it, and patterns of its entries."""


@dataclass(frozen=True)
class Cached:
    """One kind of what was made for this machine.

    Attributes:
        what: for people.
        folder: where it lies.
        entries: files and folders of ours in it.
        num_files: in them.
        num_bytes: of these.
        used: when one of them was written or read last, in seconds since 1970; a file system may
            note readings once a day, or not at all.
    """

    what: str
    folder: Path
    entries: Sequence[Path]
    num_files: int
    num_bytes: int
    used: float


def cached() -> list[Cached]:
    """All kinds of which there is something.

    Raises:
        RuntimeError: there is no home folder.
    """
    found = []
    for name, (what, patterns) in _KINDS.items():
        folder = cache_folder() / name
        entries = sorted(entry for pattern in patterns for entry in folder.glob(pattern))
        inside = [path for entry in entries for path in (entry, *entry.rglob("*"))]
        states = [path.lstat() for path in inside if path.is_file()]
        if entries:
            num_bytes = sum(state.st_size for state in states)
            used = max((max(state.st_atime, state.st_mtime) for state in states), default=0.0)
            found.append(Cached(what, folder, entries, len(states), num_bytes, used))
    return found


def clear(found: Sequence[Cached]) -> None:
    """Remove what was found; processes that have it loaded go on with it.

    Raises:
        OSError: it cannot be removed.
    """
    for kind in found:
        for entry in kind.entries:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        with suppress(OSError):  # something else lies in it
            kind.folder.rmdir()
