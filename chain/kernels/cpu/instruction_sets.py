"""The instruction sets that kernels are compiled for, and which of them this processor has."""

import platform
from collections.abc import Collection
from dataclasses import dataclass

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processor import processor_flags
from polybasic.chain.kernels.environment import ISA_VARIABLE, isa_wanted

NATIVE = "native"
"""All that the processor has, as the compiler finds it out."""

PORTABLE = "portable"
"""What every processor of an architecture has."""

_PORTABLE = ("-DPOLYBASIC_PORTABLE",)
_WIDE = ("-mprefer-vector-width=512",)
_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_VNNI = (*_V4, "avx512_vnni")
_BF16 = (*_VNNI, "avx512_bf16")
_DOTPROD = ("asimd", "atomics", "asimdrdm", "crc32", "asimddp")  # the first four by ARMv8.1


@dataclass(frozen=True)
class InstructionSet:
    """What a library of kernels may use of a processor.

    Attributes:
        name: as POLYBASIC_ISA and the names of libraries have it.
        architecture: for the compiler, "x86-64-v3"; empty for what it compiles for by default.
        extensions: beyond it, as compilers name them.
        options: further arguments of the compiler.
        needs: the processor's flags that it takes, as /proc/cpuinfo names them.
    """

    name: str
    architecture: str = ""
    extensions: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """The flags that this processor lacks; all of them where it does not tell its flags."""
        flags = processor_flags()
        return [flag for flag in self.needs if flag not in flags]


INSTRUCTION_SETS = {
    "x86_64": (
        InstructionSet(PORTABLE, "x86-64", options=_PORTABLE),
        InstructionSet("avx2", "x86-64-v3", needs=_V3),
        InstructionSet("avx2-vnni", "x86-64-v3", ("avxvnni",), needs=(*_V3, "avx_vnni")),
        InstructionSet("avx512", "x86-64-v4", options=_WIDE, needs=_V4),
        InstructionSet("avx512-vnni", "x86-64-v4", ("avx512vnni",), _WIDE, _VNNI),
        InstructionSet(
            "avx512-bf16",
            "x86-64-v4",
            ("avx512vnni", "avx512bf16"),
            _WIDE,
            _BF16,
        ),
        InstructionSet(
            "avx512-amx",
            "x86-64-v4",
            ("avx512vnni", "avx512bf16", "amx-tile", "amx-bf16", "amx-int8"),
            _WIDE,
            (*_BF16, "amx_tile", "amx_bf16", "amx_int8"),
        ),
    ),
    "aarch64": (
        InstructionSet(PORTABLE, "armv8-a", options=_PORTABLE),
        InstructionSet("neon", "armv8-a", needs=("asimd",)),
        InstructionSet("neon-dotprod", "armv8.2-a", ("dotprod",), needs=_DOTPROD),
        InstructionSet(
            "neon-bf16",
            "armv8.2-a",
            ("dotprod", "i8mm", "bf16"),
            needs=(*_DOTPROD, "i8mm", "bf16"),
        ),
    ),
}
"""By architecture, the slowest first: each contains what the kernels use of those before it."""

_OTHERS = (InstructionSet(PORTABLE, options=_PORTABLE),)


def machine() -> str:
    """This machine's architecture, a key of `INSTRUCTION_SETS` or another one."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def known_sets() -> tuple[InstructionSet, ...]:
    """The instruction sets of this architecture, the slowest first."""
    return INSTRUCTION_SETS.get(machine(), _OTHERS)


def best_set(names: Collection[str] | None = None) -> InstructionSet | None:
    """The fastest of the named sets, or of all, that this processor has; None if it has none."""
    found = [
        known
        for known in known_sets()
        if (names is None or known.name in names) and not known.missing
    ]
    return found[-1] if found else None


def wanted_set() -> InstructionSet | None:
    """The set that POLYBASIC_ISA names; None if it is not set.

    Raises:
        UserError: there is none of this name, or the processor lacks some of it.
    """
    wanted = isa_wanted()
    if wanted is None:
        return None
    if wanted == NATIVE:
        return InstructionSet(NATIVE)
    for known in known_sets():
        if known.name == wanted:
            if missing := known.missing:
                raise UserError(
                    f"this processor has no {', '.join(missing)}",
                    f"{ISA_VARIABLE}={wanted}",
                    f"use {_either([NATIVE, *_usable()])}, or unset it",
                )
            return known
    raise UserError(
        f"unknown instruction set of {machine()} processors",
        f"{ISA_VARIABLE}={wanted}",
        f"use {_either([NATIVE, *_usable()])}",
    )


def _usable() -> list[str]:
    return [known.name for known in known_sets() if not known.missing]


def _either(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
