"""Weights in GGML's blocks, against the library that defines them."""

import gguf
import pytest
import torch

from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES, typed_name
from polybasic.chain.formats.checkpoints.blocks import BlockWeight, in_8_bits
from tests.chain.native_models import random_rows


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_rows_are_dequantized_as_the_library_does_it(name: str) -> None:
    kind, theirs = BLOCK_TYPES[name], gguf.GGMLQuantizationType[name]
    assert (kind.size, kind.num_bytes) == gguf.GGML_QUANT_SIZES[theirs]
    rows = random_rows(torch.Generator().manual_seed(0), name, 24, 768)
    rows[3, : kind.num_bytes] = 0
    weight = BlockWeight(kind, rows)
    assert weight.shape == (24, 768)
    expected = torch.from_numpy(gguf.quants.dequantize(rows.numpy(), theirs))
    assert 0.02 < float(expected.std()) < 0.5
    assert torch.equal(weight.dequantized(), expected)
    assert torch.equal(weight.dequantized(torch.bfloat16), expected.bfloat16())


def test_a_matrix_is_rounded_to_8_bits_as_closely_as_the_library_does_it() -> None:
    weight = torch.randn(24, 768, generator=torch.Generator().manual_seed(0))
    weight[3, :32], weight[4, 32:64], weight[5, 0] = 0, 1e-9, 60
    rounded = in_8_bits(weight)
    theirs = torch.from_numpy(gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0))
    assert (rounded.type.name, rounded.rows.shape) == ("Q8_0", theirs.shape)
    ours, their_weight = (
        BlockWeight(rounded.type, rows).dequantized() for rows in (rounded.rows, theirs)
    )
    assert torch.count_nonzero(ours[3, :32]) == torch.count_nonzero(ours[4, 32:64]) == 0
    error, their_error = (
        float((matrix - weight).square().mean()) for matrix in (ours, their_weight)
    )
    assert error <= 1.01 * their_error
    step = weight.unflatten(1, (-1, 32)).abs().amax(2) / 127
    assert bool(((ours - weight).abs().unflatten(1, (-1, 32)).amax(2) <= 0.57 * step + 1e-9).all())


def test_a_stored_name_ends_in_its_type() -> None:
    assert typed_name("lm_head.weight.Q8_0") == ("lm_head.weight", BLOCK_TYPES["Q8_0"])
    assert typed_name("lm_head.weight") == ("lm_head.weight", None)
