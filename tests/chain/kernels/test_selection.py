"""Which operations compute where, and what weights are kept as."""

from collections.abc import Iterator

import pytest
import torch

from polybasic.chain.errors import UserError
from polybasic.chain.formats.awq import GROUP_SIZE, dequantize, round_to_nearest
from polybasic.chain.kernels import selection
from polybasic.chain.kernels.cpu.library import kernels_for
from polybasic.chain.kernels.selection import describe_gpu_kernels, operations_for, reads_4_bits
from polybasic.chain.kernels.torch.operations import DeviceLinear, Operations
from polybasic.chain.kernels.torch.packed_weight import PackedWeight
from polybasic.chain.model import linear as linears
from polybasic.chain.model.linear import (
    DRAFT_GROUP_SIZE,
    dense_linear,
    draft_linear,
    drafts_in_4_bits,
    int4_linear,
    is_laid_out_anew,
)
from tests.chain.native_models import random_quantized

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)


class Kernels(Operations):
    """Stands for those in Triton."""


@pytest.fixture(autouse=True)
def _no_wish(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("POLYBASIC_KERNELS", raising=False)
    kernels = Kernels()
    monkeypatch.setattr(selection, "_kernels", lambda: kernels)
    selection._reference_because.cache_clear()
    yield
    selection._reference_because.cache_clear()


def has_triton(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    monkeypatch.setattr(selection, "has_triton", lambda: answer)


@pytest.mark.parametrize("wanted", ["auto", "native", "device"])
def test_a_gpu_runs_kernels_in_half_precision(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_triton(monkeypatch, True)
    monkeypatch.setenv("POLYBASIC_KERNELS", wanted)
    found = {dtype: operations_for(GPU, dtype) for dtype in DTYPES}
    assert type(found[torch.bfloat16]) is Kernels
    assert found[torch.float16] is found[torch.bfloat16]
    assert type(found[torch.float32]) is Operations
    assert [reads_4_bits(GPU, dtype) for dtype in DTYPES] == [True, True, False]
    assert [drafts_in_4_bits(GPU, dtype, 64) for dtype in DTYPES] == [True, True, False]
    assert not drafts_in_4_bits(GPU, torch.bfloat16, DRAFT_GROUP_SIZE + 8)
    assert not is_laid_out_anew(GPU, torch.bfloat16)
    assert all(kernels_for(GPU, dtype) is None for dtype in DTYPES)


def test_a_gpu_without_triton_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_triton(monkeypatch, False)
    found = [operations_for(GPU, dtype) for dtype in (*HALVES, *HALVES)]
    assert {type(one) for one in found} == {Operations}
    assert not reads_4_bits(GPU, torch.bfloat16)
    assert not drafts_in_4_bits(GPU, torch.bfloat16, DRAFT_GROUP_SIZE)
    (record,) = caplog.records
    assert record.getMessage().endswith("which are slower: no triton found; pip install triton")
    assert describe_gpu_kernels() == "PyTorch's operations (no triton found; pip install triton)"


def test_an_older_gpu_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_triton(monkeypatch, True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert type(operations_for(GPU, torch.float16)) is Operations
    assert caplog.messages == [
        "GPU kernels: PyTorch's operations, which are slower: compute capability 7.5, at least 8.0 "
        "is needed"
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert type(operations_for(GPU, torch.float16)) is Kernels


def test_eager_operations_can_be_asked_for_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    has_triton(monkeypatch, True)
    monkeypatch.setenv("POLYBASIC_KERNELS", "eager")
    assert all(operations_for(GPU, dtype) is None for dtype in DTYPES)
    assert not reads_4_bits(GPU, torch.bfloat16)
    assert describe_gpu_kernels() == "eager PyTorch (POLYBASIC_KERNELS=eager)"


def test_a_cpu_runs_the_device_path_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for wanted in ("auto", "eager"):
        monkeypatch.setenv("POLYBASIC_KERNELS", wanted)
        assert operations_for(CPU, torch.bfloat16) is None
        assert not reads_4_bits(CPU, torch.bfloat16)
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    found = operations_for(CPU, torch.bfloat16)
    assert type(found) is Operations
    assert operations_for(CPU, torch.float32) is found
    assert kernels_for(CPU, torch.bfloat16) is None
    assert [reads_4_bits(CPU, dtype) for dtype in DTYPES] == [True] * 3
    assert [drafts_in_4_bits(CPU, dtype, 64) for dtype in DTYPES] == [True, True, False]
    monkeypatch.setenv("POLYBASIC_KERNELS", "fast")
    with pytest.raises(UserError, match="use auto, native, eager or device"):
        operations_for(CPU, torch.bfloat16)


def test_other_devices_have_no_device_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    assert operations_for(torch.device("meta"), torch.bfloat16) is None


def test_the_kernels_of_a_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    has_triton(monkeypatch, True)
    monkeypatch.setattr(selection, "version", {"triton": "3.6.0"}.__getitem__)
    assert describe_gpu_kernels() == "triton 3.6.0 (float32: PyTorch's operations)"


# Products


def test_a_dense_weight_is_kept_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    weight, bias, x = torch.randn(24, 40), torch.randn(24), torch.randn(3, 40)
    linear = dense_linear(weight, bias)
    assert isinstance(linear, DeviceLinear)
    assert linear.weight is weight
    assert linear.shape == (24, 40)
    torch.testing.assert_close(linear(x), x @ weight.T + bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_4_bit_weight_stays_packed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    generator = torch.Generator().manual_seed(0)
    weight = random_quantized(generator, 48, 2 * GROUP_SIZE)
    linear = int4_linear(weight, dtype, CPU)
    assert isinstance(linear, DeviceLinear)
    assert isinstance(linear.weight, PackedWeight)
    assert linear.shape == (48, 2 * GROUP_SIZE)
    centred = weight.codes.float() - weight.zeros.repeat_interleave(GROUP_SIZE, 1)
    exact = centred * weight.scales.float().repeat_interleave(GROUP_SIZE, 1)
    torch.testing.assert_close(linear.dense(dtype), exact.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_only_draft_are_rounded(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    monkeypatch.setattr(linears, "_WEIGHTS_AT_ONCE", 10 * DRAFT_GROUP_SIZE)
    weight = torch.randn(32, 2 * DRAFT_GROUP_SIZE).to(dtype)
    linear = draft_linear(weight)
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
