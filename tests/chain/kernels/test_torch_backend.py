"""Products without native kernels; without AVX-512 oneDNN lays out no bfloat16 weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.awq import dequantize, round_to_nearest
from polybasic.chain.formats.checkpoints.quantization import GROUP_SIZES
from polybasic.chain.kernels.product_times import multiplies_fast
from polybasic.chain.kernels.torch import backends
from polybasic.chain.kernels.torch.backends import TorchBackend
from polybasic.deploy import load_chain

pytestmark = pytest.mark.processor
CPU = torch.device("cpu")
ROUNDING = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-11}
ANNOUNCED = "PyTorch has no fast {} on this CPU: weights are kept in float32"


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", "eager")
    backends._announce_widening.cache_clear()


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5


def assert_rounded(found: Tensor, exact: Tensor) -> None:
    """Rounded once, from a sum in float32."""
    torch.testing.assert_close(found.float(), exact, rtol=ROUNDING[found.dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_dense_products_are_rounded_once(dtype: torch.dtype, num_rows: int) -> None:
    x, weight, bias = (random(*shape).to(dtype) for shape in ((num_rows, 96), (50, 96), (50,)))
    for given in (bias, None):
        found = TorchBackend(CPU, dtype).dense(weight.clone(), given)(x)
        exact = x.float() @ weight.float().t()
        assert found.dtype == dtype
        assert_rounded(found, exact if given is None else exact + given.float())
    disturbed = weight.clone()
    disturbed[7] = 0
    with pytest.raises(AssertionError, match="not close"):
        assert_rounded(TorchBackend(CPU, dtype).dense(disturbed)(x), x.float() @ weight.float().t())


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_4_bit_products_are_those_of_the_dequantized_weight(
    dtype: torch.dtype, group_size: int
) -> None:
    weight = round_to_nearest(random(64, 256), group_size)
    product = TorchBackend(CPU, dtype).int4(weight)
    for num_rows in (1, backends.CPU_INT4_MAX_ROWS + 1):
        x = random(num_rows, 256).to(dtype)
        exact = x.float() @ dequantize(weight).t()
        found = product(x)
        assert found.dtype == dtype
        # weights and activations are rounded to bfloat16 too
        assert (found.float() - exact).norm() < 2**-7 * exact.norm()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_kept_in_float32_is_announced_once(
    tiny_chain: Path, caplog: pytest.LogCaptureFixture, dtype: str
) -> None:
    for _ in range(2):
        chain = load_chain(tiny_chain, dtype=dtype)
        # without the head, whose random weights leave float16
        answer = chain.generate("w1 w2 w3", max_new_tokens=9, members=["target"])
        assert answer.statistics.num_tokens == 9
    slow = [
        name
        # the intermediate's 4-bit products are rounded to bfloat16 whatever the dtype
        for name in dict.fromkeys((dtype, "bfloat16"))
        if not multiplies_fast(getattr(torch, name))
    ]
    announced = sorted(line.partition(", in twice")[0] for line in caplog.messages)
    assert announced == sorted(ANNOUNCED.format(name) for name in slow)


def test_a_chain_is_served_as_it_is_stored_where_that_is_fast(
    tiny_chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = torch.bfloat16 if multiplies_fast(torch.bfloat16) else torch.float32
    # PyTorch's products, then kernels, which are fast in bfloat16 everywhere
    for kernels, expected in (("eager", fast), ("native", torch.bfloat16)):
        monkeypatch.setenv("POLYBASIC_KERNELS", kernels)
        for options in ({}, {"dtype": "auto"}):
            assert load_chain(tiny_chain, **options).engine.models.target.dtype == expected
    assert load_chain(tiny_chain, dtype="float32").engine.models.target.dtype == torch.float32
