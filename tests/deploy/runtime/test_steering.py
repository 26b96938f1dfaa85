"""Chains in which the target's states steer an independent model that drafts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.files import write_json
from polybasic.chain.formats.package import Part
from polybasic.chain.formats.plan import Flush, Plan, Tree
from polybasic.chain.formats.verify import check_chain
from polybasic.chain.model.loading import load_decoder
from polybasic.chain.model.steering import load_steering
from polybasic.deploy import load_chain
from polybasic.deploy.runtime.drafters.steering import SteeredDrafter
from polybasic.deploy.runtime.load import stated_memory
from polybasic.deploy.runtime.options import LoadOptions
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.verifier import SPARE_ROWS, Verifier
from tests.conftest import package_around, write_intermediate, write_target
from tests.head_kinds import write_steering

CPU, CAPACITY = torch.device("cpu"), 200
pytestmark = pytest.mark.processor
TREE = Tree(depth=3, top_k=2, rows=8)
FLUSH = {"target": Flush(length=4)}
SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, its 4-bit copy, a narrower model, and a steering of that by the target."""
    folder = tmp_path_factory.mktemp("steering")
    write_target(folder / "target", hidden_size=256)
    write_intermediate(folder / "intermediate", folder / "target")
    write_target(folder / "small", seed=1, num_hidden_layers=3)
    write_steering(folder / "steering", folder / "target", folder / "small")
    return folder


def package(models: Path, out: Path, drafters: tuple[str, ...] = ("small", "steering")) -> Path:
    kinds = {"small": "decoder", "steering": "steering"}
    parts = [Part("intermediate", "intermediate", "awq", models / "intermediate")]
    parts += [Part(name, "drafter", kinds[name], models / name) for name in drafters]
    plan = Plan(members=("target",), tree=TREE)
    package_around(out, models / "target", parts, plan, copy_target=True)
    return out


@pytest.fixture(scope="module")
def folder(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # the steering comes first: what it steers is loaded before it all the same
    return package(models, tmp_path_factory.mktemp("chains") / "chain", ("steering", "small"))


def plain_log_probabilities(
    models: Path, states: Tensor, tokens: list[int], num_known: int
) -> Tensor:
    """Of the token after `tokens`, by transformers with a bias behind each layer.

    Args:
        states: of the target, of all tokens.
        num_known: leading tokens; later ones are a path of a draft, which holds one vector.
    """
    stored = load_file(models / "steering" / "model.safetensors")
    down, up = (stored[f"{name}.weight"].float() for name in ("down", "up"))
    before = torch.cat([torch.zeros_like(states[:1]), states])
    rows = [min(row, num_known - 1) for row in range(len(tokens))]
    biases = (before[rows] @ down.T @ up.T).unflatten(-1, (3, -1))
    model = AutoModelForCausalLM.from_pretrained(models / "small", dtype=torch.float32)
    for index, layer in enumerate(model.model.layers):
        bias = biases[None, :, index]
        layer.register_forward_hook(lambda module, args, out, bias=bias: out + bias)
    logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits
    return logits[0, -1].log_softmax(-1)


@torch.inference_mode()
@pytest.mark.parametrize("kernels", ["native", "eager"])
def test_drafts_are_those_of_biased_layers(
    models: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """Whenever the verifier's states were observed: a row's vector is that of its position."""
    monkeypatch.setenv("POLYBASIC_KERNELS", kernels)
    target, small = (
        load_decoder(read_config(models / name), torch.float32, CPU, CAPACITY)
        for name in ("target", "small")
    )
    steered = load_steering(read_config(models / "steering"), target, small)
    drafter = SteeredDrafter(steered, TREE, CAPACITY)
    tokens = [5, 9, 2, 40, 7, 7, 30]
    states = Verifier("target", target, KeyValueCache.of(target, CAPACITY)).read(tokens)
    drafter.observe(states[:3])
    drafter.draft([*tokens[:3], 60], 3)
    drafter.observe(states[3:4])
    drafter.rewind(3)
    drafter.observe(states[3:6])
    found = drafter.candidates(tokens, 2)
    path: list[int] = []
    total = 0.0
    for level in range(2):
        expected = plain_log_probabilities(models, states, [*tokens, *path], len(tokens))
        best = expected.topk(2)
        first = level * 2
        assert found.tokens[first : first + 2].tolist() == best.indices.tolist()
        torch.testing.assert_close(
            found.scores[first : first + 2], total + best.values, rtol=1e-4, atol=1e-4
        )
        path, total = [int(best.indices[0])], float(best.values[0])
    unsteered = plain_log_probabilities(models, 0 * states, tokens, len(tokens))
    assert not torch.allclose(unsteered.topk(2).values, found.scores[:2], atol=1e-2)


def test_answers_are_the_targets(folder: Path) -> None:
    chain = load_chain(folder, dtype="float32", context_tokens=120, sequences=4)
    plans = [
        Plan(members=("target", "steering"), tree=TREE),
        Plan(members=("target", "intermediate", "steering"), tree=TREE, flush=FLUSH),
    ]
    gained = 0
    for settings in SETTINGS:
        options = {"max_new_tokens": 25, "stop_token_ids": [], **settings}
        prompts = [[7], [5, 9, 2, 40], list(range(3, 40))]
        target_alone = Plan(members=("target",), tree=TREE)
        expected = [chain.generate(ids, plan=target_alone, **options) for ids in prompts]
        for plan in plans:
            running = [chain.begin(ids, plan=plan, **options) for ids in prompts]
            while chain.step():
                pass
            for answering, alone in zip(running, expected, strict=True):
                found = [token for piece in answering.take() for token in piece.token_ids]
                assert found == alone.token_ids
                gained += max(answering.statistics.accepted_lengths[plan.members[-2]]) - 1
    assert gained > 0


def test_a_chain_says_what_is_steered_and_what_it_takes(folder: Path) -> None:
    checked = check_chain(folder)
    assert "Steering: steers a small model by the states of target" in (
        folder / "README.md"
    ).read_text("utf-8")
    memory, _ = stated_memory(
        checked, LoadOptions(dtype="float32", device="cpu", context_tokens=100)
    )
    taken, small = memory.members["steering"], memory.members["small"]
    assert taken["weights"] == 4 * (32 * 256 + 3 * 128 * 32)
    assert taken["cache"] == small["cache"] + 4 * 256 * (100 + SPARE_ROWS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter_num_layers": 2}, r"tensor shape mismatch: up\.weight"),
        (
            {"drafter_num_layers": 6, "drafter_hidden_size": 64},
            r"steering of another model: .* 6, .* 64; the model has 3 layers of 128",
        ),
        ({"steering_rank": 0}, "malformed steering: .*steering_rank 0"),
        ({"polybasic": {"drafter_sha256": "0" * 64}}, "steering without its model: .*00000000"),
        ({"polybasic": {"target_sha256": "0" * 64}}, "head without its model"),
    ],
)
def test_steering_that_does_not_fit_is_refused(
    models: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    copied = Path(shutil.copytree(models, tmp_path / "models"))
    path = copied / "steering" / "config.json"
    config = json.loads(path.read_text())
    changes = {
        key: config[key] | value if isinstance(value, dict) else value
        for key, value in changes.items()
    }
    write_json(path, config | changes)
    with pytest.raises(UserError, match=message) as refused:
        package(copied, tmp_path / "chain")
    assert "\n" not in str(refused.value)


def test_steering_needs_the_model_among_the_members(models: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="steering without its model"):
        package(models, tmp_path / "chain", ("steering",))
