"""Compiles the native CPU kernels, once on a machine, and finds those that were compiled before."""

import atexit
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from polybasic.chain.base.caching import (
    CACHE_VARIABLE,
    cache_folder,
    check_private,
    close_to_others,
    private_folder,
)
from polybasic.chain.base.processor import flags_line, num_cores
from polybasic.chain.base.progress import ProgressReport, waiting
from polybasic.chain.formats.files import sha256_of_file, sha256_of_object
from polybasic.chain.kernels.cpu.compilers import Compiler
from polybasic.chain.kernels.cpu.instruction_sets import NATIVE, InstructionSet
from polybasic.chain.kernels.cpu.unavailable import NativeUnavailable

SOURCE_FOLDER = Path(__file__).parent / "source"
PREBUILT_FOLDER = Path(__file__).parent / "prebuilt"
"""Of libraries that a wheel brings."""

_DIGITS = 16
"""Of a digest, in the name of a library."""

_COMPILE_SECONDS = 900
"""For one file. The slowest that was seen takes a tenth: a compiler that needs more hangs."""

_log = logging.getLogger(__name__)


def sources_digest() -> str:
    """Of what the kernels are compiled from: a library of other sources is never loaded."""
    sources = sorted([*SOURCE_FOLDER.rglob("*.h"), *SOURCE_FOLDER.rglob("*.cpp")])
    return sha256_of_object(
        {path.relative_to(SOURCE_FOLDER).as_posix(): sha256_of_file(path) for path in sources}
    )


def prebuilt_name(isa: str) -> str:
    """The name of the library of an instruction set, made of the sources that lie here."""
    return f"{isa}-{sources_digest()[:_DIGITS]}.so"


def prebuilt_libraries() -> dict[str, Path]:
    """The libraries that came with this installation: instruction set -> file."""
    ending = prebuilt_name("")
    return {
        path.name.removesuffix(ending): path for path in sorted(PREBUILT_FOLDER.glob(f"*{ending}"))
    }


def built_library(compiler: Compiler, isa: InstructionSet) -> Path:
    """The compiled library's file, from the cache folder or compiled now, with progress on stderr.

    Its name has two digests. One is of sources, flags and compiler, and for the native set of the
    processor, so that machines that share a home folder do not load each other's. The other is of
    the library itself, so that a damaged one is found before it is loaded. It is written whole, so
    that processes that build at once do not disturb each other. If others than the user can write
    into the cache folder, or nobody can, a warning says so, and the file is put into a temporary
    folder of this process.

    Raises:
        NativeUnavailable: the compiler failed (with its first error line) or does not end, or there
            is no folder to compile in.
    """
    name = f"{isa.name}-{_digest(compiler, isa)[:_DIGITS]}"
    try:
        return _cached_or_compiled(compiler, isa, private_folder(cache_folder()), name)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        cause = error.strerror if isinstance(error, OSError) else error
    _log.warning(
        "the cache folder cannot be used (%s): CPU kernels are compiled again by each process; "
        "set %s to a folder that you alone can write",
        cause,
        CACHE_VARIABLE,
    )
    try:
        temporary = Path(tempfile.mkdtemp(prefix="polybasic-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return _cached_or_compiled(compiler, isa, temporary, name)
    except OSError as error:
        raise NativeUnavailable(
            f"no folder to compile them in ({error})", f"set {CACHE_VARIABLE} or TMPDIR to one"
        ) from error


def compile_library(compiler: Compiler, isa: InstructionSet, path: Path, cache: Path) -> None:
    """Compile all sources, as many at a time as there are cores, and link them.

    Args:
        path: of the library, in a folder that takes the objects as well.
        cache: a folder for what the compiler itself keeps.

    Raises:
        NativeUnavailable: the compiler failed.
    """
    units, flags = sorted(SOURCE_FOLDER.rglob("*.cpp")), compiler.flags(isa)
    objects = [path.with_name(f"{path.stem}-{unit.stem}.o") for unit in units]
    commands = [
        (*flags, f"-I{SOURCE_FOLDER}", "-c", str(unit), "-o", str(made))
        for unit, made in zip(units, objects, strict=True)
    ]
    with (
        ThreadPoolExecutor(num_cores()) as pool,
        ProgressReport("compiled parts", len(units)) as progress,
    ):
        progress.say(
            f"compiling the CPU kernels ({isa.name}) with {compiler}, once on this machine"
        )
        running = [pool.submit(_run, compiler, command, cache) for command in commands]
        try:
            for future in running:
                future.result()
                progress.step()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    with waiting("linking the CPU kernels"):
        _run(compiler, ("-O3", "-shared", *map(str, objects), "-o", str(path)), cache)
    for made in objects:
        made.unlink()


def _run(compiler: Compiler, arguments: Sequence[str], cache: Path) -> None:
    try:
        ran = subprocess.run(
            [*compiler.command, *arguments],
            env={"ZIG_GLOBAL_CACHE_DIR": str(cache / "zig"), **os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_COMPILE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _failed(compiler, f"not done after {_COMPILE_SECONDS} s") from error
    if ran.returncode != 0 or not Path(arguments[-1]).is_file():
        raise _failed(compiler, _first_error(ran.stdout, ran.returncode))


def _failed(compiler: Compiler, reason: str) -> NativeUnavailable:
    return NativeUnavailable(f"{compiler} failed ({reason})", "set CXX to another compiler")


def _digest(compiler: Compiler, isa: InstructionSet) -> str:
    return sha256_of_object(
        {
            "sources": sources_digest(),
            "flags": compiler.flags(isa),
            "compiler": (compiler.version_line, compiler.command[1:]),
            # what the compiler makes of "native"; any other set names all that it uses
            "processor": (flags_line() or platform.processor()) if isa.name == NATIVE else None,
            "system": (platform.system(), platform.machine(), platform.libc_ver()),
        }
    )


def _cached_or_compiled(compiler: Compiler, isa: InstructionSet, cache: Path, name: str) -> Path:
    folder = private_folder(cache / "kernels")
    for path in sorted(folder.glob(f"{name}-*.so")):
        if _is_whole(path):
            return path
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as beside:
        built = Path(beside) / f"{name}.so"
        started = time.monotonic()
        compile_library(compiler, isa, built, cache)
        close_to_others(built)
        with built.open("rb") as written:
            os.fsync(written.fileno())
        path = folder / f"{name}-{sha256_of_file(built)[:_DIGITS]}.so"
        built.replace(path)
    seconds = time.monotonic() - started
    print(f"compiled the CPU kernels in {seconds:.1f} s", file=sys.stderr, flush=True)
    return path


def _is_whole(library: Path) -> bool:
    """Whether a library of the cache is what was compiled; one that is not is removed."""
    try:
        check_private(library)
        reason = "it is damaged"
        is_whole = library.stem.endswith(f"-{sha256_of_file(library)[:_DIGITS]}")
    except PermissionError as error:
        is_whole, reason = False, str(error.strerror)
    if not is_whole:
        _log.warning("CPU kernels are compiled again: %s is not loaded (%s)", library, reason)
        library.unlink()
    return is_whole


def _first_error(output: str, returncode: int) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line]
    return next(iter([*errors, *lines]), f"exit status {returncode}")
