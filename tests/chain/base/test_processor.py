"""What Macs say of their processors, by texts of their sysctl, and how many cores are used."""

import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from polybasic.chain.base import processor
from polybasic.chain.base.processor import flags_line, num_cores, processor_flags, processor_name
from polybasic.chain.kernels.cpu.instruction_sets import best_set
from polybasic.deploy.runtime.hardware import describe_hardware, hardware_name

M1 = """\
hw.ncpu: 8
hw.physicalcpu: 8
hw.perflevel0.physicalcpu: 4
hw.perflevel1.physicalcpu: 4
hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_RDM: 1
hw.optional.arm.FEAT_LSE: 1
hw.optional.arm.FEAT_BF16: 0
hw.optional.arm.FEAT_I8MM: 0
hw.optional.arm.FEAT_FP16: 1
hw.optional.neon: 1
hw.optional.watchpoint: 4
hw.optional.armv8_crc32: 1
hw.optional.AdvSIMD: 1
hw.optional.arm64: 1
machdep.cpu.cores_per_package: 8
machdep.cpu.brand_string: Apple M1
"""
M2 = M1.replace("BF16: 0", "BF16: 1").replace("I8MM: 0", "I8MM: 1").replace("Apple M1", "Apple M2")
INTEL = """\
hw.ncpu: 4
hw.physicalcpu: 2
hw.optional.avx2_0: 1
hw.optional.avx512f: 0
machdep.cpu.brand_string: Intel(R) Core(TM) i5-5250U CPU @ 1.60GHz
machdep.cpu.features: FPU SSE SSE2 SSE3 SSSE3 FMA CX16 SSE4.1 SSE4.2 MOVBE POPCNT AES AVX1.0 F16C
machdep.cpu.leaf7_features: RDWRFSGS BMI1 AVX2 SMEP BMI2 ERMS INVPCID FPU_CSDS RDSEED ADX
machdep.cpu.extfeatures: SYSCALL XD 1GBPAGE EM64T LAHF LZCNT PREFETCHW RDTSCP TSCI
"""
LATE_INTEL = INTEL.replace(
    "leaf7_features:", "leaf7_features: AVX512F AVX512CD AVX512DQ AVX512BW AVX512VL AVX512VNNI"
)


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes this a Mac of an architecture, whose sysctl says a text; or has none."""

    def become(told: str | None, architecture: str = "arm64") -> None:
        if told is not None:
            (tmp_path / "sysctl").write_text(
                f'#!/bin/sh\n[ "$*" = "hw machdep.cpu" ] && cat <<"END"\n{told}END\n'
            )
            (tmp_path / "sysctl").chmod(0o755)
        processor._sysctl.cache_clear()
        monkeypatch.setattr(processor, "_SYSCTL", str(tmp_path / "sysctl"))
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(platform, "machine", lambda: architecture)
        monkeypatch.setattr(platform, "processor", lambda: "")
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)

    yield become
    processor._sysctl.cache_clear()


@pytest.mark.parametrize(
    ("told", "architecture", "fastest"),
    [
        (M1, "arm64", "neon-dotprod"),
        (M2, "arm64", "neon-bf16"),
        (INTEL, "x86_64", "avx2"),
        (LATE_INTEL, "x86_64", "avx512-vnni"),
        ("", "arm64", "portable"),
        (None, "arm64", "portable"),
    ],
)
def test_a_mac_loads_the_fastest_kernels_that_it_has(
    mac, told: str | None, architecture: str, fastest: str
) -> None:
    mac(told, architecture)
    chosen = best_set()
    assert chosen is not None
    assert chosen.name == fastest


def test_flags_of_a_mac_have_linux_names(mac) -> None:
    mac(M2)
    assert {"asimd", "asimddp", "atomics", "crc32", "i8mm", "bf16", "fp16"} <= processor_flags()
    mac(M1)
    assert not {"i8mm", "bf16", "watchpoint"} & processor_flags()
    mac(INTEL, "x86_64")
    assert {"sse2", "avx", "avx2", "fma", "f16c", "abm"} <= processor_flags()
    assert "avx512f" not in processor_flags()


def test_a_mac_without_sysctl_is_known_by_its_architecture(mac, tmp_path, monkeypatch) -> None:
    mac(None)
    assert (flags_line(), processor_name(), num_cores()) == ("", "arm64", os.cpu_count())
    mac(M1)
    (tmp_path / "sysctl").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(processor, "_SYSCTL_SECONDS", 0.1)
    assert (flags_line(), processor_name(), num_cores()) == ("", "arm64", os.cpu_count())


def test_fast_cores_of_a_mac_are_used(mac, monkeypatch) -> None:
    mac(M1)
    assert num_cores() == 4
    described = describe_hardware(torch.device("cpu"))
    assert (described["processor"], described["cores"]) == ("Apple M1", 4)
    mac(INTEL, "x86_64")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert num_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert num_cores() == 1


def test_plans_are_of_a_processor_and_its_instruction_set(monkeypatch) -> None:
    """Virtual machines of several processors tell one name, and passes over many rows that are
    cheap by AMX are not without it."""
    threads = torch.get_num_threads()
    for isa, shown in (("avx512-amx", ", avx512-amx"), ("avx2", ", avx2"), (None, "")):
        monkeypatch.setattr(
            "polybasic.deploy.runtime.hardware.instruction_set", lambda isa=isa: isa
        )
        name = hardware_name(torch.device("cpu"))
        assert name == f"{processor_name()}{shown}, {threads} threads"


def test_cores_are_those_that_the_process_may_use(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3}, raising=False)
    assert num_cores() == 2
