"""What is written of a head is what the runtime's tables and the next training read."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.draft_vocabulary import draft_token_ids
from polybasic.chain.formats.checkpoints.shapes import check_shapes
from polybasic.chain.formats.files import read_json
from polybasic.train.head.files import write_head
from polybasic.train.head.start import new_head, trained_weights
from polybasic.train.settings import HeadSettings
from tests.train.counting import SMALL_SHAPE

DRAFTED = torch.tensor([0, 3, 7, 20, 49])
SHAPES = {
    "eagle2": SMALL_SHAPE,
    "eagle3": replace(SMALL_SHAPE, kind="eagle3", feature_layers=(0, 2, 3)),
    "medusa": replace(SMALL_SHAPE, kind="medusa", num_positions=3, num_blocks=1, num_layers=0),
    "hydra": replace(SMALL_SHAPE, kind="hydra", num_positions=3, num_blocks=2, num_layers=0),
    "eagle3.1": replace(
        SMALL_SHAPE,
        kind="eagle3",
        feature_layers=(0, 2, 3),
        variants=("fc_norm", "norm_output"),
    ),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("drafted", [None, DRAFTED], ids=["all tokens", "trimmed"])
def test_written_head_is_read_back(shape, drafted, tmp_path):
    kind = shape.kind
    settings = HeadSettings(kind=kind, feature_loss_weight=0, dtype="float32", num_positions=3)
    embedding = torch.randn(50, 32)
    head = new_head(shape, embedding, settings, 0, None, None, draft_token_ids=drafted)
    write_head(tmp_path, head, trained_weights(head), "ab" * 32, "float32")
    config = read_config(tmp_path).head
    assert config.kind == kind
    assert config.feature_layers == (shape.feature_layers or ())
    assert config.num_draft_tokens == (50 if drafted is None else 5)
    check_shapes(kind, tmp_path, config)
    raw = read_json(tmp_path / "config.json", "head config")
    assert raw["polybasic"] == {"target_sha256": "ab" * 32}
    assert raw["torch_dtype"] == "float32"
    tensors = load_file(tmp_path / "model.safetensors")
    if kind in ("medusa", "hydra"):
        assert "embed_tokens.weight" not in tensors
        assert (config.num_positions, config.num_layers) == (3, 0)
    else:
        assert torch.equal(tensors["embed_tokens.weight"], embedding)
    assert ("fc.bias" in tensors) == (kind == "eagle2")
    stored = draft_token_ids(tensors)
    assert stored is drafted or torch.equal(stored, drafted)
    again = new_head(shape, embedding, settings, 1, tmp_path, None)
    assert again.shape == head.shape
    expected = trained_weights(head)
    assert all(torch.equal(each, expected[name]) for name, each in trained_weights(again).items())
