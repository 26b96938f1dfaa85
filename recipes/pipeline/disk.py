"""A full disk, refused before a run where possible, and reported in one way whoever meets it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import free_bytes

_SIGNS = ("No space left on device", "os error 28", "Disk quota exceeded", "os error 122")
_MARGIN_BYTES = 64 << 20


def check_free(path: Path, needed_bytes: int) -> None:
    """Refuse to start what will not fit.

    Args:
        path: where the output goes.
        needed_bytes: what will be written there.

    Raises:
        UserError: less is free, a margin of 64 MB included.
    """
    free = free_bytes(path)
    if free < needed_bytes + _MARGIN_BYTES:
        raise UserError(
            "not enough disk",
            f"{path} ({free / 1e6:.0f} MB free, about {needed_bytes / 1e6:.0f} MB needed)",
            "free some space or choose another folder with --out",
        )


@contextmanager
def full_disk_is_an_oserror(path: Path) -> Iterator[None]:
    """Turn a library's own exception for a full disk into an OSError with ENOSPC.

    safetensors and tokenizers raise their own types, torch.save a RuntimeError without a reason.
    """
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        is_full = any(sign in str(error) for sign in _SIGNS)
        torch_cut_short = "PytorchStreamWriter" in str(error) and free_bytes(path) < _MARGIN_BYTES
        if is_full or torch_cut_short:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
