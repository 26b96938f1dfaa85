"""The engines that a benchmark can ask beside this runtime, and whether they are installed."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polybasic.chain.base.errors import UserError

DEFAULT_PYTHON = Path(".venv-peers/bin/python")
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


@dataclass(frozen=True)
class Peer:
    """One engine.

    Attributes:
        runtime: its name in reports.
        packages: that its environment must have.
    """

    runtime: str
    packages: tuple[str, ...]


PEERS = {
    "llama.cpp": Peer("llama.cpp", ("xllamacpp",)),
    "openvino": Peer("OpenVINO GenAI", ("openvino-genai", "optimum-intel")),
}


def install_command(python: Path) -> str:
    """What makes the environment of `python`."""
    if python == DEFAULT_PYTHON and Path("Makefile").exists():
        return "make peers"
    folder = python.parent.parent
    install = f"{folder}/bin/pip install"
    return (
        f"python3 -m venv {folder} && {install} -r {REQUIREMENTS} && "
        f"{install} --no-deps optimum-intel==2.2.0"
    )


def check_peers(names: Sequence[str], python: Path, others: Sequence[str] = ()) -> None:
    """See that all are known and installed.

    Args:
        python: of the peers' environment.
        others: names that are served elsewhere, for the message.

    Raises:
        UserError: they are not.
    """
    for name in names:
        if name not in PEERS:
            raise UserError(
                "no such peer", f"--peers {name}", f"use {', '.join([*PEERS, *others])}"
            )
    if names and not _runs(python, ()):
        raise UserError(
            "no environment of peers", f"--peers-python {python}", f"run {install_command(python)}"
        )
    for name in names:
        if not _runs(python, PEERS[name].packages):
            raise UserError(
                "peer is not installed",
                f"{name} for --peers-python {python}",
                f"run {install_command(python)}",
            )


def clean_environment() -> dict[str, str]:
    """This process' environment without what belongs to its own Python."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }


def _runs(python: Path, packages: Sequence[str]) -> bool:
    code = "import sys; from importlib.metadata import version; [*map(version, sys.argv[1:])]"
    try:
        done = subprocess.run(
            [python, "-c", code, *packages],
            env=clean_environment(), capture_output=True, check=False,
        )  # fmt: skip
    except OSError:
        return False
    return done.returncode == 0
