"""Finds a C++ compiler, and what it is told to compile for an instruction set."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from polybasic.chain.base.errors import UserError
from polybasic.chain.kernels.cpu.instruction_sets import NATIVE, InstructionSet, machine
from polybasic.chain.kernels.cpu.unavailable import NativeUnavailable

INSTALL_COMPILER = "install g++ or pip install 'polybasic[native]'"
COMPILER_VARIABLE = "CXX"

_ON_PATH = ("c++", "g++", "clang++")
_ZIG = "zig c++"
_VERSION_SECONDS = 60
"""For a compiler to print its version; one that is slower is taken for one that does not run."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that is known to run.

    Attributes:
        command: program and arguments before the flags.
        name: for messages ("g++", "zig c++").
        version_line: the first line that it prints for --version.
    """

    command: tuple[str, ...]
    name: str
    version_line: str

    def __str__(self) -> str:
        # "g++ (Debian 12.2.0-14) 12.2.0", "Debian clang version 14.0.6 (...)"
        found = re.search(r"version (\S+)", self.version_line)
        version = found[1] if found else self.version_line.rpartition(" ")[2]
        return f"{self.name} {version}"

    def flags(self, isa: InstructionSet) -> tuple[str, ...]:
        """Flags of the kernels for an instruction set.

        No contraction: a sum must not depend on how the compiler fuses it.
        """
        return (
            "-std=c++17",
            "-O3",
            *self._processor(isa),
            *isa.options,
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fPIC",
            "-Wno-psabi",
        )

    def _processor(self, isa: InstructionSet) -> tuple[str, ...]:
        is_arm = machine() == "aarch64"
        if isa.name == NATIVE:
            return ("-mcpu=native" if is_arm else "-march=native",)
        if not isa.architecture:
            return ()
        if self.name == _ZIG:
            # it has names of its own, and takes extensions with the processor only
            cpu = isa.architecture.replace("-", "_")
            cpu = "generic" if cpu.startswith("arm") else cpu
            extensions = [name.replace("-", "_") for name in isa.extensions]
            return (f"-mcpu={'+'.join([cpu, *extensions])}",)
        if isa.architecture.startswith("arm"):
            return (f"-march={'+'.join([isa.architecture, *isa.extensions])}",)
        return (f"-march={isa.architecture}", *(f"-m{name}" for name in isa.extensions))


def find_compiler() -> Compiler | None:
    """$CXX; else the first of c++, g++, clang++ that runs; else the package ziglang's; else None.

    Raises:
        UserError: CXX is set and cannot be run.
    """
    if named := os.environ.get(COMPILER_VARIABLE):
        return _named_compiler(named)
    for name in _ON_PATH:
        if (path := shutil.which(name)) and (found := tried((path,), name)):
            return found
    return zig()


def need_compiler() -> Compiler:
    """The compiler that `find_compiler` finds.

    Raises:
        NativeUnavailable: there is none.
        UserError: CXX is set and cannot be run.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NativeUnavailable("no C++ compiler found", INSTALL_COMPILER)
    return compiler


def zig(target: str = "") -> Compiler | None:
    """The compiler of the package ziglang, or None where it is not installed.

    Args:
        target: architecture, system and oldest C library, "x86_64-linux-gnu.2.17"; else this
            machine's.
    """
    if importlib.util.find_spec("ziglang") is None:
        return None
    command: tuple[str, ...] = (sys.executable, "-m", "ziglang", "c++")
    command = (*command, "-target", target) if target else command
    try:
        with tempfile.TemporaryDirectory() as folder:  # for macOS, it leaves an empty a.o
            return tried(command, _ZIG, folder)
    except OSError:
        return None


def tried(command: tuple[str, ...], name: str, folder: str | None = None) -> Compiler | None:
    """The compiler of a command, if it prints its version.

    Args:
        folder: to run it in; by default the current one.
    """
    try:
        ran = subprocess.run(
            [*command, "--version"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = ran.stdout.splitlines()
    return Compiler(command, name, lines[0]) if ran.returncode == 0 and lines else None


def _named_compiler(named: str) -> Compiler:
    try:
        command = tuple(shlex.split(named))
        name = Path(command[0]).name
    except (ValueError, IndexError) as error:
        raise UserError(
            "CXX is no command", f"CXX={named}", "name a C++ compiler, or unset CXX"
        ) from error
    if found := tried(command, name):
        return found
    raise UserError("CXX cannot be run", f"CXX={named}", "name a C++ compiler, or unset CXX")
