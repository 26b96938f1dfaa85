"""The machines that train a head together: DeepSpeed's hostfile, and how a worker starts on one.

A worker is started through ssh, on each machine of the file, this one too. Python and this package
lie at the same path everywhere, and all machines see the working folder, the output folder, models
and conversations under the same names. ssh's stdin is the worker's: it closes with the launcher.
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polybasic.chain.errors import UserError

NOT_SHARED = 66
"""Exit code of a worker on a machine that does not see the launcher's folders."""

_NO_PYTHON = (126, 127)
_NO_CONNECTION = 255
_LINE = re.compile(r"(?P<name>[A-Za-z0-9_][\w.@:-]*)\s+slots\s*=\s*(?P<slots>[1-9]\d*)")
# what processes on other machines need of this one's environment; never a password
_PASSED_ON = ("GLOO_", "HF_", "NCCL_", "OMP_", "PYTHON", "TORCH_")
_SECRET = ("TOKEN", "KEY", "PASSWORD", "SECRET")
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=30")


@dataclass(frozen=True)
class Host:
    """A machine, as ssh and the other machines name it, and how many processes it runs."""

    name: str
    slots: int


def read_hostfile(path: Path) -> list[Host]:
    """Read DeepSpeed's hostfile: lines `worker-1 slots=8`; `#` starts a comment.

    Raises:
        UserError: no such file, no hosts, a malformed line, or a host that is named twice.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError) as error:
        raise UserError("hostfile cannot be read", str(path), "check the path") from error
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        content = line.split("#")[0].strip()
        if not content:
            continue
        found = _LINE.fullmatch(content)
        if found is None or any(host.name == found["name"] for host in hosts):
            raise UserError(
                "hostfile line is malformed" if found is None else "host is named twice",
                f"{path} line {number} ({content})",
                "write one line for each machine: name slots=number",
            )
        hosts.append(Host(found["name"], int(found["slots"])))
    if not hosts:
        raise UserError("hostfile names no host", str(path), "write lines: name slots=number")
    return hosts


def check_slots(hosts: Sequence[Host], num_processes: int, path: Path) -> None:
    """Raise UserError unless the hosts have one slot for each process."""
    slots = sum(host.slots for host in hosts)
    if slots != num_processes:
        raise UserError(
            "hostfile has another number of slots than there are processes",
            f"{path} slots {slots}, train.num_processes = {num_processes}",
            f"set train.num_processes={slots}",
        )


def ssh_command(host: str, arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command that runs this Python with `arguments` on a host, in the folder of this process.

    Args:
        host: its name.
        arguments: of Python.
        environment: variables to set there, beside those of this process for communication,
            threads, Python and caches.
    """
    passed_on = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_PASSED_ON) and not any(word in name for word in _SECRET)
    }
    variables = [f"{name}={value}" for name, value in {**passed_on, **environment}.items()]
    words = shlex.join(["exec", "env", *variables, sys.executable, *arguments])
    enter = f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null || exit {NOT_SHARED}"
    # ssh hands it to the user's own shell, whichever that is
    return [*_SSH, host, shlex.join(["sh", "-c", f"{enter}; {words}"])]


def failure_on(host: str, code: int | None, last_line: str, folder: Path) -> UserError | None:
    """The failure that ssh's exit code stands for; None where the code is the worker's own.

    Args:
        host: its name.
        code: of ssh, which is the worker's where there was one.
        last_line: that ssh wrote on stderr.
        folder: of the launcher, which all hosts must see.
    """
    if code == NOT_SHARED:
        return UserError(
            "host does not see the folders of this one",
            f"{host}: {Path.cwd()} or {folder}",
            "start in, and write to, folders that all hosts share under the same names",
        )
    if code in _NO_PYTHON:
        return UserError(
            "no Python for the training processes",
            f"{host}: {sys.executable}",
            "install polybasic under the same path on every host",
        )
    if code == _NO_CONNECTION:
        return UserError(
            "ssh to a host failed",
            f"{host} ({last_line or 'it said nothing'})",
            f"see that `ssh {host} true` works without a password, and that nothing killed the "
            "process there",
        )
    return None
