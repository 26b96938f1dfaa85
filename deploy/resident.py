"""Memory that a chain was measured to take, beside what was stated of it."""

import ctypes
import gc
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polybasic.deploy.memory import Memory

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Usage:
    """Bytes in use: of the process on a CPU, of torch's tensors on a CUDA device.

    Attributes:
        now: at this moment.
        peak: the most since `forget_peak`; since the process began where the system forgets
            nothing.
    """

    now: int
    peak: int


@dataclass(frozen=True)
class LoadedMemory:
    """What a chain's models and caches took.

    Attributes:
        stated: before they were loaded.
        before: they were loaded; None where the system does not tell.
        after: all of them and the caches of the verifying members and of the plan's drafter.
    """

    stated: Memory
    before: Usage | None
    after: Usage | None

    def report(self, answering: Usage | None) -> dict[str, Any]:
        """What was stated, what was measured, and the ratio of the two.

        Args:
            answering: usage once the chain has answered, its peak forgotten after loading.
        """
        report: dict[str, Any] = {"stated": self.stated.to_json(), "measured": None, "ratio": None}
        if self.before is None or self.after is None or answering is None:
            return report
        begin = self.before.now
        staying = self.after.now - begin
        report["measured"] = {
            "before_bytes": begin,
            "staying_bytes": staying,
            "loading_bytes": self.after.peak - begin,
            "answering_bytes": answering.peak - begin,
        }
        report["ratio"] = staying / self.stated.staying_bytes
        return report


def usage(device: torch.device) -> Usage | None:
    """What is in use; None on systems without Linux' /proc."""
    if device.type == "cuda":
        return Usage(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    if not _STATUS.exists():
        return None
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    now, peak = (1024 * int(fields[key].split()[0]) for key in ("VmRSS", "VmHWM"))
    return Usage(now, peak)


def give_back(device: torch.device) -> None:
    """Return what allocators hold of tensors that are gone."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif platform.system() == "Linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def forget_peak(device: torch.device) -> None:
    """Free what nobody uses, and count peaks from now on."""
    gc.collect()
    give_back(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access(_CLEAR, os.W_OK):
        _CLEAR.write_text("5")  # man 5 proc
