"""The machine at hand, as a report names it, and the memory that it has left."""

import ctypes
import gc
import os
import platform
from pathlib import Path
from typing import Any, NamedTuple

import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processor import num_cores, processor_name
from polybasic.chain.formats.describe import machine_name
from polybasic.chain.kernels.cpu.native import instruction_set

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Usage(NamedTuple):
    """Bytes in use: by the process on a CPU, by torch's tensors on a CUDA device.

    Attributes:
        now: at this moment.
        peak: the most since `forget_peak`, or since the process began.
    """

    now: int
    peak: int


def device_named(name: str | None = None) -> torch.device:
    """A device by its name; by default cuda if there is one, else cpu.

    Raises:
        UserError: this machine has no such device.
    """
    known = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    known += [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if name is not None and name not in known:
        raise UserError("unknown device", f"device={name}", f"here there are {', '.join(known)}")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def describe_hardware(device: torch.device) -> dict[str, Any]:
    """Device name, processor, the instruction set of native kernels where these run, usable cores,
    torch's threads and memory in bytes."""
    isa = instruction_set() if device.type == "cpu" else None
    description = {
        "device": device.type,
        **({} if isa is None else {"instruction_set": isa}),
        "processor": processor_name(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        description["accelerator"] = properties.name
        description["accelerator_memory_bytes"] = properties.total_memory
    return description


def hardware_name(device: torch.device, num_parts: int = 1) -> str:
    """What a measured plan holds for, see `machine_name`."""
    return machine_name(describe_hardware(device), num_parts)


def available_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """Memory that the device can still give; None where the system does not tell.

    On a CPU that is what the kernel counts as available, and no more than the control groups of
    this process leave it; page cache counts as free in both.

    Args:
        root: under which /proc and /sys lie.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # what torch's allocator holds and does not use will be used first
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    described = root / "proc" / "meminfo"
    if not described.exists():
        return None
    fields = dict(line.split(":", 1) for line in described.read_text().splitlines())
    left = [1024 * int(fields["MemAvailable"].split()[0])]
    return min(left + _left_to_groups(root))


def usage(device: torch.device) -> Usage | None:
    """What is in use; None on systems without Linux' /proc."""
    if device.type == "cuda":
        return Usage(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    if not _STATUS.exists():
        return None
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return Usage(*(1024 * int(fields[key].split()[0]) for key in ("VmRSS", "VmHWM")))


def release_unused(device: torch.device) -> None:
    """Return what allocators hold of tensors that are gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif platform.system() == "Linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def forget_peak(device: torch.device) -> None:
    """Release what is unused, and count the peak of `usage` anew where the system can."""
    release_unused(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access(_CLEAR, os.W_OK):
        _CLEAR.write_text("5")  # man 5 proc


def _left_to_groups(root: Path) -> list[int]:
    """Of each limited control group above this process, what is left of its limit."""
    groups, left = root / "sys" / "fs" / "cgroup", []
    for line in (root / "proc" / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage, cached = groups, "memory.max", "memory.current", "inactive_file"
        elif controllers == "memory":
            top, limit = groups / "memory", "memory.limit_in_bytes"
            usage, cached = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if (folder / limit).is_file() and (
                most := (folder / limit).read_text().strip()
            ) != "max":
                numbers = (
                    line.split() for line in (folder / "memory.stat").read_text().splitlines()
                )
                reclaimable = int(dict(numbers)[cached])
                left.append(int(most) - int((folder / usage).read_text()) + reclaimable)
            if folder == top:
                break
    return left
