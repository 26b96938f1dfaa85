"""Training runs of a steering, each in seconds, its loss, and what is served of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.interruption import Interrupted
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.formats.package import Part
from polybasic.chain.formats.plan import Plan, Tree
from polybasic.chain.model.loading import load_decoder
from polybasic.deploy import load_chain
from polybasic.train.data.batches import LocalBatch
from polybasic.train.features.head_shape import HeadShape
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.head.loss_module import LossModule
from polybasic.train.head.start import new_head
from polybasic.train.head.steering import Steering, block_starts
from polybasic.train.run.loop import HeadRun
from polybasic.train.run.training import train_head
from polybasic.train.settings import HeadSettings
from tests.conftest import package_around
from tests.train.counting import SMALL_SHAPE
from tests.train.run.small_runs import DATA, SETTINGS, write_target

STEERING = SETTINGS.model_copy(
    update={
        "kind": "steering",
        "adapter_rank": 16,
        "num_positions": 4,
        "feature_loss_weight": 0.0,
        "num_steps": 6,
        "dtype": "float32",
    }
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half as wide as the target, with its tokenizer."""
    return Path(write_target(tmp_path_factory.mktemp("small") / "model", 16))


@pytest.fixture(scope="module")
def trained(
    target: Path, small: Path, conversations: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("steering") / "run"
    return out, train_head(target, conversations, DATA, STEERING, 0, out, drafter=small)


def test_blocks_begin_at_phases_and_with_conversations() -> None:
    first = torch.tensor([[0] * 8, [0] * 5 + [5] * 3])
    found = block_starts(torch.tensor([1, 0]), 3, 8, first)
    assert found.tolist() == [[0, 1, 1, 1, 4, 4, 4, 7], [0, 0, 0, 3, 3, 5, 6, 6]]


def test_loss_holds_one_vector_for_a_block(small: Path) -> None:
    """Row by row: the drafter reads each prefix anew, with the vectors of its tokens' blocks."""
    model = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    V = model.config.vocab_size
    shape: HeadShape = replace(
        SMALL_SHAPE,
        kind="steering",
        vocab_size=V,
        num_layers=0,
        adapter_rank=16,
        steered_layers=2,
        steered_size=16,
    )
    head = new_head(shape, torch.randn(V, 32), STEERING, 0, None, None)
    assert isinstance(head, Steering)
    executor = load_decoder(read_config(small), torch.float32, torch.device("cpu"), 1)
    head.set_drafter(model, executor)
    torch.manual_seed(3)
    torch.nn.init.normal_(head.up.weight)
    tokens, states = torch.randint(V, (1, 9)), torch.randn(1, 9, 32)
    is_assistant = torch.ones(1, 9, dtype=torch.bool)
    is_assistant[:, :3] = False
    lm_head, phase = LmHead(torch.randn(V, 32)), 1
    starts = [0, 1, 1, 1, 1, 5, 5, 5]
    before = torch.cat([torch.zeros(1, 32), states[0]])
    vectors = head.up(head.down(before[starts])).unflatten(-1, (2, 16)).detach()

    def logits(num_tokens: int) -> Tensor:
        hooks = [
            layer.register_forward_hook(
                lambda module, args, out, index=index: out + vectors[:num_tokens, index]
            )
            for index, layer in enumerate(model.model.layers)
        ]
        found: Tensor = model(tokens[:, :num_tokens], use_cache=False).logits[0, -1]
        for hook in hooks:
            hook.remove()
        return found

    expected = torch.stack(
        [
            -(lm_head(states[0, row]).softmax(-1) * logits(row + 1).log_softmax(-1)).sum()
            for row in range(2, 8)
        ]
    ).mean()
    module = LossModule(head, STEERING)
    features = Features(states)
    given = LocalBatch(tokens, is_assistant, range(1)), features, lm_head
    noise, counts = torch.zeros(module.noise_shape(features)), torch.tensor([6.0])
    found = module(*given, noise, counts, torch.tensor([[phase]]))
    torch.testing.assert_close(found.total, expected, rtol=1e-4, atol=1e-4)
    other = module(*given, noise, counts, torch.tensor([[2]]))
    assert not torch.allclose(other.total, expected, rtol=1e-3)
    found.total.backward()
    trained = {name for name, each in head.named_parameters() if each.grad is not None}
    assert trained == {"down.weight", "up.weight"}
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.proof
def test_a_run_leaves_a_steering_that_drafts(
    trained: tuple[Path, dict[str, Any]], target: Path, small: Path, tmp_path: Path
) -> None:
    out, summary = trained
    weights = load_file(out / "model.safetensors")
    assert {name: tuple(each.shape) for name, each in weights.items()} == {
        "down.weight": (16, 32),
        "up.weight": (2 * 16, 16),
    }
    assert weights["up.weight"].abs().sum() > 0
    config = json.loads((out / "config.json").read_text())
    assert config["polybasic"] == {
        "kind": "steering",
        "target_sha256": weights_digest(target),
        "drafter_sha256": weights_digest(small),
    }
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert summary["simulated_accepted_length"] >= 1
    parts = [
        Part("draft", "drafter", "steering", out),
        Part("small", "drafter", "decoder", small),
    ]
    plan = Plan(members=("target", "draft"), tree=Tree(depth=3, top_k=2, rows=8))
    package_around(tmp_path / "chain", target, parts, plan)
    chain = load_chain(tmp_path / "chain", context_tokens=60, dtype="float32")
    options: dict[str, Any] = {"max_new_tokens": 20, "stop_token_ids": []}
    alone = chain.generate([5, 6, 7], plan=chain.plan_of(["target"]), **options)
    assert chain.generate([5, 6, 7], **options).token_ids == alone.token_ids


@pytest.mark.proof
def test_a_steering_that_ctrl_c_stops_continues_to_the_same_bits(
    trained: tuple[Path, dict[str, Any]],
    target: Path,
    small: Path,
    conversations: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = HeadRun._step

    def stopped(self: HeadRun, *given: Any) -> int:
        step(self, *given)
        return 2 * (self._state.step == 4)

    given = (target, conversations, DATA, STEERING, 0, tmp_path / "run")
    monkeypatch.setattr(HeadRun, "_step", stopped)
    with pytest.raises(Interrupted):
        train_head(*given, drafter=small)
    monkeypatch.undo()
    train_head(*given, drafter=small)
    whole, stored = (
        load_file(folder / "model.safetensors") for folder in (trained[0], tmp_path / "run")
    )
    assert all(torch.equal(whole[name], stored[name]) for name in whole)


def test_steering_that_cannot_be_trained_is_refused(
    target: Path, conversations: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"no model to steer: train\.kind = steering"):
        train_head(target, conversations, DATA, STEERING, 0, tmp_path / "run")
    for changes in ({"adapter_rank": 0}, {"draft_vocab_size": 64}):
        with pytest.raises(ValueError, match="a steering has a rank"):
            HeadSettings(kind="steering", feature_loss_weight=0, **changes)
