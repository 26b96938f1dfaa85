"""Whole training runs of an early exit, each in seconds, and what is served of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.interruption import Interrupted
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.formats.package import Part
from polybasic.chain.formats.plan import Plan, Tree
from polybasic.deploy import load_chain
from polybasic.train.run.loop import HeadRun
from polybasic.train.run.training import train_head
from polybasic.train.settings import HeadSettings
from tests.conftest import package_around, write_intermediate
from tests.train.run.small_runs import DATA, SETTINGS, write_target

EXIT = SETTINGS.model_copy(
    update={
        "kind": "early_exit",
        "exit_layer": 1,
        "adapter_rank": 16,
        "feature_loss_weight": 0.0,
        "num_steps": 8,
        "dtype": "float32",
    }
)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As wide as 4 bits need."""
    return Path(write_target(tmp_path_factory.mktemp("wide") / "target", 128))


@pytest.fixture(scope="module")
def trained(
    wide: Path, conversations: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("exits") / "exit"
    return out, train_head(wide, conversations, DATA, EXIT, 0, out)


def losses(out: Path) -> list[float]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_a_run_leaves_an_exit_that_drafts(
    trained: tuple[Path, dict[str, Any]], wide: Path, tmp_path: Path
) -> None:
    out, summary = trained
    weights = load_file(out / "model.safetensors")
    assert {name: tuple(each.shape) for name, each in weights.items()} == {
        "norm.weight": (128,),
        "adapter.down.weight": (16, 128),
        "adapter.up.weight": (128, 16),
    }
    assert weights["adapter.up.weight"].abs().sum() > 0
    config = json.loads((out / "config.json").read_text())
    assert (config["exit_layer"], config["adapter_rank"]) == (1, 16)
    assert config["polybasic"] == {"kind": "early_exit", "target_sha256": weights_digest(wide)}
    assert losses(out)[-1] < losses(out)[0]
    assert summary["simulated_accepted_length"] > 1
    package_around(
        tmp_path / "chain",
        wide,
        [Part("draft", "drafter", "early_exit", out)],
        Plan(members=("target", "draft"), tree=Tree(depth=3, top_k=2, rows=8)),
    )
    chain = load_chain(tmp_path / "chain", context_tokens=60, dtype="float32")
    answer = chain.generate([5, 6, 7], max_new_tokens=20, stop_token_ids=[])
    alone = chain.plan_of(["target"])
    assert (
        answer.token_ids
        == chain.generate([5, 6, 7], max_new_tokens=20, stop_token_ids=[], plan=alone).token_ids
    )


@pytest.mark.proof
def test_a_run_begins_with_the_final_norm_of_its_model(
    wide: Path, conversations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: dict[str, torch.Tensor] = {}

    def keep(self: HeadRun) -> dict[str, Any]:
        begun.update({k: v.clone() for k, v in self._module.head.state_dict().items()})
        raise InterruptedError

    monkeypatch.setattr(HeadRun, "train", keep)
    with pytest.raises(InterruptedError):
        train_head(wide, conversations, DATA, EXIT, 0, tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32)
    assert torch.equal(begun["norm.weight"], model.model.norm.weight)
    assert not begun["adapter.up.weight"].any()


@pytest.mark.proof
def test_an_exit_that_ctrl_c_stops_continues_to_the_same_bits(
    trained: tuple[Path, dict[str, Any]],
    wide: Path,
    conversations: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = HeadRun._step

    def stopped(self: HeadRun, *given: Any) -> int:
        step(self, *given)
        return 2 * (self._state.step == 5)

    out = tmp_path / "run"
    monkeypatch.setattr(HeadRun, "_step", stopped)
    with pytest.raises(Interrupted):
        train_head(wide, conversations, DATA, EXIT, 0, out)
    monkeypatch.undo()
    again = train_head(wide, conversations, DATA, EXIT, 0, out)
    assert "continuing from" in capsys.readouterr().err
    assert again["simulated_accepted_length"] == trained[1]["simulated_accepted_length"]
    whole, stored = (load_file(folder / "model.safetensors") for folder in (trained[0], out))
    assert all(torch.equal(whole[name], stored[name]) for name in whole)


@pytest.mark.proof
def test_an_exit_of_the_intermediate_names_its_weights(
    wide: Path, conversations: str, tmp_path: Path
) -> None:
    write_intermediate(tmp_path / "copy", wide)
    settings = EXIT.model_copy(update={"features_from": "intermediate", "num_steps": 3})
    given = (wide, conversations, DATA, settings, 0, tmp_path / "run")
    train_head(*given, intermediate=tmp_path / "copy")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["polybasic"]["target_sha256"] == weights_digest(tmp_path / "copy")


def test_exits_that_cannot_be_trained_are_refused(
    wide: Path, conversations: str, tmp_path: Path
) -> None:
    settings = EXIT.model_copy(update={"exit_layer": 2})
    with pytest.raises(UserError, match=r"exit behind the last layer: train.exit_layer 2 of 2"):
        train_head(wide, conversations, DATA, settings, 0, tmp_path / "run")
    with pytest.raises(ValueError, match="zero_stage 3 partitions them"):
        HeadSettings(kind="early_exit", feature_loss_weight=0, zero_stage=3, num_processes=2)
    with pytest.raises(ValueError, match="exit_layer is of an early exit; leave it null"):
        HeadSettings(exit_layer=2)
    with pytest.raises(ValueError, match="multiple of 16"):
        HeadSettings(kind="early_exit", feature_loss_weight=0, adapter_rank=8)
    with pytest.raises(ValueError, match="has no MLP"):
        HeadSettings(kind="early_exit", feature_loss_weight=0, intermediate_size=64)
