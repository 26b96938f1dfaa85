"""Weights in GGML's blocks, against the library that defines them."""

import gguf
import pytest
import torch

from polybasic.chain.formats.block_types import BLOCK, BLOCK_TYPES, typed_name
from polybasic.chain.formats.blocks import BlockWeight


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_rows_are_dequantized_as_the_library_does_it(name: str) -> None:
    kind, theirs = BLOCK_TYPES[name], gguf.GGMLQuantizationType[name]
    assert (BLOCK, kind.num_bytes) == gguf.GGML_QUANT_SIZES[theirs]
    drawn = torch.randn(24, 96, generator=torch.Generator().manual_seed(0)) / 50
    drawn[3, 32:64] = 0
    rows = torch.from_numpy(gguf.quants.quantize(drawn.numpy(), theirs))
    weight = BlockWeight.unpack(kind, rows)
    assert weight.codes.shape == drawn.shape
    expected = torch.from_numpy(gguf.quants.dequantize(rows.numpy(), theirs))
    assert torch.equal(weight.dequantized(), expected)
    assert torch.equal(weight.dequantized(torch.bfloat16), expected.bfloat16())


def test_a_stored_name_ends_in_its_type() -> None:
    assert typed_name("lm_head.weight.Q8_0") == ("lm_head.weight", BLOCK_TYPES["Q8_0"])
    assert typed_name("lm_head.weight") == ("lm_head.weight", None)
