"""Loads the native CPU kernels, those that came with the installation or those compiled here."""

import ctypes
import functools
import logging
import os
from pathlib import Path

from polybasic.chain.base.caching import CACHE_VARIABLE
from polybasic.chain.base.errors import UserError
from polybasic.chain.kernels.cpu.build import built_library, prebuilt_libraries
from polybasic.chain.kernels.cpu.compilers import COMPILER_VARIABLE, need_compiler
from polybasic.chain.kernels.cpu.instruction_sets import (
    NATIVE,
    PORTABLE,
    InstructionSet,
    best_set,
    wanted_set,
)
from polybasic.chain.kernels.cpu.openmp import openmp_functions
from polybasic.chain.kernels.cpu.unavailable import NativeUnavailable
from polybasic.chain.kernels.environment import (
    ISA_VARIABLE,
    KERNELS_VARIABLE,
    kernels_wanted,
)

_log = logging.getLogger(__name__)


def native_library() -> ctypes.CDLL | None:
    """The library of native kernels, or None if POLYBASIC_KERNELS asks for other kernels.

    With "auto", unavailable kernels are reported in one warning a process.

    Raises:
        UserError: POLYBASIC_KERNELS has an unknown value, or is "native" but the kernels are
            unavailable; POLYBASIC_ISA names a set that the processor does not have; CXX names a
            program that cannot be run.
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
        UserError: POLYBASIC_ISA names a set that the processor does not have; CXX names a program
            that cannot be run.
    """
    outcome = _outcome()
    if isinstance(outcome, NativeUnavailable):
        raise NativeUnavailable(outcome.reason, outcome.do)
    return outcome


def instruction_set() -> str | None:
    """Of the native kernels, which are loaded for it; None where others run on this CPU.

    Raises:
        UserError: as `native_library`.
    """
    if native_library() is None:
        return None
    isa, _ = _selected()
    return _known(isa).name


def describe_kernels() -> str:
    """Which kernels run on this CPU and why, without compiling.

    For example "native (g++ 12.2.0, avx512-bf16)", where the set is the best that the processor
    has, "native (prebuilt, avx2)", "native (prebuilt, portable: generic vectors, may be slower than
    transformers)" or "eager (no C++ compiler found; install g++ or pip install
    'polybasic[native]')". If this process has already tried to load the kernels, it states the
    outcome.

    Raises:
        UserError: as `native_library`.
    """
    wanted = kernels_wanted()
    if wanted in ("eager", "device"):
        return f"{wanted} ({KERNELS_VARIABLE}={wanted})"
    try:
        if _outcome.cache_info().currsize:
            load_library()
        openmp_functions()
        isa, prebuilt = _selected()
        maker = "prebuilt" if prebuilt else str(need_compiler())
    except NativeUnavailable as unavailable:
        return f"{'unavailable' if wanted == 'native' else 'eager'} ({unavailable})"
    if wanted_set() is not None:
        return f"native ({maker}, {ISA_VARIABLE}={isa.name}{_slowly(isa)})"
    isa = _known(isa)
    return f"native ({maker}, {isa.name}{_slowly(isa)})"


def _known(isa: InstructionSet) -> InstructionSet:
    """The known set that the processor's own is, if it is asked for by no name."""
    return (best_set() if isa.name == NATIVE else isa) or isa


def _slowly(isa: InstructionSet) -> str:
    """What is to be known of kernels for every processor of an architecture."""
    return "" if isa.name != PORTABLE else ": generic vectors, may be slower than transformers"


def _selected() -> tuple[InstructionSet, Path | None]:
    """The instruction set, and the library that came with the installation, if it is to be used.

    Raises:
        UserError: POLYBASIC_ISA names a set that the processor does not have.
    """
    wanted = wanted_set()
    native = wanted or InstructionSet(NATIVE)
    if os.environ.get(COMPILER_VARIABLE) or (wanted is not None and wanted.name == NATIVE):
        return native, None
    prebuilt = prebuilt_libraries()
    chosen = wanted or best_set(prebuilt)
    if chosen is None:
        return native, None
    return chosen, prebuilt.get(chosen.name)


@functools.cache
def _outcome() -> ctypes.CDLL | NativeUnavailable:
    try:
        openmp_functions()
        isa, prebuilt = _selected()
        return _loaded(prebuilt or built_library(need_compiler(), isa))
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
            f"remove that file, or set {ISA_VARIABLE}={NATIVE}, CXX to another compiler or "
            f"{CACHE_VARIABLE} to another folder",
        ) from error
