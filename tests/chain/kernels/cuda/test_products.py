"""Product kernels, interpreted, against float32."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from polybasic.chain.formats.checkpoints.awq import QuantizedWeight, dequantize
from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES, DEVICE_STEP
from polybasic.chain.kernels.cuda import KERNEL_DTYPES
from polybasic.chain.kernels.cuda.executor import TritonEmbedding, TritonOperations
from polybasic.chain.kernels.cuda.products import fused, launch
from polybasic.chain.kernels.cuda.products.fused import gated_product, product
from polybasic.chain.kernels.cuda.products.launch import ManyRows, Tiling, dequantized, normed
from polybasic.chain.kernels.cuda.products.options import BLOCK_SHAPES, DENSE_SHAPES, PACKED_SHAPES
from polybasic.chain.kernels.torch.operations import (
    ACTIVATIONS,
    DeviceEmbedding,
    DeviceLinear,
    JoinedLinear,
    Norm,
)
from polybasic.chain.kernels.torch.packed_blocks import PackedBlocks
from polybasic.chain.kernels.torch.packed_weight import PackedWeight
from polybasic.chain.kernels.weights import embed
from tests.chain.kernels.cuda.product_cases import (
    ABSENT,
    CPU,
    DTYPES,
    GPU_CASES,
    OPERATIONS,
    TOLERANCES,
    in_float32,
    random_product,
    relative,
)

DENSE, PACKED = Tiling(128, 64), Tiling(128, 128)


@pytest.fixture(params=[True, False], ids=["from shared memory", "from registers"])
def tensor_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both orders in which tensor cores take the inputs of packed weights."""
    monkeypatch.setattr(launch, "_is_wide", lambda device: request.param)


def test_packing_keeps_every_number() -> None:
    for group_size, out_size, in_size in ((128, 40, 384), (64, 7, 192), (32, 8, 96)):
        generator = torch.Generator().manual_seed(group_size)
        shape, num_groups = (out_size, in_size), in_size // group_size
        weight = QuantizedWeight(
            torch.randint(16, shape, dtype=torch.uint8, generator=generator),
            torch.randint(16, (out_size, num_groups), dtype=torch.uint8, generator=generator),
            torch.rand(out_size, num_groups, generator=generator).to(DTYPES[group_size % 3 // 2]),
        )
        packed = PackedWeight.pack(weight, CPU)
        assert packed.shape == shape
        assert packed.group_size == group_size
        assert packed.num_bytes == in_size * out_size // 2 + 4 * out_size * num_groups
        assert torch.equal(packed.scales.t(), weight.scales.float())
        assert torch.equal(packed.zeros.t(), weight.zeros.int())
        assert torch.equal(packed.dequantized(torch.float32), dequantize(weight))


def with_short_scales(weight: Tensor | PackedWeight) -> PackedWeight:
    """Scales of four digits, whose products with codes have eight, as bfloat16 does.

    The interpreter does not round to bfloat16 but cuts off.
    """
    assert isinstance(weight, PackedWeight)
    return PackedWeight(weight.words, weight.groups & -(1 << 20) | weight.zeros)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(("group_size", "out_size"), [(128, 70), (64, 64), (32, 3)])
def test_a_weight_is_unpacked_in_one_launch(
    dtype: torch.dtype, group_size: int, out_size: int
) -> None:
    found, _ = random_product(dtype, group_size, out_size, 2 * group_size, 1)
    weight = with_short_scales(found.linear.weight)
    assert torch.equal(dequantized(weight, dtype), weight.dequantized(dtype))
    other = PackedWeight(weight.words ^ 1, weight.groups)
    assert not torch.equal(dequantized(other, dtype), weight.dequantized(dtype))


def test_a_word_holds_what_its_docstring_says() -> None:
    codes = torch.zeros(1, 128, dtype=torch.uint8)
    codes[0, 32 * 3 + 8 * 2 + 2 * 1 + 1] = 9
    zeros, scales = torch.zeros(1, 1, dtype=torch.uint8), torch.ones(1, 1).half()
    words = PackedWeight.pack(QuantizedWeight(codes, zeros, scales), CPU).words
    assert words.nonzero().tolist() == [[0, 0, 1 * 4 + 3]]
    assert int(words.sum()) == 9 << (16 + 4 * 2)


PRODUCTS = [  # any two of the four settings meet
    (torch.float16, ABSENT, 1, 1), (torch.float16, 128, 24, 3), (torch.float16, 64, 40, 1),
    (torch.float16, 32, 1, 3), (torch.float16, ABSENT, 40, 3), (torch.float16, 32, 24, 1),
    (torch.bfloat16, ABSENT, 24, 3), (torch.bfloat16, 128, 1, 1), (torch.bfloat16, 64, 1, 3),
    (torch.bfloat16, 32, 40, 1), (torch.bfloat16, 128, 40, 3), (torch.bfloat16, 64, 24, 1),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "group_size", "num_rows", "splits"), PRODUCTS)
def test_a_product_is_the_product(
    dtype: torch.dtype, group_size: int, num_rows: int, splits: int
) -> None:
    found, weight = random_product(dtype, group_size, 200, 384, num_rows)
    out = found.computed(Tiling(128, group_size or 64, splits))
    assert out.dtype == dtype
    assert relative(out, in_float32(found, weight)) < TOLERANCES[dtype]


@pytest.mark.parametrize("group_size", [ABSENT, 128])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_norm_and_gate_are_a_part_of_it(group_size: int, splits: int, activation: str) -> None:
    found, weight = random_product(
        torch.bfloat16, group_size, 240, 256, 5, activation, has_norm=True
    )
    expected = in_float32(found, weight)
    tiling = Tiling(128, group_size or 64, splits)
    for is_fused in (True, False):
        out = found.computed(replace(tiling, is_fused=is_fused))
        assert relative(out, expected) < TOLERANCES[torch.bfloat16]
    other = next(name for name in ACTIVATIONS if name != activation)
    assert relative(replace(found, activation=other).computed(tiling), expected) > 2e-2
    assert relative(replace(found, norm=None).computed(tiling), expected) > 2e-2


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("has_norm", [True, False])
def test_what_is_added_and_a_norm_in_float32(splits: int, has_norm: bool) -> None:
    found, weight = random_product(
        torch.bfloat16, 128, 136, 256, 17, has_norm=has_norm, has_added=True, has_bias=False
    )
    if found.norm is not None:
        found = replace(found, norm=Norm(found.norm.weight.float() * 1.7, 0.5))
    expected = in_float32(found, weight)
    tiling = replace(PACKED, splits=splits)
    assert relative(found.computed(tiling), expected) < TOLERANCES[torch.bfloat16]
    assert relative(replace(found, added=None).computed(tiling), expected) > 2e-2


def test_a_norm_in_float16_is_not_a_part_of_it() -> None:
    """Rows times weights are too large for the format before they are normed."""
    found, weight = random_product(torch.float16, ABSENT, 64, 128, 2, has_norm=True)
    assert found.norm is not None
    found = replace(found, x_RI=found.x_RI * 8000, norm=Norm(found.norm.weight * 20, 1e-5))
    assert (found.x_RI * found.norm.weight).isinf().any()  # type: ignore[union-attr]
    expected = in_float32(found, weight)
    assert relative(found.computed(DENSE), expected) < TOLERANCES[torch.float16]


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("group_size", [128, 32])
def test_inputs_meet_their_weights_on_all_tensor_cores(group_size: int) -> None:
    found, weight = random_product(torch.float16, group_size, 128, 256, 3)
    out = found.computed(Tiling(128, group_size))
    assert relative(out, in_float32(found, weight)) < TOLERANCES[torch.float16]


def test_inputs_that_are_exchanged_are_noticed() -> None:
    """What the test above would see if the order were wrong in any place."""
    found, weight = random_product(torch.float16, 128, 128, 256, 3)
    for first, second in ((0, 1), (0, 2), (0, 8), (0, 16), (0, 32), (0, 64), (0, 128)):
        exchanged = found.x_RI.clone()
        exchanged[:, [first, second]] = exchanged[:, [second, first]]
        out = replace(found, x_RI=exchanged).computed(PACKED)
        assert relative(out, in_float32(found, weight)) > 2e-2


@pytest.mark.parametrize(("out_size", "outs"), [(8, 128), (100, 64), (264, 128), (130, 128)])
@pytest.mark.parametrize("group_size", [ABSENT, 128])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_tiles_need_not_fit(
    out_size: int, outs: int, group_size: int, activation: str | None
) -> None:
    found, weight = random_product(torch.float16, group_size, out_size, 128, 2, activation)
    for splits in (1, 2):
        out = found.computed(Tiling(outs, group_size or 32, splits))
        assert relative(out, in_float32(found, weight)) < TOLERANCES[torch.float16]


@pytest.mark.parametrize("in_size", [72, 88, 200])
def test_steps_need_not_fit(in_size: int) -> None:
    found, weight = random_product(torch.bfloat16, ABSENT, 64, in_size, 2, has_norm=True)
    for splits in (1, 2):
        out = found.computed(replace(DENSE, splits=splits))
        assert relative(out, in_float32(found, weight)) < TOLERANCES[torch.bfloat16]


def test_rows_may_lie_apart() -> None:
    found, _ = random_product(torch.float16, 128, 64, 256, 3)
    wide = torch.full((3, 512), float("nan"), dtype=torch.float16)
    wide[:, :256] = found.x_RI
    out = replace(found, x_RI=wide[:, :256]).computed(PACKED)
    assert torch.equal(out, found.computed(PACKED))


def test_tickets_are_left_as_they_were_found() -> None:
    found, _ = random_product(torch.float16, 128, 300, 512, 3)
    tiling = replace(PACKED, splits=4)
    first = found.computed(tiling)
    assert not launch._tickets(CPU).any()
    assert torch.equal(found.computed(tiling), first)
    launch._tickets(CPU)[1] = 1  # then one takes itself for the last before another comes
    torch.use_deterministic_algorithms(True)  # fills memory with NaN before it is written
    try:
        # the third tile overlaps the second, and ends with the outputs
        is_wrong = found.computed(tiling).isnan().all(0)
        assert is_wrong.nonzero().flatten().tolist() == [*range(128, 300 - 128)]
    finally:
        torch.use_deterministic_algorithms(False)
        launch._tickets(CPU).zero_()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_norm_alone(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(3, 200, generator=generator), torch.rand(200, generator=generator)
    expected = F.rms_norm(x, (200,), weight, 1e-2)
    found = normed(x.to(dtype), Norm(weight, 1e-2))
    assert found.dtype == dtype
    apart = x.to(dtype).t().contiguous().t()
    assert torch.equal(fused.norm(apart, Norm(weight, 1e-2)), found)
    assert relative(found, expected) < {torch.bfloat16: 1e-2, torch.float16: 1e-3}.get(dtype, 1e-6)


def test_many_rows_and_float32_are_left_to_pytorch() -> None:
    for dtype, num_rows in ((torch.float32, 2), (torch.float16, 65)):
        found, _ = random_product(dtype, 64, 32, 64, num_rows, has_norm=True)
        assert not found.can_launch
        expected = OPERATIONS.product(found.linear, found.x_RI, found.norm, None)
        assert torch.equal(product(found.linear, found.x_RI, found.norm), expected)


@pytest.mark.parametrize("group_size", [ABSENT, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_of_packed_weights_are_pytorchs_product(
    dtype: torch.dtype, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = random_product(
        dtype, group_size, 32, 128, 70, has_norm=True, has_added=True, has_bias=True
    )
    linear = found.linear
    if group_size:
        linear = DeviceLinear(with_short_scales(linear.weight), linear.bias)
    given = linear, found.x_RI, found.norm
    expected = OPERATIONS.product(*given, found.added), OPERATIONS.gated_product(*given, "silu")
    if group_size and dtype == torch.bfloat16:
        # not by the many launches of the layout's own function
        monkeypatch.delattr(PackedWeight, "dequantized")
    out = ManyRows().product(*given, found.added), ManyRows().gated_product(*given, "silu")
    assert all(map(torch.equal, out, expected))


def test_the_public_functions_are_the_operations() -> None:
    found, weight = random_product(torch.float16, 64, 96, 128, 5, has_norm=True, has_added=True)
    assert found.can_launch
    out = product(found.linear, found.x_RI, found.norm, found.added)
    assert relative(out, in_float32(found, weight)) < TOLERANCES[torch.float16]
    gated = replace(found, added=None, activation="silu")
    out = gated_product(found.linear, found.x_RI, found.norm, "silu")
    assert relative(out, in_float32(gated, weight)) < TOLERANCES[torch.float16]


FAMILY_INPUTS = sorted(
    {
        *(4096, 11008),  # Llama 2 7B, Vicuna
        *(4096, 14336, 8192),  # Llama 3 8B, Mistral 7B, and the fc of their heads
        *(896, 4864, 3584, 18944),  # Qwen 2
        *(2048, 5120, 12288),  # Qwen 3, Llama 2 13B
        *(3072, 8192, 13824),  # Phi 3, Llama 3.2, Llama 2 13B
        *(2304, 9216, 1152, 6912, 2560, 10240, 3840, 15360),  # Gemma 2 and 3
    }
)
"""In features of the linears of supported families."""


@pytest.mark.proof
@pytest.mark.parametrize(
    ("in_size", "group_size"),
    [(size, (ABSENT, 128, 64)[place % 3]) for place, size in enumerate(FAMILY_INPUTS)],
)
def test_inputs_of_every_family(in_size: int, group_size: int) -> None:
    found, weight = random_product(torch.bfloat16, group_size, 64, in_size, 3, has_norm=True)
    out = found.computed(Tiling(64, group_size or 64, splits=4))
    assert relative(out, in_float32(found, weight)) < TOLERANCES[torch.bfloat16]


def test_blocks_keep_every_number_in_as_many_bytes() -> None:
    for name, kind in BLOCK_TYPES.items():
        found, dense = random_product(torch.float16, name, 37, 768, 1)
        packed = found.linear.weight
        assert isinstance(packed, PackedBlocks)
        assert packed.shape == (37, 768)
        assert torch.equal(packed.dequantized(torch.float32), dense)
        assert packed.num_bytes <= 37 * 768 // kind.size * kind.num_bytes * 1.03
        assert kind.factor_bytes or packed.num_bytes == 37 * 768 // kind.size * kind.num_bytes
        least, small = random_product(torch.float16, name, 3, max(64, kind.size), 1)
        assert torch.equal(least.linear.dense(torch.float32), small)
        chosen = torch.tensor([36, 0, 36])
        assert torch.equal(packed.of_outputs(chosen).dequantized(torch.float32), dense[chosen])


BLOCK_PRODUCTS = [
    (name, DTYPES[place % 2], (1, 3)[place // 2 % 2], (5, 24)[place // 4])
    for place, name in enumerate(BLOCK_TYPES)
]


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize(("name", "dtype", "splits", "num_rows"), BLOCK_PRODUCTS)
def test_a_product_with_blocks_is_the_product(
    name: str, dtype: torch.dtype, splits: int, num_rows: int
) -> None:
    found, weight = random_product(dtype, name, 72, 768, num_rows, has_norm=splits == 1)
    out = found.computed(Tiling(64, DEVICE_STEP, splits))
    assert relative(out, in_float32(found, weight)) < TOLERANCES[dtype]


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_are_dequantized_in_one_launch(name: str) -> None:
    found, dense = random_product(torch.float16, name, 70, 256, 1)
    weight = found.linear.weight
    assert isinstance(weight, PackedBlocks)
    assert torch.equal(dequantized(weight, torch.float16), dense.half())
    chosen = torch.tensor([69, 3, 3])
    for kind in (TritonEmbedding, DeviceEmbedding):
        assert torch.equal(embed(kind(weight, torch.float16), chosen), dense.half()[chosen])


@pytest.mark.parametrize("num_rows", [3, 65])
def test_types_may_differ_within_a_product(num_rows: int) -> None:
    parts, weights = [], []
    for name in ("Q4_K", "Q6_K"):
        found, weight = random_product(torch.float16, name, 64, 256, num_rows, has_norm=True)
        parts.append(found.linear)
        weights.append(weight)
    joined, added = JoinedLinear(parts), torch.randn(num_rows, 128).half()
    biases = [torch.zeros(64) if part.bias is None else part.bias for part in parts]
    dense = DeviceLinear(torch.cat(weights).half(), torch.cat(biases))
    operations = TritonOperations() if num_rows <= launch.MAX_ROWS else ManyRows()
    given = found.x_RI, found.norm, added
    expected = OPERATIONS.product(dense, *given).float()
    assert relative(operations.product(joined, *given), expected) < TOLERANCES[torch.float16]
    gated = found.x_RI, found.norm, "silu"
    expected = OPERATIONS.gated_product(dense, *gated).float()
    assert relative(operations.gated_product(joined, *gated), expected) < 2e-3


def test_a_gpu_compiles_few_kernels_for_its_tests_and_every_shape() -> None:
    launched = [(product, tiling) for case in GPU_CASES for product, _, tiling in case.products()]
    assert len({product.kernel_key(tiling) for product, tiling in launched}) <= 140
    kinds = (DENSE_SHAPES, Tensor), (PACKED_SHAPES, PackedWeight), (BLOCK_SHAPES, PackedBlocks)
    for shapes, kind in kinds:
        wanted = {shape.tiling for of_rows in shapes.values() for shape in of_rows}
        for splits in (1, 4):
            found = {
                replace(tiling, splits=1)
                for product, tiling in launched
                if isinstance(product.linear.weight, kind) and tiling.splits == splits
            }
            assert wanted <= found
