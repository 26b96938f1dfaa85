"""A machine of a test's own: processor, compilers, sources and caches."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from polybasic.chain.kernels.cpu import build, instruction_sets, native
from tests.chain.kernels.cpu.fake_compilers import FORTY_TWO

AVX2_FLAGS = "avx avx2 bmi1 bmi2 f16c fma abm movbe"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing was loaded or cached yet; PATH, sources and cache are the test's own."""
    for name in ("CXX", "POLYBASIC_KERNELS", "POLYBASIC_ISA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for folder in ("bin", "source", "prebuilt"):
        (tmp_path / folder).mkdir()
    (tmp_path / "source" / "kernels.cpp").write_text(FORTY_TWO)
    (tmp_path / "source" / "part.h").write_text("constexpr int kAnswer = 42;\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("POLYBASIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SOURCE_FOLDER", tmp_path / "source")
    monkeypatch.setattr(build, "PREBUILT_FOLDER", tmp_path / "prebuilt")
    native._outcome.cache_clear()
    native._warn_once.cache_clear()
    yield
    native._outcome.cache_clear()
    native._warn_once.cache_clear()


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the processor another one: its flags, and its architecture."""

    def become(flags: str, architecture: str = "x86_64") -> None:
        line = "flags\t\t" if architecture == "x86_64" else "Features\t"
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}: {flags}\n")
        monkeypatch.setattr("polybasic.chain.base.processor._CPU_INFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(instruction_sets.platform, "machine", lambda: architecture)

    return become


@pytest.fixture
def no_zig(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package ziglang, also where it is installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
