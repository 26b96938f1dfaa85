"""The machine at hand, as a report names it."""

import os
import platform
from pathlib import Path
from typing import Any

import torch


def describe_hardware(device: torch.device) -> dict[str, Any]:
    """Device name, processor, usable cores, torch's threads and memory in bytes."""
    description = {
        "device": device.type,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        description["accelerator"] = properties.name
        description["accelerator_memory_bytes"] = properties.total_memory
    return description


def hardware_name(device: torch.device) -> str:
    """What a measured plan holds for: the accelerator, or the processor and torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    if described.exists():
        for line in described.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
