"""Training runs of Medusa's and Hydra's heads: stopped and continued, trained further, refused."""

import json
import signal

import pytest
from safetensors.torch import load_file

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.interruption import Interrupted
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.lineage import weights_digest
from polybasic.train.run.training import train_head
from tests.train.run.small_runs import DATA, SETTINGS
from tests.train.run.test_head_training import signal_in_step

CHANGES = {
    "kind": "hydra",
    "num_positions": 2,
    "step_decay": 0.8,
    "feature_loss_weight": 0.0,
    "num_steps": 4,
    "eval_every_steps": 2,
    "save_every_steps": 1,
    "pack": True,
}


def settings_of(**changes):
    return SETTINGS.model_copy(update=CHANGES | changes)


def test_hydras_heads_that_ctrl_c_stops_continue_to_the_same_bits(
    target, conversations, tmp_path, monkeypatch
):
    settings = settings_of(features="offline", draft_vocab_size=64)

    def train(out):
        return train_head(target, conversations, DATA, settings, 0, out)

    whole = train(tmp_path / "whole")
    assert len(whole["accepted_by_depth"]) == 2, "no deeper than the heads that there are"
    steps = signal_in_step(monkeypatch, 3, signal.SIGINT)
    out = tmp_path / "stopped"
    with pytest.raises(Interrupted, match=r"^SIGINT: step 3 of 4 is saved"):
        train(out)
    assert train(out) | {"seconds": 0} == whole | {"seconds": 0}
    assert steps == [1, 2, 3, 4]
    first, second = (folder / "model.safetensors" for folder in (tmp_path / "whole", out))
    assert first.read_bytes() == second.read_bytes()
    weights, file = load_file(second), read_config(out)
    assert weights["blocks.1.layers.0.weight"].shape == (32, 3 * 32)
    assert weights["lm_heads.1.weight"].shape == (64, 32)
    assert weights["blocks.1.layers.0.weight"].any(), "it starts at zero"
    assert (file.head.kind, file.head.num_positions, file.head.num_blocks) == ("hydra", 2, 1)
    assert file.content["polybasic"] == {"target_sha256": weights_digest(target)}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(len(line["agreement"]) == 2 for line in lines if "loss" in line)


def test_medusas_heads_are_trained_further(target, conversations, tmp_path):
    settings = settings_of(kind="medusa", num_steps=3)
    first = train_head(target, conversations, DATA, settings, 0, tmp_path / "first")
    again = train_head(
        target, conversations, DATA, settings, 0, tmp_path / "again", start=tmp_path / "first"
    )
    assert again["initial_accepted_length"] == first["simulated_accepted_length"]
    more = settings.model_copy(update={"num_positions": 3})
    with pytest.raises(UserError, match=r"num_positions 2, wanted 3; set train\.num_positions"):
        train_head(
            target, conversations, DATA, more, 0, tmp_path / "more", start=tmp_path / "first"
        )
