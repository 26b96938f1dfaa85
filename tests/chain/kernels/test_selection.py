"""Which backend computes where, and what it keeps weights as."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.awq import dequantize, round_to_nearest
from polybasic.chain.formats.checkpoints.quantization import DRAFT_GROUP_SIZE, GROUP_SIZE
from polybasic.chain.kernels import backend as backends
from polybasic.chain.kernels import selection
from polybasic.chain.kernels.cpu.executor import CpuBackend
from polybasic.chain.kernels.selection import backend_for, describe_gpu_kernels
from polybasic.chain.kernels.torch.backends import DeviceBackend, TorchBackend
from polybasic.chain.kernels.torch.operations import DeviceLinear
from polybasic.chain.kernels.torch.packed_weight import PackedWeight
from tests.chain.native_models import CONFIG, decoder, random_quantized

CPU, GPU = torch.device("cpu"), torch.device("cuda")
pytestmark = pytest.mark.processor
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)


@pytest.fixture(autouse=True)
def _no_wish(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("POLYBASIC_KERNELS", raising=False)
    asked = (selection._report, selection._launcher_fault)
    for once in asked:
        once.cache_clear()
    yield
    for once in asked:
        once.cache_clear()


def has_triton(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    monkeypatch.setattr(selection, "has_triton", lambda: answer)


def executors(device: torch.device) -> list[str]:
    """By dtype: what would run a model."""
    weights = decoder(torch.float32).weights
    return [backend_for(device, dtype).executor(weights).name for dtype in DTYPES]


@pytest.mark.parametrize("wanted", ["auto", "native", "device"])
def test_a_gpu_runs_kernels_in_half_precision(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("POLYBASIC_KERNELS", wanted)
    assert executors(GPU) == ["cuda", "cuda", "torch"]
    found = [backend_for(GPU, dtype) for dtype in DTYPES]
    assert all(type(backend) is DeviceBackend and backend.keeps_dense for backend in found)
    assert [backend.packs_4_bits for backend in found] == [True, True, False]
    assert [backend.rounds_drafts(64) for backend in found] == [True, True, False]
    assert not found[0].rounds_drafts(DRAFT_GROUP_SIZE + 8)


def test_a_gpu_without_triton_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_triton(monkeypatch, False)
    assert executors(GPU) == ["torch"] * 3
    for dtype in HALVES:
        assert not backend_for(GPU, dtype).packs_4_bits
        assert not backend_for(GPU, dtype).rounds_drafts(DRAFT_GROUP_SIZE)
    (record,) = caplog.records
    assert record.getMessage().endswith("which are slower: no triton found; pip install triton")
    assert describe_gpu_kernels() == "PyTorch's operations (no triton found; pip install triton)"


@dataclass
class TritonDriver:
    """Triton's driver, which builds its launcher when it is asked for."""

    error: Exception | None = None
    num_asked: int = 0

    @property
    def active(self) -> "TritonDriver":
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return self

    utils = "launcher"


@pytest.fixture
def triton_driver(monkeypatch: pytest.MonkeyPatch) -> TritonDriver:
    """Of a GPU that the kernels are for."""
    runtime = pytest.importorskip("triton").runtime
    driver = TritonDriver()
    monkeypatch.setattr(runtime, "driver", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return driver


NO_COMPILER = RuntimeError("Failed to find C compiler. Please specify.\nor set CC")
NO_HEADER = subprocess.CalledProcessError(1, ["/usr/bin/gcc", "/tmp/main.c", "-O3"])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NO_COMPILER, "Failed to find C compiler. Please specify"),
        (NO_HEADER, "gcc ends with code 1"),
    ],
)
def test_a_launcher_that_cannot_be_built_is_reported_once(
    triton_driver: TritonDriver, error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    triton_driver.error = error
    assert executors(GPU) == ["torch"] * 3
    assert not backend_for(GPU, torch.bfloat16).packs_4_bits
    needed = "Triton cannot build what launches them, from C and Python.h (python3-dev)"
    assert caplog.messages == [
        f"GPU kernels: PyTorch's operations, which are slower: {needed}: {reason}"
    ]
    assert describe_gpu_kernels() == f"PyTorch's operations ({needed}: {reason})"
    assert triton_driver.num_asked == 1


def test_an_older_gpu_is_reported(
    triton_driver: TritonDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert executors(GPU) == ["torch"] * 3
    assert caplog.messages == [
        "GPU kernels: PyTorch's operations, which are slower: compute capability 7.5, at least 8.0 "
        "is needed"
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert executors(GPU) == ["cuda", "cuda", "torch"]


def test_eager_operations_can_be_asked_for_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    has_triton(monkeypatch, True)
    monkeypatch.setenv("POLYBASIC_KERNELS", "eager")
    found = [backend_for(GPU, dtype) for dtype in DTYPES]
    assert all(type(backend) is TorchBackend and not backend.packs_4_bits for backend in found)
    assert describe_gpu_kernels() == "eager PyTorch (POLYBASIC_KERNELS=eager)"


def test_a_cpu_runs_the_device_path_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert type(backend_for(CPU, torch.bfloat16)) is CpuBackend
    assert type(backend_for(CPU, torch.float16)) is TorchBackend
    monkeypatch.setenv("POLYBASIC_KERNELS", "eager")
    assert {type(backend_for(CPU, dtype)) for dtype in DTYPES} == {TorchBackend}
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    found = [backend_for(CPU, dtype) for dtype in DTYPES]
    assert {type(backend) for backend in found} == {DeviceBackend}
    assert [backend.packs_4_bits for backend in found] == [True] * 3
    assert [backend.rounds_drafts(64) for backend in found] == [True, True, False]
    monkeypatch.setenv("POLYBASIC_KERNELS", "fast")
    with pytest.raises(UserError, match="use auto, native, eager or device"):
        backend_for(CPU, torch.bfloat16)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 24},
        {"head_dim": 272},
        {"intermediate_size": 200},
        {"hidden_size": 72},
        {"activation": "relu"},
    ],
)
def test_models_that_the_native_kernels_do_not_take_run_on_the_reference(
    changes: dict[str, Any],
) -> None:
    assert type(backend_for(CPU, torch.float32, CONFIG)) is CpuBackend
    other = replace(CONFIG, **changes)
    assert type(backend_for(CPU, torch.float32, other)) is TorchBackend
    # models that share weights run on one kind of executor
    assert type(backend_for(CPU, torch.float32, CONFIG, other)) is TorchBackend


def test_other_devices_have_no_device_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    assert type(backend_for(torch.device("meta"), torch.bfloat16)) is TorchBackend


def test_the_kernels_of_a_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch's own index has it as pytorch-triton
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.6.0+git")
    assert describe_gpu_kernels() == "triton 3.6.0+git (float32: PyTorch's operations)"


# Products


def test_a_dense_weight_is_kept_as_it_is() -> None:
    weight, bias, x = torch.randn(24, 40), torch.randn(24), torch.randn(3, 40)
    linear = DeviceBackend(CPU, torch.float32).dense(weight, bias)
    assert isinstance(linear, DeviceLinear)
    assert linear.weight is weight
    assert linear.shape == (24, 40)
    torch.testing.assert_close(linear(x), x @ weight.T + bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packs", [True, False])
def test_a_4_bit_weight_stays_packed_where_kernels_read_it(dtype: torch.dtype, packs: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = random_quantized(generator, 48, 2 * GROUP_SIZE)
    linear = DeviceBackend(CPU, dtype, packs_4_bits=packs).int4(weight)
    assert isinstance(linear, DeviceLinear)
    assert isinstance(linear.weight, PackedWeight) == packs
    assert linear.shape == (48, 2 * GROUP_SIZE)
    centred = weight.codes.float() - weight.zeros.repeat_interleave(GROUP_SIZE, 1)
    exact = centred * weight.scales.float().repeat_interleave(GROUP_SIZE, 1)
    torch.testing.assert_close(linear.dense(dtype), exact.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_only_draft_are_rounded(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "WEIGHTS_AT_ONCE", 10 * DRAFT_GROUP_SIZE)
    weight = torch.randn(32, 2 * DRAFT_GROUP_SIZE).to(dtype)
    linear = DeviceBackend(CPU, dtype).draft(weight)
    assert isinstance(linear, DeviceLinear)
    if dtype == torch.float32:
        assert linear.weight is weight
        return
    assert isinstance(linear.weight, PackedWeight)
    assert linear.weight.group_size == DRAFT_GROUP_SIZE
    whole = dequantize(round_to_nearest(weight, DRAFT_GROUP_SIZE))
    torch.testing.assert_close(linear.dense(torch.float32), whole, rtol=0, atol=0)
    groups = weight.float().unflatten(1, (-1, DRAFT_GROUP_SIZE))
    step = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 15
    error = (linear.dense(torch.float32) - weight.float()).unflatten(1, (-1, DRAFT_GROUP_SIZE))
    assert (error.abs() <= 1.01 * step[..., None]).all()
    assert error.abs().max() > 0.3 * step.max()
