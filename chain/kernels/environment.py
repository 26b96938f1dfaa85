"""What environment variables set: which kernels to use, for which processor, and their cache."""

import os
from pathlib import Path
from typing import Literal, get_args

from polybasic.chain.base.errors import UserError

KERNELS_VARIABLE = "POLYBASIC_KERNELS"
ISA_VARIABLE = "POLYBASIC_ISA"
TIMES_VARIABLE = "POLYBASIC_PRODUCT_TIMES"

Wanted = Literal["auto", "native", "eager", "device"]


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


def times_given() -> Path | None:
    """The file of times that POLYBASIC_PRODUCT_TIMES names; None if it is not set."""
    named = os.environ.get(TIMES_VARIABLE)
    return Path(named).expanduser() if named else None
