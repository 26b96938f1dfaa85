"""Joules from counters of the system, written here as the kernel and NVML show them."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polybasic.deploy.bench.energy import EnergyMeter

CPU = torch.device("cpu")
RANGE = 262_143_328_850


def write_zone(root: Path, folder: str, name: str, energy: int, wraps_at: int = RANGE) -> Path:
    zone = root / "sys" / "class" / "powercap" / folder
    zone.mkdir(parents=True, exist_ok=True)
    (zone / "name").write_text(f"{name}\n")
    (zone / "max_energy_range_uj").write_text(f"{wraps_at}\n")
    (zone / "energy_uj").write_text(f"{energy}\n")
    return zone


def write_machine(root: Path, *packages: int, others: int = 0) -> None:
    """Two packages with their parts, and what counts them a second time."""
    for number, energy in enumerate(packages):
        write_zone(root, f"intel-rapl:{number}", f"package-{number}", energy)
        write_zone(root, f"intel-rapl:{number}:0", "core", others)
        write_zone(root, f"intel-rapl:{number}:1", "dram", others)
    write_zone(root, f"intel-rapl:{len(packages)}", "psys", others)
    write_zone(root, "intel-rapl-mmio:0", "package-0", others)


def test_packages_are_added_and_nothing_counts_twice(tmp_path: Path) -> None:
    write_machine(tmp_path, 5_000_000, 70_000_000)
    meter = EnergyMeter(CPU, tmp_path)
    assert (meter.counted, meter.missing) == (["processor package-0", "processor package-1"], [])
    assert meter.read() == 0
    write_machine(tmp_path, 7_500_000, 71_000_000, others=900_000_000)
    assert meter.read() == pytest.approx(3.5)
    write_machine(tmp_path, 8_500_000, 71_000_000, others=1_900_000_000)
    assert meter.read() == pytest.approx(4.5)


def test_a_counter_that_begins_anew(tmp_path: Path) -> None:
    zone = write_zone(tmp_path, "intel-rapl:0", "package-0", RANGE - 2_000_000)
    meter = EnergyMeter(CPU, tmp_path)
    for energy, joules in ((RANGE - 1_000_000, 1), (3_000_000, 5), (4_000_000, 6)):
        (zone / "energy_uj").write_text(f"{energy}\n")
        assert meter.read() == pytest.approx(joules)


def test_machine_that_tells_nothing(tmp_path: Path) -> None:
    meter = EnergyMeter(CPU, tmp_path)
    assert meter.read() is None
    assert "does not tell the energy" in meter.missing[0]
    assert meter.counted == []


def test_counters_for_root_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One package that may not be read leaves no sum."""
    write_machine(tmp_path, 5, 7)
    refused = tmp_path / "sys/class/powercap/intel-rapl:1/energy_uj"
    if os.geteuid() == 0:  # to whom no mode of a file means anything
        read_text = Path.read_text

        def refusing(self: Path, *arguments: Any) -> str:
            if self == refused:
                raise PermissionError(13, "Permission denied", str(self))
            return read_text(self, *arguments)

        monkeypatch.setattr(Path, "read_text", refusing)
    refused.chmod(0)
    meter = EnergyMeter(CPU, tmp_path)
    assert meter.read() is None
    assert meter.missing == [
        f"The processor's energy is not counted: {refused} may be read by root only; allow it "
        "(chmod a+r), or run as root."
    ]


class NVMLError(Exception):
    pass


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU whose counter is at `millijoules`."""
    machine = SimpleNamespace(millijoules=1000, fails=False)

    def consumption(handle: str) -> int:
        assert handle == "handle of GPU-12-34"
        if machine.fails:
            raise NVMLError("Not Supported")
        return int(machine.millijoules)

    nvml: Any = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
        nvmlDeviceGetTotalEnergyConsumption=consumption,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    properties = SimpleNamespace(uuid="12-34", name="H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return machine


def test_gpu_is_counted_beside_the_processor(tmp_path: Path, gpu: SimpleNamespace) -> None:
    zone = write_zone(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = EnergyMeter(torch.device("cuda"), tmp_path)
    assert meter.counted == ["processor package-0", "GPU H100"]
    gpu.millijoules += 2500
    (zone / "energy_uj").write_text("1000000")
    assert meter.read() == pytest.approx(3.5)


def test_gpu_without_a_counter(tmp_path: Path, gpu: SimpleNamespace) -> None:
    gpu.fails = True
    meter = EnergyMeter(torch.device("cuda"), tmp_path)
    assert meter.read() is None
    assert meter.missing[1] == "The GPU's energy is not counted: its driver says Not Supported."


def test_gpu_without_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter = EnergyMeter(torch.device("cuda"), tmp_path)
    assert meter.read() is None
    assert "pip install nvidia-ml-py" in meter.missing[1]
