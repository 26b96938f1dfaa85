"""Products are timed once on a machine, and what is fast follows from the times."""

import json
import logging
from pathlib import Path

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.kernels import product_times as module
from polybasic.chain.kernels.product_times import (
    ProductTimes,
    evaluation_dtype,
    multiplies_fast,
    product_times,
    training_dtype,
    training_slowdown,
)

pytestmark = pytest.mark.processor
CPU = torch.device("cpu")
FAST = {"float32": (1, 2), "bfloat16": (0.3, 0.6), "float16": (5, 60)}
WIDENED = {"float32": (1, 2), "bfloat16": (1.3, 2.6), "float16": (5, 60)}
"""AVX-512 without bfloat16: products are widened, and a little slower for it."""
SLOW = {"float32": (1, 2), "bfloat16": (6, 48), "float16": (5, 60)}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POLYBASIC_CACHE", str(tmp_path))
    monkeypatch.delenv("POLYBASIC_PRODUCT_TIMES", raising=False)
    product_times.cache_clear()
    yield tmp_path / "product_times"
    product_times.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, times: dict[str, tuple[float, float]]) -> list[int]:
    """Measuring gives these times; the list grows with each time that is measured."""
    measured: list[int] = []

    def found() -> dict[str, ProductTimes]:
        measured.append(1)
        return {name: ProductTimes(*pair) for name, pair in times.items()}

    monkeypatch.setattr(module, "_measured", found)
    return measured


@pytest.mark.parametrize(
    ("times", "trained_in", "is_fast", "slowdown"),
    [
        (FAST, torch.bfloat16, True, 1.0),
        (WIDENED, torch.float32, True, 1.3),
        (SLOW, torch.float32, False, 18.0),
    ],
    ids=["bfloat16", "widened", "without"],
)
def test_what_is_chosen_follows_from_the_times(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    times: dict[str, tuple[float, float]],
    trained_in: torch.dtype,
    is_fast: bool,
    slowdown: float,
) -> None:
    pretend(monkeypatch, times)
    assert training_dtype(CPU) == trained_in
    assert training_slowdown(trained_in, CPU) == 1
    assert training_slowdown(torch.bfloat16, CPU) == pytest.approx(slowdown)
    assert multiplies_fast(torch.bfloat16) == is_fast
    assert evaluation_dtype(torch.bfloat16, CPU) == (torch.bfloat16 if is_fast else torch.float32)
    assert evaluation_dtype(torch.float16, CPU) == torch.float32
    assert evaluation_dtype(torch.float32, CPU) == torch.float32


def test_times_are_kept_for_later_processes(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    measured = pretend(monkeypatch, SLOW)
    first = product_times()
    product_times.cache_clear()  # as another process
    assert product_times() == first
    assert len(measured) == 1
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    product_times.cache_clear()
    product_times()
    assert len(measured) == 2, "fewer instructions are another machine"
    assert len(list(cache.iterdir())) == 2
    for damage in ("{", "[]", json.dumps({"float32": {"forward": 1}})):
        for file in cache.iterdir():
            file.write_text(damage)
        product_times.cache_clear()
        with caplog.at_level(logging.WARNING):
            assert product_times() == first
        assert "products are timed again" in caplog.text
        caplog.clear()
    assert len(measured) == 5


def test_times_of_a_file_are_believed(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = pretend(monkeypatch, FAST)
    file = tmp_path / "times.json"
    monkeypatch.setenv("POLYBASIC_PRODUCT_TIMES", str(file))
    sound = {name: {"forward": a, "backward": b} for name, (a, b) in SLOW.items()}
    file.write_text(json.dumps(sound))
    assert training_dtype(CPU) == torch.float32
    assert not multiplies_fast(torch.bfloat16)
    assert (measured, cache.exists()) == ([], False)
    for damage in (
        {},
        [],
        sound | {"float32": {"forward": 0, "backward": 1}},
        sound | {"float16": 3},
    ):
        file.write_text(json.dumps(damage))
        product_times.cache_clear()
        with pytest.raises(UserError, match=f"products: POLYBASIC_PRODUCT_TIMES={file}; write"):
            product_times()
    file.unlink()
    with pytest.raises(UserError, match="product times not found"):
        product_times()


def test_a_cache_that_cannot_be_written_is_told_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, FAST)
    cache.write_text("a file where the folder would be")
    for _ in range(2):
        product_times.cache_clear()
        assert product_times()["bfloat16"].training == pytest.approx(0.9)
    [line] = [line for line in caplog.messages if "timed again by each process" in line]
    assert str(cache) in line


def test_measuring_leaves_nothing_behind() -> None:
    num_threads, state = torch.get_num_threads(), torch.get_rng_state()
    times = module._measured()
    assert torch.get_num_threads() == num_threads
    assert torch.equal(torch.get_rng_state(), state)
    for timing in times.values():
        assert timing.forward_gflops == pytest.approx(2 * 128 * 256 * 768 / timing.forward / 1e6)
        assert timing.backward > timing.forward  # two products of that size


def test_a_gpu_is_asked_for_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    for has_bfloat16 in (True, False):
        monkeypatch.setattr(module, "_has_bfloat16", lambda has=has_bfloat16: has)
        expected = torch.bfloat16 if has_bfloat16 else torch.float32
        assert training_dtype(gpu) == evaluation_dtype(torch.bfloat16, gpu) == expected
        assert evaluation_dtype(torch.float16, gpu) == torch.float16
        assert training_slowdown(torch.float32, gpu) == 1


def test_times_that_others_could_have_written_are_not_read(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timed = pretend(monkeypatch, FAST)
    product_times()
    [file] = cache.iterdir()
    file.chmod(0o666)
    product_times.cache_clear()
    assert product_times()["bfloat16"].training == pytest.approx(0.9)
    assert len(timed) == 2
    assert "others can write" in caplog.text
    assert file.stat().st_mode & 0o022 == 0
