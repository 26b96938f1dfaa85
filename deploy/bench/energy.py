"""What the machine's own counters say of energy: RAPL of processors, NVML of NVIDIA GPUs."""

import importlib
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch


class EnergyMeter:
    """Counts joules from where it is made.

    RAPL's counters begin anew after some 10 to 60 minutes of full load: read more often than that.

    Args:
        device: where the models lie; a GPU's energy is counted beside that of the processors.
        root: under which /sys lies.

    Attributes:
        counted: what is counted, as "processor package-0".
        missing: why something is not, a sentence each.
    """

    def __init__(self, device: torch.device, root: Path = Path("/")) -> None:
        self.missing: list[str] = []
        self._counters: list[_Counter] = self._packages(root)
        if device.type == "cuda":
            self._counters += self._gpu(device)
        self.counted = [counter.name for counter in self._counters]
        self._joules = 0.0

    def read(self) -> float | None:
        """Joules of all that is counted since the meter was made; None where nothing is."""
        if not self._counters:
            return None
        self._joules += sum(counter.advance() for counter in self._counters)
        return self._joules

    def _packages(self, root: Path) -> list["_Counter"]:
        """Of all processor packages, or none: their sum would be that of another machine.

        A package's subdomains are parts of it, and `psys` and `intel-rapl-mmio` count it again.
        """
        zones = sorted((root / "sys" / "class" / "powercap").glob("intel-rapl:*"))
        packages = [
            zone
            for zone in zones
            if re.fullmatch(r"intel-rapl:\d+", zone.name)
            and (zone / "name").read_text().startswith("package")
        ]
        if not packages:
            self.missing.append(
                "This machine does not tell the energy of its processor (no package in "
                "/sys/class/powercap); virtual machines seldom do."
            )
        try:
            return [_Package(zone) for zone in packages]
        except PermissionError as error:
            self.missing.append(
                f"The processor's energy is not counted: {error.filename} may be read by root "
                "only; allow it (chmod a+r), or run as root."
            )
            return []

    def _gpu(self, device: torch.device) -> list["_Counter"]:
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            self.missing.append(
                "The GPU's energy is not counted: NVML's Python package is missing; "
                "pip install nvidia-ml-py."
            )
            return []
        try:
            return [_Gpu(nvml, device)]
        except nvml.NVMLError as error:
            self.missing.append(f"The GPU's energy is not counted: its driver says {error}.")
            return []


class _Counter(ABC):
    """A number that grows with the energy that was used.

    Args:
        name: of what is counted.
        wraps_at: where it begins at 0 again; None where it does not.
    """

    def __init__(self, name: str, joules_per_unit: float, wraps_at: int | None = None) -> None:
        self.name = name
        self._joules_per_unit, self._wraps_at = joules_per_unit, wraps_at
        self._last = self._read()

    @abstractmethod
    def _read(self) -> int: ...

    def advance(self) -> float:
        """Joules since the last call."""
        now = self._read()
        used, self._last = now - self._last, now
        if used < 0 and self._wraps_at is not None:
            used += self._wraps_at
        return used * self._joules_per_unit


class _Package(_Counter):
    def __init__(self, zone: Path) -> None:
        self._file = zone / "energy_uj"
        name = (zone / "name").read_text().strip()
        wraps_at = int((zone / "max_energy_range_uj").read_text())
        super().__init__(f"processor {name}", 1e-6, wraps_at)

    def _read(self) -> int:
        return int(self._file.read_text())


class _Gpu(_Counter):
    def __init__(self, nvml: Any, device: torch.device) -> None:
        nvml.nvmlInit()
        properties = torch.cuda.get_device_properties(device)
        # NVML knows nothing of CUDA_VISIBLE_DEVICES
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        super().__init__(f"GPU {properties.name}", 1e-3)

    def _read(self) -> int:
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
