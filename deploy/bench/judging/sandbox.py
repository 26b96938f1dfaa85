"""Runs a program that nobody has read: apart, without a network, with little time and memory.

Not against an attacker: it may read what its user may, and delete files.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile

from polybasic.chain.base.errors import UserError

SECONDS = 2
MEGABYTES = 512
_WRITTEN_BYTES = 1 << 20
_LIMITS = (
    f"--as={MEGABYTES << 20}",
    f"--cpu={SECONDS}",
    f"--fsize={_WRITTEN_BYTES}",
    "--core=0",
)
_APART = ("--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")


def check_sandbox() -> None:
    """Check that programs can be run apart here.

    Raises:
        UserError: it is no Linux, lacks util-linux, or refuses namespaces to its users.
    """
    if not passes(""):
        raise UserError(
            "programs cannot be run apart here",
            "unshare --user --net",
            "run on a Linux that gives its users namespaces, or ask questions of numbers",
        )


def passes(program: str) -> bool:
    """Whether a Python program runs to its end, in an empty folder and with no standard input."""
    tools = shutil.which("prlimit"), shutil.which("unshare")
    if None in tools:
        return False
    end = secrets.token_hex()
    limit, apart = tools
    command = [limit, *_LIMITS, apart, *_APART, sys.executable, "-I", "-c"]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as shown:
        # one that exits early has not passed
        started = subprocess.Popen(
            [*command, f"{program}\nprint({end!r})"],  # type: ignore[list-item]
            stdin=subprocess.DEVNULL,
            stdout=shown,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            code = started.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return False
        finally:
            started.kill()
            started.wait()
        size = shown.seek(0, os.SEEK_END)
        shown.seek(max(size - len(end) - 1, 0))
        return code == 0 and shown.read().decode("utf-8", "replace").strip() == end
