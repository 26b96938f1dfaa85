"""What all scripts here share: options, the head of a record, how results are shown, how to end.

A record is the Markdown that a script prints: what `--record FILE` writes. It names no place on the
machine.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import whole_file
from polybasic.chain.kernels.cpu.native import describe_kernels
from polybasic.chain.kernels.selection import describe_gpu_kernels
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime.hardware import describe_hardware
from polybasic.recipes.pipeline.provenance import git_commit, package_versions

Head = dict[str, Any]
Row = Sequence[str]


def positive(word: str) -> int:
    """An option's whole number of at least 1."""
    if not word.isdigit() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number of at least 1")
    return int(word)


SHARED: dict[str, dict[str, Any]] = {
    "chain": {"type": Path, "help": "folder or hub id of a chain"},
    "--device": {"choices": ("cpu", "cuda"), "help": "default: cuda where there is one"},
    "--dtype": {"default": "bfloat16", "choices": ("bfloat16", "float16", "float32")},
    "--threads": {"type": positive, "help": "default: torch's own choice"},
    "--turns": {"type": positive, "default": 5, "help": "in which all take turns"},
    "--repeats": {"type": positive, "default": 12, "help": "calls of each in a turn"},
    "--systems": {"nargs": "+", "default": (), "help": "default: all that there are"},
    "--members": {"nargs": "+", "default": (), "metavar": "A,B,C", "help": "further plans"},
    "--prompts": {"type": Path, "help": "a question file; default: shipped prompts"},
    "--num-prompts-per-task": {"type": positive, "default": 1},
    "--max-new-tokens": {"type": positive, "default": 96},
    "--temperature": {"type": float, "default": 0.0},
    "--record": {"type": Path, "help": "write what is printed here, as Markdown"},
}
SYSTEM_OPTIONS = ("--systems", "--members")
PROMPT_OPTIONS = ("--prompts", "--num-prompts-per-task", "--max-new-tokens")


def options(document: str | None, *names: str, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with some of the shared options, and with `--threads` and `--record`.

    Args:
        document: of the script, whose first line describes it.
        defaults: other ones than the shared, by attribute.
    """
    parser = argparse.ArgumentParser(description=(document or "").splitlines()[0])
    for name in dict.fromkeys((*names, "--threads", "--record")):
        parser.add_argument(name, **SHARED[name])
    parser.set_defaults(**defaults)
    return parser


def device_of(arguments: argparse.Namespace) -> torch.device:
    """The device that is asked for, or the one that there is; also sets torch's threads.

    Raises:
        UserError: there is no such device.
    """
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    name = getattr(arguments, "device", "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("no GPU", "--device cuda, and torch finds none", "use --device cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def load(arguments: argparse.Namespace, context_tokens: int = 0, **more: Any) -> Chain:
    """The chain, with room for more tokens of context than usual where so many are asked for."""
    if context_tokens:
        more["context_tokens"] = context_tokens
    device = str(device_of(arguments))
    return load_chain(arguments.chain, device=device, dtype=arguments.dtype, **more)


def head_of(script: str, arguments: argparse.Namespace, device: torch.device) -> Head:
    """Command, commit, machine, kernels and versions of a record."""
    return {
        "command": command_line(script, arguments),
        "commit": git_commit(),
        "hardware": describe_hardware(device),
        "kernels": describe_kernels() if device.type == "cpu" else describe_gpu_kernels(),
        "versions": {"python": platform.python_version(), **package_versions()},
    }


def command_line(script: str, arguments: argparse.Namespace) -> str:
    """As it was called; places on this machine are replaced by the names of their options."""
    places = {}
    for name, value in vars(arguments).items():
        if isinstance(value, Path):
            places[str(value)] = name.upper()
        elif isinstance(value, list | tuple):
            places |= {str(path): path.name for path in value if isinstance(path, Path)}

    def shown(word: str) -> str:
        option, equals, value = word.rpartition("=")
        known = places.get(value, Path(value).name if Path(value).is_absolute() else value)
        return option + equals + known

    return shlex.join(["python", f"benchmarks/{Path(script).name}", *map(shown, sys.argv[1:])])


def shown_head(title: str, head: Head) -> str:
    """A head as Markdown."""
    hardware = head["hardware"]
    machine = [
        hardware.get("accelerator"),
        hardware["processor"],
        f"{hardware['cores']} cores",
        f"{hardware['threads']} threads",
        f"{hardware['memory_bytes'] / 1e9:.0f} GB",
    ]
    lines = {
        "command": f"`{head['command']}`",
        "commit": head["commit"] or "unknown",
        "machine": ", ".join(str(part) for part in machine if part),
        "kernels": head["kernels"],
        "versions": ", ".join(f"{name} {number}" for name, number in head["versions"].items()),
    }
    return f"# {title}\n\n" + "\n".join(f"- {name}: {line}" for name, line in lines.items())


def markdown(columns: Row, rows: Sequence[Row]) -> str:
    """A table whose columns stand below each other in a terminal, too; numbers to the right."""
    cells = [list(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: Row) -> str:
        padded = [
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    first, *others = widths
    rule = ["-" * first, *(f"{'-' * (width - 1)}:" for width in others)]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


class ScriptReport:
    """What a script found, printed as it comes.

    Args:
        prints: also on stdout; else it is only kept.
    """

    def __init__(self, prints: bool = True) -> None:
        self.parts: list[str] = []
        self._prints = prints

    def say(self, text: str) -> None:
        """A line, or several."""
        self.parts.append(text)
        if self._prints:
            print(f"{text}\n", flush=True)

    def table(self, title: str, columns: Row, rows: Sequence[Row]) -> None:
        """A table below its title, where it has rows."""
        if rows:
            self.say(f"{title}:\n\n{markdown(columns, rows)}")

    @property
    def text(self) -> str:
        """All of it as Markdown."""
        return "\n\n".join(self.parts) + "\n"

    def write(self, path: Path | None) -> None:
        """Write it, whole, where a path is given.

        Raises:
            UserError: the disk is full or not writable.
        """
        if path is not None:
            with whole_file(path) as partial:
                partial.write_text(self.text, "utf-8")
            print(f"wrote {path}", file=sys.stderr)


def begin(script: str, document: str | None, arguments: argparse.Namespace) -> ScriptReport:
    """A report that begins with the head of this run."""
    report = ScriptReport()
    title = (document or "").splitlines()[0].rstrip(".")
    report.say(shown_head(title, head_of(script, arguments, device_of(arguments))))
    return report


def in_a_process(script: str, words: Sequence[str], **environment: str) -> Any:
    """What a script prints as JSON in a fresh process, where no other work leaves its marks.

    Raises:
        UserError: it fails; it says itself why.
    """
    command = [sys.executable, script, *words]
    variables = {**os.environ, **environment}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=variables, text=True, check=False)
    if done.returncode:
        raise UserError(
            "a process of its own failed",
            f"{shlex.join(words)} (exit code {done.returncode})",
            "see its message above",
        )
    return json.loads(done.stdout)


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a script to its end: exit code 2 and one line for bad input, as the command line does."""
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
