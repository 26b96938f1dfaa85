"""Checkpoints in blocks of Q4_0, as gguf reads them, and nearer to the model than gguf's own."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.blocks import BlockWeight
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors, stored_tensors
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.quantize.blocks import KIND, blocks_of, round_to_blocks
from tests.checkpoints import write_family

Type = gguf.GGMLQuantizationType


def test_weights_on_a_grid_are_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (6, 4, 32), generator=generator).float()
    codes[..., 0] = -8  # which says how large a step is
    weight = (codes * torch.tensor([0.5, 2.0, 0.0, -0.25])[:, None]).flatten(1)
    weight[3] = 0.0
    assert torch.equal(BlockWeight(KIND, blocks_of(weight)).dequantized(), weight)


def test_blocks_are_nearer_than_those_of_the_largest_weight() -> None:
    weight = torch.randn(64, 768, generator=torch.Generator().manual_seed(1))
    ours = blocks_of(weight)
    theirs = gguf.quants.quantize(weight.numpy(), Type.Q4_0)
    assert (ours.dtype, ours.shape) == (torch.uint8, theirs.shape)
    found = gguf.quants.dequantize(ours.numpy(), Type.Q4_0)
    assert np.array_equal(found, BlockWeight(KIND, ours).dequantized().numpy())
    errors = [
        float(np.square(values - weight.numpy()).mean())
        for values in (found, gguf.quants.dequantize(theirs, Type.Q4_0))
    ]
    assert errors[0] < 0.9 * errors[1]


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_all_matrices_are_rounded_and_all_else_is_kept(family: str, tmp_path: Path) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    write_family(source, family, intermediate_size=352)
    round_to_blocks(source, out)
    assert read_config(out).decoder == read_config(source).decoder
    stored, written, read = load_tensors(source), stored_tensors(out), load_tensors(out)
    matrices = {name for name, tensor in stored.items() if tensor.ndim == 2}
    assert any("embed_tokens" in name for name in matrices)
    kept = stored.keys() - matrices
    assert written.keys() == {f"{name}.Q4_0" for name in matrices} | kept
    assert all(torch.equal(written[name], stored[name]) for name in kept)
    for name in matrices:
        expected = stored[name].float()
        difference = (read[name].float() - expected).square().mean() / expected.square().mean()
        assert difference < 0.01, name
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_rows_without_whole_blocks_are_refused(tmp_path: Path) -> None:
    write_family(tmp_path / "model", "qwen2", intermediate_size=272)
    with pytest.raises(UserError, match=r"without whole blocks: .*down_proj.* multiple of 32 long"):
        round_to_blocks(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()
