"""A checkpoint in 4 bits by rounding to the nearest code."""

from pathlib import Path

import pytest
import torch

from polybasic.chain.errors import UserError
from polybasic.chain.formats.awq import QuantizedWeight, dequantize
from polybasic.chain.formats.checkpoint import load_tensors
from polybasic.chain.formats.config import read_config
from polybasic.quantize.nearest import round_checkpoint
from tests.checkpoints import write_family

WIDTHS: dict[int, dict[str, int]] = {
    128: {},
    64: {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3},
    32: {"intermediate_size": 352},
}
"""Shapes by the largest groups that all their inputs divide into."""


@pytest.mark.parametrize(("family", "group_size"), [("qwen2", 64), ("phi3", 128), ("gemma3", 32)])
def test_linears_are_rounded_and_all_else_is_kept(
    family: str, group_size: int, tmp_path: Path
) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    write_family(source, family, **WIDTHS[group_size])
    round_checkpoint(source, out)
    assert read_config(out).group_size == group_size
    assert read_config(out).decoder == read_config(source).decoder
    stored, read = load_tensors(source), load_tensors(out)
    rounded = {name.removesuffix("qweight") for name in read if name.endswith(".qweight")}
    assert rounded == {
        name.removesuffix("weight")
        for name in stored
        if name.endswith("proj.weight") and "layers" in name
    }
    for stem in rounded:
        parts = (read[f"{stem}{part}"] for part in ("qweight", "qzeros", "scales"))
        weight, expected = QuantizedWeight.unpack(*parts), stored[f"{stem}weight"].float()
        steps = weight.scales.float().repeat_interleave(group_size, dim=1)
        # the zero point is a code too, which moves the ends of a group by up to half a step
        assert ((dequantize(weight) - expected).abs() <= steps * 1.01).all()
        assert ((dequantize(weight) - expected).abs() <= steps * 0.51).float().mean() > 0.95
    for name in stored.keys() - {f"{stem}weight" for stem in rounded}:
        assert torch.equal(stored[name], read[name]), name
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_width_that_has_no_groups_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    write_family(tmp_path / "model", "qwen2", intermediate_size=272)
    line = (
        r"does not divide into groups: mlp\.gate_proj\.weight \[272, 128\] of each layer of .* 32$"
    )
    with pytest.raises(UserError, match=line):
        round_checkpoint(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()
