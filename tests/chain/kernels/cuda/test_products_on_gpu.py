"""Product kernels on a GPU: values, bits, and kernels that begin early."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from polybasic.chain.kernels.cuda.choice import Choices
from polybasic.chain.kernels.cuda.product_launch import Product, Tiling, _tickets, can_begin_early
from polybasic.chain.kernels.cuda.product_options import (
    DENSE_SHAPES,
    PACKED_SHAPES,
    Task,
    options_of,
)
from polybasic.chain.kernels.torch.operations import DeviceLinear, Norm
from polybasic.chain.kernels.torch.packed_weight import PackedWeight
from tests.chain.kernels.cuda.product_cases import ABSENT, in_float32, random_product

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU = torch.device("cuda", 0)
TOLERANCES = {torch.float16: 1e-3, torch.bfloat16: 4e-3}


def on_gpu(product: Product) -> Product:
    weight, bias = product.linear.weight, product.linear.bias
    if isinstance(weight, PackedWeight):
        moved = PackedWeight(weight.words.to(GPU), weight.groups.to(GPU))
    else:
        moved = weight.to(GPU)
    norm, added = product.norm, product.added
    return Product(
        DeviceLinear(moved, None if bias is None else bias.to(GPU)),
        product.x_RI.to(GPU),
        None if norm is None else Norm(norm.weight.to(GPU), norm.eps),
        None if added is None else added.to(GPU),
        product.activation,
    )


def error_of(product: Product, weight: Tensor, tiling: Tiling) -> float:
    found = on_gpu(product).computed(tiling).cpu().float()
    expected = in_float32(product, weight)
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group_size", [ABSENT, 128, 64])
@pytest.mark.parametrize("num_rows", [1, 16, 24, 64])
@pytest.mark.parametrize("is_early", [False, True])
def test_every_shape_computes_the_product(
    dtype: torch.dtype, group_size: int, num_rows: int, is_early: bool
) -> None:
    if is_early and not can_begin_early(GPU):
        pytest.skip("kernels of this GPU do not begin early")
    for variant in (
        {"has_added": True},
        {"has_norm": True},
        {"has_norm": True, "activation": "silu"},
        {"activation": "gelu_pytorch_tanh"},
    ):
        product, weight = random_product(dtype, group_size, 1000, 1024, num_rows, **variant)
        shapes = (PACKED_SHAPES if group_size else DENSE_SHAPES)[product.num_kernel_rows]
        for shape in shapes:
            tiling = replace(shape.tiling, is_early=is_early)
            if group_size:
                tiling = replace(tiling, ins=group_size)
            for splits in (1, 4):
                found = error_of(product, weight, replace(tiling, splits=splits))
                assert found < TOLERANCES[dtype], (variant, tiling, splits)


def test_a_sum_does_not_depend_on_who_comes_last() -> None:
    product = on_gpu(random_product(torch.bfloat16, 128, 4096, 4096, 24)[0])
    tiling = replace(PACKED_SHAPES[32][0].tiling, splits=8)
    first = product.computed(tiling)
    for _ in range(50):
        assert torch.equal(product.computed(tiling), first)
    assert not _tickets(GPU).any()


@pytest.mark.parametrize("group_size", [ABSENT, 128])
def test_products_that_begin_early_wait_for_what_they_read(group_size: int) -> None:
    """A chain in one graph, each product of the one before it, keeps every bit."""
    if not can_begin_early(GPU):
        pytest.skip("kernels of this GPU do not begin early")
    products = [
        on_gpu(random_product(torch.bfloat16, group_size, size, size, 24, has_norm=True)[0])
        for size in (2048,) * 6
    ]
    shapes = PACKED_SHAPES if group_size else DENSE_SHAPES
    tiling = replace(shapes[32][0].tiling, splits=4)

    def chain(is_early: bool) -> Tensor:
        x = products[0].x_RI
        for each in products:
            x = replace(each, x_RI=x, added=x).computed(replace(tiling, is_early=is_early))
        return x

    expected = chain(is_early=False)
    chain(is_early=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = chain(is_early=True)
    for _ in range(200):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)


def test_the_choice_on_this_card(tmp_path: Path) -> None:
    choices = Choices(GPU, tmp_path / "choices.json")
    for group_size, out_size in ((ABSENT, 4096), (128, 4096), (64, 6144)):
        product = on_gpu(
            random_product(torch.bfloat16, group_size, out_size, 2048, 20, has_norm=True)[0]
        )
        option = choices.option_for(product)
        microseconds = choices.microseconds[str(Task.of(product))]
        # each option and two with the norm before, at least: none was wrong, none failed
        processors = torch.cuda.get_device_properties(GPU).multi_processor_count
        assert len(microseconds) >= len(options_of(Task.of(product), processors)) + 2
        assert all(0.5 < found < 1000 for found in microseconds.values())
        assert group_size == ABSENT or option is not None
        assert torch.equal(product.computed(option), product.computed(option))
