"""What the processor says of itself."""

from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")


def processor_flags() -> frozenset[str]:
    """Instruction sets as /proc/cpuinfo names them; empty if there is no such file."""
    return frozenset(flags_line().split())


def flags_line() -> str:
    """The processor's flags as /proc/cpuinfo lists them; empty if there is no such file."""
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text("utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):  # on x86, on ARM
                return value.strip()
    return ""
