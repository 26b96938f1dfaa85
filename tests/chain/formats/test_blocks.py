"""Weights in GGML's blocks, against the library that defines them."""

import gguf
import pytest
import torch

from polybasic.chain.formats.block_types import BLOCK_TYPES, typed_name
from polybasic.chain.formats.blocks import BlockWeight
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


def test_a_stored_name_ends_in_its_type() -> None:
    assert typed_name("lm_head.weight.Q8_0") == ("lm_head.weight", BLOCK_TYPES["Q8_0"])
    assert typed_name("lm_head.weight") == ("lm_head.weight", None)
