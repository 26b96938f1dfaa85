"""Compiles, caches and finds the native CPU kernels.

The kernels run their threads in the OpenMP runtime that torch has loaded, so that both share one
pool; therefore they are compiled without an OpenMP flag and get the runtime's functions by address.
"""

import atexit
import ctypes
import functools
import importlib.util
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import sha256_of_file, sha256_of_object
from polybasic.chain.kernels.environment import (
    CACHE_VARIABLE,
    KERNELS_VARIABLE,
    cache_folder,
    kernels_wanted,
)

SOURCE_FOLDER = Path(__file__).parent / "source"
TRANSLATION_UNIT = "kernels.cpp"
KERNEL_FEATURES = ("avx512_bf16", "avx512_vnni")
"""Processor flags, as /proc/cpuinfo names them, that the kernels have special code for."""
INSTALL_COMPILER = "install g++ or pip install 'polybasic[native]'"

_ON_PATH = ("c++", "g++", "clang++")
_CPU_INFO = Path("/proc/cpuinfo")

_log = logging.getLogger(__name__)


class NativeUnavailable(Exception):
    """The native kernels cannot be used here.

    Args:
        reason: why, in one line.
        do: how to make them usable.
    """

    def __init__(self, reason: str, do: str) -> None:
        self.reason, self.do = reason, do
        super().__init__(" ".join(f"{reason}; {do}".split()))


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


class OpenmpFunctions(NamedTuple):
    """Addresses of functions of the OpenMP runtime that runs torch's threads.

    Attributes:
        parallel: void GOMP_parallel(void (*function)(void*), void* data, unsigned num_threads,
            unsigned flags).
        thread_num: int omp_get_thread_num(void).
        num_threads: int omp_get_num_threads(void).
    """

    parallel: int
    thread_num: int
    num_threads: int


def native_library() -> ctypes.CDLL | None:
    """The library of native kernels, or None if POLYBASIC_KERNELS asks for other kernels.

    With "auto", unavailable kernels are reported in one warning a process.

    Raises:
        UserError: POLYBASIC_KERNELS has an unknown value, or is "native" but the kernels are
            unavailable; CXX names a program that cannot be run.
    """
    wanted = kernels_wanted()
    if wanted in ("eager", "device"):
        return None
    try:
        return load_library()
    except NativeUnavailable as unavailable:
        if wanted == "native":
            raise UserError(
                "native CPU kernels are unavailable",
                f"{KERNELS_VARIABLE}=native ({unavailable.reason})",
                f"{unavailable.do}, or set {KERNELS_VARIABLE}=auto",
            ) from unavailable
        _warn_once(f"CPU kernels: eager PyTorch, which is slower: {unavailable}")
        return None


def load_library() -> ctypes.CDLL:
    """The library of native kernels, compiled if this machine has none yet; loaded once a process.

    A failure is remembered as well, so that nothing is compiled twice in vain.

    Raises:
        NativeUnavailable: torch has no OpenMP runtime, there is no compiler, it failed, or its
            result cannot be loaded.
        UserError: CXX names a program that cannot be run.
    """
    outcome = _outcome()
    if isinstance(outcome, NativeUnavailable):
        raise NativeUnavailable(outcome.reason, outcome.do)
    return outcome


def describe_kernels() -> str:
    """Which kernels run on this CPU and why, without compiling.

    For example "native (g++ 12.2.0, avx512_bf16, avx512_vnni)" or "eager (no C++ compiler found;
    install g++ or pip install 'polybasic[native]')". If this process has already tried to load the
    kernels, it states the outcome.

    Raises:
        UserError: POLYBASIC_KERNELS has an unknown value; CXX names a program that cannot be run.
    """
    wanted = kernels_wanted()
    if wanted in ("eager", "device"):
        return f"{wanted} ({KERNELS_VARIABLE}={wanted})"
    try:
        if _outcome.cache_info().currsize:
            load_library()
        openmp_functions()
        compiler = _need_compiler()
    except NativeUnavailable as unavailable:
        return f"{'unavailable' if wanted == 'native' else 'eager'} ({unavailable})"
    flags = processor_flags()
    found = [feature for feature in KERNEL_FEATURES if feature in flags]
    return f"native ({', '.join([str(compiler), *(found or ['portable'])])})"


def find_compiler() -> Compiler | None:
    """$CXX; else the first of c++, g++, clang++ that runs; else the package ziglang's; else None.

    Raises:
        UserError: CXX is set and cannot be run.
    """
    if named := os.environ.get("CXX"):
        return _named_compiler(named)
    for name in _ON_PATH:
        if (path := shutil.which(name)) and (found := _tried((path,), name)):
            return found
    if importlib.util.find_spec("ziglang") is None:
        return None
    return _tried((sys.executable, "-m", "ziglang", "c++"), "zig c++")


def compiler_flags() -> tuple[str, ...]:
    """Flags of the kernels, the same for g++, clang and zig.

    No contraction: a sum must not depend on how the compiler fuses it.
    """
    is_arm = platform.machine() in ("aarch64", "arm64")
    return (
        "-std=c++17",
        "-O3",
        "-mcpu=native" if is_arm else "-march=native",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fPIC",
        "-shared",
        "-Wno-psabi",
    )


def built_library(compiler: Compiler) -> Path:
    """The compiled library's file, from the cache folder or compiled now, with a line on stderr.

    Its name is a digest of sources, flags, compiler and processor. It is written whole, so that
    processes that build at once do not disturb each other. If the cache folder cannot be written,
    a warning says so, and the file is put into a temporary folder of this process.

    Raises:
        NativeUnavailable: the compiler failed (with its first error line).
    """
    name = f"{_digest(compiler)}.so"
    try:
        return _cached_or_compiled(compiler, cache_folder(), name)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        cause = error.strerror if isinstance(error, OSError) else error
    temporary = Path(tempfile.mkdtemp(prefix="polybasic-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    _log.warning(
        "the cache folder cannot be written (%s): CPU kernels are compiled again by each process; "
        "set %s to a folder that can be written",
        cause,
        CACHE_VARIABLE,
    )
    return _cached_or_compiled(compiler, temporary, name)


def openmp_functions() -> OpenmpFunctions:
    """Functions of the OpenMP runtime whose threads torch uses; the process may have loaded others.

    Raises:
        NativeUnavailable: this torch has no such runtime.
    """
    import torch

    # the scopes in which torch's own calls are resolved: the process, then torch's libraries
    for name in (None, torch._C.__file__):
        runtime = ctypes.CDLL(name)
        try:
            if _is_runtime_of_torch(runtime):
                return OpenmpFunctions(
                    _address(runtime, "GOMP_parallel"),
                    _address(runtime, "omp_get_thread_num"),
                    _address(runtime, "omp_get_num_threads"),
                )
        except AttributeError:  # a missing symbol
            continue
    raise NativeUnavailable(
        "torch's OpenMP runtime was not found", "install a torch that is built with OpenMP"
    )


def processor_flags() -> frozenset[str]:
    """Instruction sets as /proc/cpuinfo names them; empty if there is no such file."""
    return frozenset(_flags_line().split())


@functools.cache
def _outcome() -> ctypes.CDLL | NativeUnavailable:
    try:
        openmp_functions()
        return _loaded(built_library(_need_compiler()))
    except NativeUnavailable as unavailable:
        return unavailable


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning("%s", message)


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(
            f"the compiled CPU kernels cannot be loaded ({error})",
            f"remove that file, or set CXX to another compiler or {CACHE_VARIABLE} to "
            "another folder",
        ) from error


def _need_compiler() -> Compiler:
    compiler = find_compiler()
    if compiler is None:
        raise NativeUnavailable("no C++ compiler found", INSTALL_COMPILER)
    return compiler


def _named_compiler(named: str) -> Compiler:
    try:
        command = tuple(shlex.split(named))
        name = Path(command[0]).name
    except (ValueError, IndexError) as error:
        raise UserError(
            "CXX is no command", f"CXX={named}", "name a C++ compiler, or unset CXX"
        ) from error
    if found := _tried(command, name):
        return found
    raise UserError("CXX cannot be run", f"CXX={named}", "name a C++ compiler, or unset CXX")


def _tried(command: tuple[str, ...], name: str) -> Compiler | None:
    """The compiler of `command`, if it prints its version."""
    try:
        ran = subprocess.run(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError:
        return None
    lines = ran.stdout.splitlines()
    return Compiler(command, name, lines[0]) if ran.returncode == 0 and lines else None


def _digest(compiler: Compiler) -> str:
    sources = sorted([*SOURCE_FOLDER.glob("*.h"), *SOURCE_FOLDER.glob("*.cpp")])
    return sha256_of_object(
        {
            "sources": {path.name: sha256_of_file(path) for path in sources},
            "flags": compiler_flags(),
            "compiler": (compiler.version_line, compiler.command[1:]),
            "processor": _flags_line() or platform.processor(),
            "system": (platform.system(), platform.machine(), platform.libc_ver()),
        }
    )


def _flags_line() -> str:
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text("utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):  # on x86, on ARM
                return value.strip()
    return ""


def _cached_or_compiled(compiler: Compiler, cache: Path, name: str) -> Path:
    path = cache / "kernels" / name
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=path.parent) as folder:
        built = Path(folder) / name
        _compile(compiler, built, cache)
        with built.open("rb") as written:
            os.fsync(written.fileno())
        built.replace(path)
    return path


def _compile(compiler: Compiler, path: Path, cache: Path) -> None:
    print(
        f"compiling the CPU kernels with {compiler}, once on this machine",
        file=sys.stderr,
        flush=True,
    )
    started = time.monotonic()
    source = SOURCE_FOLDER / TRANSLATION_UNIT
    ran = subprocess.run(
        [*compiler.command, *compiler_flags(), str(source), "-o", str(path)],
        env={"ZIG_GLOBAL_CACHE_DIR": str(cache / "zig"), **os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if ran.returncode != 0 or not path.is_file():
        raise NativeUnavailable(
            f"{compiler} failed ({_first_error(ran.stdout, ran.returncode)})",
            "set CXX to another compiler",
        )
    print(
        f"compiled the CPU kernels in {time.monotonic() - started:.1f} s",
        file=sys.stderr,
        flush=True,
    )


def _first_error(output: str, returncode: int) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line]
    return next(iter([*errors, *lines]), f"exit status {returncode}")


def _is_runtime_of_torch(runtime: ctypes.CDLL) -> bool:
    """Whether torch uses this runtime: it then sees a number of threads that is set there.

    Raises:
        AttributeError: `runtime` is not an OpenMP runtime.
    """
    import torch

    probed = torch.get_num_threads() + 1
    num_threads = runtime.omp_get_max_threads()
    runtime.omp_set_num_threads(probed)
    is_seen = torch.get_num_threads() == probed
    runtime.omp_set_num_threads(num_threads)
    return is_seen


def _address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address
