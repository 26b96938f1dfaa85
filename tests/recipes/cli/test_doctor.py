"""`polybasic doctor` on the kernels."""

import json

import pytest

from polybasic.chain.kernels import selection as library
from polybasic.chain.kernels.cpu import compilers, native
from tests.recipes.command_line import call


def kernels_told(of: str = "kernels") -> str:
    code, out, _ = call("doctor", "--json")
    assert code == 0
    return json.loads(out)[of]


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch):
    for name in ("CXX", "POLYBASIC_ISA", "POLYBASIC_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    native._outcome.cache_clear()
    yield
    native._outcome.cache_clear()


def test_doctor_says_what_to_do_without_a_compiler(monkeypatch) -> None:
    assert kernels_told() == native.describe_kernels()
    monkeypatch.setattr(compilers, "find_compiler", lambda: None)
    assert kernels_told() == (
        "eager (no C++ compiler found; install g++ or pip install 'polybasic[native]')"
    )


def test_doctor_tells_settings_that_cannot_be_used(monkeypatch) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", "fast")
    for kernels in ("kernels", "gpu kernels"):
        told = kernels_told(kernels)
        assert "POLYBASIC_KERNELS=fast; use auto, native, eager or device" in told
    monkeypatch.setenv("POLYBASIC_KERNELS", "auto")
    monkeypatch.setenv("CXX", "missing-compiler")
    assert "CXX=missing-compiler" in kernels_told()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("POLYBASIC_ISA", "avx3")
    assert "POLYBASIC_ISA=avx3; use native" in kernels_told()


def test_doctor_says_what_a_gpu_runs(monkeypatch) -> None:
    monkeypatch.setattr(library, "has_triton", lambda: False)
    told = kernels_told("gpu kernels")
    assert told == "PyTorch's operations (no triton found; pip install triton)"
    monkeypatch.setenv("POLYBASIC_KERNELS", "eager")
    assert kernels_told("gpu kernels") == "eager PyTorch (POLYBASIC_KERNELS=eager)"
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    assert kernels_told() == "device (POLYBASIC_KERNELS=device)"
