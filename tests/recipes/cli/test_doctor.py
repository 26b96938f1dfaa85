"""`polybasic doctor` on the kernels."""

import json
from typing import Any

import pytest

from polybasic.chain.kernels import product_times
from polybasic.chain.kernels import selection as library
from polybasic.chain.kernels.cpu import compilers, native
from polybasic.chain.kernels.product_times import ProductTimes
from tests.recipes.command_line import call


def told_as_json() -> Any:
    code, out, _ = call("doctor", "--json")
    assert code == 0
    return json.loads(out)


def kernels_told(of: str = "kernels") -> str:
    told: str = told_as_json()[of]
    return told


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


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [("auto", ("cpu", "torch", "cpu")), ("eager", ("torch",) * 3), ("device", ("torch",) * 3)],
)
def test_doctor_names_the_executor_of_each_dtype(wanted, expected, monkeypatch) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", wanted)
    dtypes = ("bfloat16", "float16", "float32")
    shown = ", ".join(f"{dtype}: {name}" for dtype, name in zip(dtypes, expected, strict=True))
    assert kernels_told("executors") == shown


def test_doctor_says_what_a_gpu_runs(monkeypatch) -> None:
    monkeypatch.setattr(library, "has_triton", lambda: False)
    told = kernels_told("gpu kernels")
    assert told == "PyTorch's operations (no triton found; pip install triton)"
    monkeypatch.setenv("POLYBASIC_KERNELS", "eager")
    assert kernels_told("gpu kernels") == "eager PyTorch (POLYBASIC_KERNELS=eager)"
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    assert kernels_told() == "device (POLYBASIC_KERNELS=device)"


def test_doctor_shows_how_fast_products_are_and_what_that_decides(monkeypatch) -> None:
    slow = {"float32": (1.0, 2.0), "bfloat16": (9.0, 90.0), "float16": (1.5, 90.0)}
    times = {name: ProductTimes(*pair) for name, pair in slow.items()}
    monkeypatch.setattr(product_times, "product_times", lambda: times)
    told = told_as_json()["products"]
    assert told["milliseconds"]["bfloat16"] == {"forward": 9.0, "backward": 90.0}
    assert told["gflops"]["float32"] == pytest.approx({"forward": 50.33, "backward": 50.33}, 1e-3)
    assert told["fast"] == ["float32", "float16"]
    assert told["auto"] == dict.fromkeys(("train.dtype", "quantize"), "float32")
    _, out, _ = call("doctor")
    lines = [line.split() for line in out.splitlines()]
    assert ["bfloat16", "6", "1", "(9.00", "and", "90.00", "ms)", "slow"] in lines
    assert ["train.dtype", "float32"] in lines
    times["bfloat16"] = ProductTimes(0.3, 0.6)
    assert told_as_json()["products"]["auto"]["train.dtype"] == "bfloat16"
