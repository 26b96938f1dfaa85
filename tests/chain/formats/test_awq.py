import warnings

import pytest
import torch
from torch import nn

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints import awq as awq_format
from polybasic.chain.formats.checkpoints.awq import QuantizedWeight, cpu_int4_weight, dequantize
from polybasic.chain.formats.checkpoints.quantization import (
    GROUP_SIZES,
    largest_group_size,
    quantization_config,
    read_quantization_config,
)

with warnings.catch_warnings(record=True):  # autoawq turns DeprecationWarnings on and speaks
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

IN, OUT = 256, 64


@pytest.fixture(params=GROUP_SIZES)
def weight(request) -> QuantizedWeight:
    generator, groups = torch.Generator().manual_seed(0), IN // request.param
    return QuantizedWeight(
        torch.randint(16, (OUT, IN), generator=generator, dtype=torch.uint8),
        torch.randint(16, (OUT, groups), generator=generator, dtype=torch.uint8),
        (torch.rand(OUT, groups, generator=generator) * 0.02 + 0.001).half(),
    )


def autoawq_linear(weight: QuantizedWeight) -> WQLinear_GEMM:
    """The same codes, packed by autoawq itself."""
    linear = nn.Linear(IN, OUT, bias=False)
    linear.weight.data = dequantize(weight)
    groups = (weight.scales.t().contiguous(), weight.zeros.t().contiguous())
    return WQLinear_GEMM.from_linear(
        linear, 4, weight.group_size, scales=groups[0], zeros=groups[1]
    )


def test_one_word_by_hand():
    # columns 0..7 hold 1..8; from the low nibble on a word holds columns 0 2 4 6 1 3 5 7
    codes = torch.zeros(8, 128, dtype=torch.uint8)
    codes[:, 0] = torch.arange(1, 9)
    zeros = torch.full((8, 1), 15, dtype=torch.uint8)
    qweight, qzeros, scales = QuantizedWeight(codes, zeros, torch.ones(8, 1).half()).pack()
    assert qweight[0].item() == 0x86427531 - 2**32
    assert qweight[1:].eq(0).all()
    assert qzeros.tolist() == [[-1]]
    assert scales.tolist() == [[1.0] * 8]


def test_pack_equals_autoawq(weight):
    theirs = autoawq_linear(weight)
    qweight, qzeros, scales = weight.pack()
    assert qweight.dtype == qzeros.dtype == torch.int32
    assert torch.equal(qweight, theirs.qweight)
    assert torch.equal(qzeros, theirs.qzeros)
    assert torch.equal(scales, theirs.scales)


def test_unpack_what_autoawq_packed(weight):
    theirs = autoawq_linear(weight)
    read = QuantizedWeight.unpack(theirs.qweight, theirs.qzeros, theirs.scales)
    assert torch.equal(read.codes, weight.codes)
    assert torch.equal(read.zeros, weight.zeros)
    assert torch.equal(read.scales, weight.scales)
    assert read.group_size == weight.group_size
    # autoawq multiplies in float16
    expected = dequantize_gemm(theirs.qweight, theirs.qzeros, theirs.scales, 4, weight.group_size)
    assert torch.equal(dequantize(read).half(), expected.t())


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5, 6, 7), (0, 4, 1, 5, 2, 6, 3, 7)])
def test_another_nibble_order_is_noticed(weight, monkeypatch, order):
    theirs = autoawq_linear(weight)
    monkeypatch.setattr(awq_format, "NIBBLE_COLUMNS", order)
    qweight, _, _ = weight.pack()
    assert not torch.equal(qweight, theirs.qweight)
    read = QuantizedWeight.unpack(theirs.qweight, theirs.qzeros, theirs.scales)
    assert not torch.equal(read.codes, weight.codes)


def test_stack_is_concatenation(weight):
    other = QuantizedWeight(weight.codes.flip(0), weight.zeros.flip(0), weight.scales.flip(0))
    both = QuantizedWeight.stack([weight, other])
    assert both.group_size == weight.group_size
    assert torch.equal(dequantize(both), torch.cat([dequantize(weight), dequantize(other)]))


def int4_product(weight: QuantizedWeight, x: torch.Tensor) -> torch.Tensor:
    packed, scales_and_zeros = cpu_int4_weight(weight)
    assert scales_and_zeros.shape == (IN // weight.group_size, OUT, 2)
    assert scales_and_zeros.dtype == torch.bfloat16
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    return product(x.bfloat16(), packed, weight.group_size, scales_and_zeros).float()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def test_cpu_kernel_computes_the_same_product(weight):
    # a row of the identity at a time shows the kernel's own weight, rounded to bfloat16
    assert relative_error(int4_product(weight, torch.eye(IN)).t(), dequantize(weight)) < 0.005
    x = torch.randn(4, IN, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    expected = x @ dequantize(weight).t()
    assert relative_error(int4_product(weight, x), expected) < 0.005
    shifted = QuantizedWeight(weight.codes, (weight.zeros + 1) % 16, weight.scales)
    assert relative_error(int4_product(shifted, x), expected) > 0.05


def test_cpu_kernel_refuses_out_features(weight):
    part = QuantizedWeight(weight.codes[:40], weight.zeros[:40], weight.scales[:40])
    with pytest.raises(UserError, match="40 output features; they must be a multiple of 16"):
        cpu_int4_weight(part)


def test_malformed_tensors_are_named(weight):
    qweight, qzeros, scales = weight.pack()
    groups = IN // weight.group_size
    cases = [
        ((qweight.long(), qzeros, scales), r"up_proj\.qweight is int64; expected int32"),
        ((qweight, qzeros, scales.float()), r"up_proj\.scales is float32; expected float16 or bf"),
        ((qweight[:200], qzeros, scales), r"\[200, 8\]; expected \[128, 64 or 32 x "),
        ((qweight, qzeros[:1], scales), rf"qzeros has shape \[1, 8\]; expected \[{groups}, 8\]"),
        ((qweight, qzeros, scales[:, :40]), rf"\[{groups}, 40\]; expected \[{groups}, 64\]"),
        ((qweight, qzeros, scales[0]), r"scales has shape \[64\]; expected \[groups, out\]"),
        ((qweight[:0], qzeros[:0], scales[:0]), r"qweight has shape \[0, 8\]"),
    ]
    for tensors, message in cases:
        with pytest.raises(UserError, match=message.replace("bf", "bfloat16")):
            QuantizedWeight.unpack(*tensors, name="up_proj")


def test_out_features_that_fill_no_word_are_refused(weight):
    part = QuantizedWeight(weight.codes[:12], weight.zeros[:12], weight.scales[:12])
    with pytest.raises(UserError, match=r"gate_proj\.weight has shape \[12, 256\]"):
        part.pack("gate_proj")


def test_quantization_config():
    for size in GROUP_SIZES:
        ours = quantization_config(size)
        assert read_quantization_config({"quantization_config": ours}, "config.json") == size
    ours = quantization_config()
    assert read_quantization_config({"quantization_config": ours}, "config.json") == 128
    # older AutoAWQ writes GEMM, gptqmodel adds keys
    theirs = {**ours, "version": "GEMM", "meta": {"quantizer": "gptqmodel"}}
    assert read_quantization_config({"quantization_config": theirs}, "config.json") == 128


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_method", "gptq"),
        ("bits", 8),
        ("group_size", 48),
        ("group_size", -1),
        ("zero_point", False),
        ("version", "gemv"),
        ("version", None),
    ],
)
def test_other_quantizations_are_refused(key, value):
    config = {"quantization_config": {**quantization_config(), key: value}}
    with pytest.raises(UserError, match=rf"quantization_config\.{key} {value!r} in x/config\.json"):
        read_quantization_config(config, "x/config.json")


def test_the_largest_groups_are_those_that_all_inputs_divide_into():
    # Llama-2 7B, SmolLM2-135M, and inputs that make groups smaller or impossible
    cases = {(4096, 11008): 128, (576, 1536): 64, (960, 2560, 800): 32, (576, 1000): None}
    assert {sizes: largest_group_size(sizes) for sizes in cases} == cases


def test_unquantized_checkpoint_is_refused():
    with pytest.raises(UserError, match=r"no quantization_config in x/config\.json"):
        read_quantization_config({"model_type": "llama"}, "x/config.json")
