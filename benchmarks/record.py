"""What every record holds beside its figures: machine, kernels, versions, commit and command."""

import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from polybasic.chain.formats.files import write_json
from polybasic.chain.kernels.cpu.build import describe_kernels
from polybasic.chain.kernels.selection import describe_gpu_kernels
from polybasic.deploy.hardware import describe_hardware
from polybasic.recipes.pipeline.provenance import git_commit, package_versions


def header(script: str, device: torch.device, places: Mapping[Any, str]) -> dict[str, Any]:
    """The head of a record.

    Args:
        script: name of a file of this folder, without its suffix.
        places: what the command line says of places on this machine -> the words for them; None
            is skipped.
    """
    return {
        "schema": f"polybasic.benchmark.{script}/1",
        "command": command_line(script, places),
        "commit": git_commit(),
        "hardware": describe_hardware(device),
        "kernels": describe_kernels() if device.type == "cpu" else describe_gpu_kernels(),
        "versions": {"python": platform.python_version(), **package_versions()},
    }


def command_line(script: str, places: Mapping[Any, str]) -> str:
    """As it was called, but for where things lie on this machine; see `header`."""
    words = {str(place): word for place, word in places.items() if place is not None}
    shown = []
    for word in sys.argv[1:]:
        option, equals, value = word.partition("=")
        if equals and value in words:
            shown.append(f"{option}={words[value]}")
        else:
            shown.append(words.get(word, word))
    return shlex.join(["python", f"benchmarks/{script}.py", *shown])


def console() -> Console:
    """For tables, wide enough for them where stdout is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 140)


def print_header(head: Mapping[str, Any]) -> None:
    """Command, machine, kernels and versions, a line each."""
    hardware = head["hardware"]
    machine = [hardware.get("accelerator"), hardware["processor"]]
    memory = f"{hardware['memory_bytes'] / 1e9:.0f} GB"
    machine += [f"{hardware['cores']} cores", f"{hardware['threads']} threads", memory]
    print(f"{head['command']}   (commit {head['commit'] or 'unknown'})")
    print(", ".join(str(part) for part in machine if part))
    if head["kernels"] is not None:
        print(f"kernels: {head['kernels']}")
    print(", ".join(f"{name} {version}" for name, version in head["versions"].items()))


def write_record(path: Path | None, head: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Write a record, whole, where a path is given.

    Raises:
        UserError: the disk is full or not writable.
    """
    if path is not None:
        write_json(path, {**head, **content})
        print(f"wrote {path}", file=sys.stderr)
