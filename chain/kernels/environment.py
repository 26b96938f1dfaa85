"""What the environment of a process says of kernels: which are wanted, and where they are kept."""

import os
from pathlib import Path
from typing import Literal, get_args

from polybasic.chain.errors import UserError

KERNELS_VARIABLE = "POLYBASIC_KERNELS"
CACHE_VARIABLE = "POLYBASIC_CACHE"

Wanted = Literal["auto", "native", "eager", "device"]


def kernels_wanted() -> Wanted:
    """What POLYBASIC_KERNELS asks for: "auto" (also where it is not set) or one of `Wanted`.

    "native" and "device" are about CPUs: there, "device" runs what GPUs run, in PyTorch's
    operations. "eager" is about CPUs and GPUs.

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


def cache_folder() -> Path:
    """Where what was made for this machine is kept: $POLYBASIC_CACHE, else the user's cache.

    Raises:
        RuntimeError: there is no home folder.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "polybasic"
