"""What a machine has too little of, or a user no right to, told in one line wherever it shows."""

import errno
import os

from polybasic.chain.base.errors import UserError

_OF_MEMORY = ("can't allocate memory", "failed to map segment", "Cannot allocate memory")
"""Words of torch and of the loader of libraries, whose errors have no type of their own."""


def what_is_lacking(error: BaseException) -> UserError | None:
    """The line for an error of memory, disk or rights that are used up or missing; else None.

    Args:
        error: as a command ended with it.
    """
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        name = error.filename if isinstance(error, OSError) else None
        return UserError(
            "disk full", f"{name or 'standard output'} ({reason})", "free some space and run again"
        )
    if isinstance(error, PermissionError) and error.filename is not None:
        return UserError(
            "no permission",
            f"{error.filename} ({error.strerror})",
            f"give user {os.geteuid()}, who runs this, the right, or run it as the owner",
        )
    if "No usable temporary directory" in str(error):
        return UserError("no temporary folder", reason, "set TMPDIR to a folder that you can write")
    is_out_of_memory = (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or number == errno.ENOMEM
        or any(words in str(error) for words in _OF_MEMORY)
    )
    if is_out_of_memory:
        return UserError(
            "out of memory",
            reason,
            "close other programs, raise `ulimit -v`, or use a smaller model or context",
        )
    return None
