"""What the processor says of itself, by /proc/cpuinfo or macOS' sysctl, and its usable cores."""

import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
_SYSCTL = "/usr/sbin/sysctl"
_SYSCTL_SECONDS = 10

_ON_LINUX = {
    "neon": "asimd",
    "advsimd": "asimd",
    "lse": "atomics",
    "rdm": "asimdrdm",
    "dotprod": "asimddp",
    "armv8_crc32": "crc32",
    "avx1.0": "avx",
    "lzcnt": "abm",
    "avx512vnni": "avx512_vnni",
}
"""macOS' names of instruction sets that /proc/cpuinfo names otherwise."""


def processor_flags() -> frozenset[str]:
    """Instruction sets as /proc/cpuinfo names them; empty where the system tells none."""
    return frozenset(flags_line().split())


def flags_line() -> str:
    """The processor's flags as /proc/cpuinfo lists them; empty where the system tells none."""
    if sys.platform == "darwin":
        return _flags_of_mac()
    return _of_cpu_info("flags", "Features")  # on x86, on ARM


def processor_name() -> str:
    """The model of the processor; its architecture where the system tells no more."""
    if sys.platform == "darwin":
        name = _sysctl().get("machdep.cpu.brand_string", "")
    else:
        name = _of_cpu_info("model name")
    return name or platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may use; of a Mac's cores of two kinds, the fast ones."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    fast = _sysctl().get("hw.perflevel0.physicalcpu", "")
    return int(fast) if fast.isdigit() else os.cpu_count() or 1


def _of_cpu_info(*names: str) -> str:
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text("utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return ""


def _flags_of_mac() -> str:
    told = _sysctl()
    words = [
        name.rpartition(".")[2].lower().removeprefix("feat_")
        for name, value in told.items()
        if name.startswith("hw.optional.") and value == "1"
    ]
    for name in ("features", "leaf7_features", "extfeatures"):
        words += told.get(f"machdep.cpu.{name}", "").lower().split()
    return " ".join(sorted({_ON_LINUX.get(word, word) for word in words}))


@cache
def _sysctl() -> dict[str, str]:
    """What macOS tells of hardware and processor, by name; nothing where it cannot be asked."""
    try:
        ran = subprocess.run(
            [_SYSCTL, "hw", "machdep.cpu"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_SYSCTL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    lines = (line.partition(":") for line in ran.stdout.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
