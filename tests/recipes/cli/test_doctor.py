"""`polybasic doctor` on the kernels."""

import json

import pytest

from polybasic.chain.kernels import selection as library
from polybasic.chain.kernels.cpu import build
from polybasic.recipes.cli import main as cli


def kernels_told(capsys, of: str = "kernels") -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", "--json"])
    assert not caught.value.code
    return json.loads(capsys.readouterr().out)[of]


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch):
    for name in ("CXX", "POLYBASIC_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    build._outcome.cache_clear()
    yield
    build._outcome.cache_clear()


def test_doctor_says_what_to_do_without_a_compiler(capsys, monkeypatch) -> None:
    assert kernels_told(capsys) == build.describe_kernels()
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert kernels_told(capsys) == (
        "eager (no C++ compiler found; install g++ or pip install 'polybasic[native]')"
    )


def test_doctor_tells_settings_that_cannot_be_used(capsys, monkeypatch) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", "fast")
    for kernels in ("kernels", "gpu kernels"):
        told = kernels_told(capsys, kernels)
        assert "POLYBASIC_KERNELS=fast; use auto, native, eager or device" in told
    monkeypatch.setenv("POLYBASIC_KERNELS", "auto")
    monkeypatch.setenv("CXX", "missing-compiler")
    assert "CXX=missing-compiler" in kernels_told(capsys)


def test_doctor_says_what_a_gpu_runs(capsys, monkeypatch) -> None:
    monkeypatch.setattr(library, "has_triton", lambda: False)
    told = kernels_told(capsys, "gpu kernels")
    assert told == "PyTorch's operations (no triton found; pip install triton)"
    monkeypatch.setenv("POLYBASIC_KERNELS", "eager")
    assert kernels_told(capsys, "gpu kernels") == "eager PyTorch (POLYBASIC_KERNELS=eager)"
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    assert kernels_told(capsys) == "device (POLYBASIC_KERNELS=device)"
