"""What environment variables set: which kernels to use, for which processor, and their cache."""

import json
import logging
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from polybasic.chain.errors import UserError

KERNELS_VARIABLE = "POLYBASIC_KERNELS"
CACHE_VARIABLE = "POLYBASIC_CACHE"
ISA_VARIABLE = "POLYBASIC_ISA"

Wanted = Literal["auto", "native", "eager", "device"]

_log = logging.getLogger(__name__)


def kernels_wanted() -> Wanted:
    """The value of POLYBASIC_KERNELS, one of `Wanted`; "auto" if it is not set.

    "native" and "device" apply to CPUs, where "device" runs the path of GPUs in PyTorch's
    operations. "eager" applies to CPUs and GPUs.

    Raises:
        UserError: it has another value.
    """
    value = os.environ.get(KERNELS_VARIABLE) or "auto"
    for known in get_args(Wanted):
        if value == known:
            return known
    raise UserError(
        "unknown kernels", f"{KERNELS_VARIABLE}={value}", "use auto, native, eager or device"
    )


def isa_wanted() -> str | None:
    """The value of POLYBASIC_ISA, the instruction set of CPU kernels; None if it is not set."""
    return os.environ.get(ISA_VARIABLE) or None


def cache_folder() -> Path:
    """The folder for what was made for this machine: $POLYBASIC_CACHE, else in the user's cache.

    Raises:
        RuntimeError: there is no home folder.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "polybasic"


def write_cached(file: Path, content: Any, without: str) -> None:
    """Write JSON for later processes, whole; several processes may do so at once.

    Args:
        file: in the cache folder.
        content: of the file.
        without: what happens where it cannot be written, for a warning.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=file.parent) as folder:
            written = Path(folder) / file.name
            written.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
            written.replace(file)
    except OSError as error:
        _warn_once(f"{without}: {file} cannot be written ({error})")


@cache
def _warn_once(message: str) -> None:
    _log.warning("%s", message)
