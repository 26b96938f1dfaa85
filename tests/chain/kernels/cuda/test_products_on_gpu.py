"""Product kernels on a GPU: values, bits, and kernels that begin early."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES
from polybasic.chain.kernels.cuda.products.choice import Choices, compile_together
from polybasic.chain.kernels.cuda.products.launch import (
    Product,
    _tickets,
    can_begin_early,
    dequantized,
    dequantized_blocks,
)
from polybasic.chain.kernels.cuda.products.options import PACKED_SHAPES, Task, options_of
from polybasic.chain.kernels.torch.operations import DeviceLinear, DeviceWeight, Norm
from polybasic.chain.kernels.torch.packed_blocks import PackedBlocks
from polybasic.chain.kernels.torch.packed_weight import PackedWeight
from tests.chain.kernels.cuda.product_cases import (
    ABSENT,
    GPU_CASES,
    GpuCase,
    in_float32,
    random_product,
    shapes_of,
)

pytestmark = pytest.mark.gpu(needed=True)

GPU = torch.device("cuda", 0)
TOLERANCES = {torch.float16: 1e-3, torch.bfloat16: 4e-3}


def on_gpu(product: Product) -> Product:
    weight, bias = product.linear.weight, product.linear.bias
    moved: DeviceWeight
    if isinstance(weight, PackedWeight):
        moved = PackedWeight(weight.words.to(GPU), weight.groups.to(GPU))
    elif isinstance(weight, PackedBlocks):
        moved = weight.mapped(lambda tensor: tensor.to(GPU))
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


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_every_shape_computes_the_product(case: GpuCase) -> None:
    if case.is_early and not can_begin_early(GPU):
        pytest.skip("kernels of this GPU do not begin early")
    products = list(case.products())
    moved = [(on_gpu(product), tiling) for product, _, tiling in products]
    compile_together(moved)
    for (product, weight, tiling), (there, _) in zip(products, moved, strict=True):
        found, expected = there.computed(tiling).cpu().float(), in_float32(product, weight)
        error = float((found - expected).norm() / expected.norm())
        assert error < TOLERANCES[case.dtype], (Task.of(product), tiling)


def test_a_sum_does_not_depend_on_who_comes_last() -> None:
    product = on_gpu(random_product(torch.bfloat16, 128, 4096, 4096, 24)[0])
    tiling = replace(PACKED_SHAPES[32][0].tiling, splits=8)
    first = product.computed(tiling)
    for _ in range(50):
        assert torch.equal(product.computed(tiling), first)
    assert not _tickets(GPU).any()


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_are_dequantized_in_one_launch(name: str) -> None:
    product, dense = random_product(torch.bfloat16, name, 1000, 1280, 1)
    weight = on_gpu(product).linear.weight
    assert isinstance(weight, PackedBlocks)
    for dtype in TOLERANCES:
        assert torch.equal(dequantized(weight, dtype).cpu(), dense.to(dtype))
        chosen = torch.tensor([999, 3, 3, 0])
        rows = dequantized_blocks(weight, dtype, chosen.to(GPU))
        assert torch.equal(rows.cpu(), dense[chosen].to(dtype))


@pytest.mark.parametrize("group_size", [ABSENT, 128, "Q4_K"])
def test_products_that_begin_early_wait_for_what_they_read(group_size: int | str) -> None:
    """A chain in one graph, each product of the one before it, keeps every bit."""
    if not can_begin_early(GPU):
        pytest.skip("kernels of this GPU do not begin early")
    products = [
        on_gpu(random_product(torch.bfloat16, group_size, size, size, 24, has_norm=True)[0])
        for size in (2048,) * 6
    ]
    tiling = replace(shapes_of(group_size)[32][0].tiling, splits=4)

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
    for group_size, out_size in ((ABSENT, 4096), (128, 4096), ("Q4_K", 4096), ("Q6_K", 6144)):
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
