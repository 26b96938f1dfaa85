"""Chains whose draft head is an early exit: the target's own first layers, over its cache."""

import json
import shutil
from collections.abc import Callable
from itertools import product
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
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.package import Part
from polybasic.chain.formats.plan import Flush, Ngram, Plan, Tree, Window
from polybasic.chain.formats.verify import check_chain
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.chain.model.early_exit import load_early_exit
from polybasic.chain.model.loading import load_decoder
from polybasic.deploy import load_chain
from polybasic.deploy.runtime.drafters.early_exit import EarlyExitDrafter
from polybasic.deploy.runtime.load import stated_memory
from polybasic.deploy.runtime.options import LoadOptions
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.verifier import Verifier
from tests.checkpoints import write_family
from tests.conftest import package_around, write_intermediate, write_target
from tests.deploy.runtime.drafters.definitions import best_paths, paths_of
from tests.head_kinds import write_early_exit

CPU, CAPACITY = torch.device("cpu"), 200
pytestmark = pytest.mark.processor
TREE = Tree(depth=3, top_k=3, rows=12)
DRAFTED = torch.arange(0, 64, 3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of three layers and its 4-bit copy; exits of both behind the second layer."""
    folder = tmp_path_factory.mktemp("exits")
    write_target(folder / "target", num_hidden_layers=3)
    write_intermediate(folder / "intermediate", folder / "target")
    write_early_exit(folder / "exit", folder / "target", 2)
    write_early_exit(folder / "exit_of_copy", folder / "intermediate", 2, adapter_rank=32)
    write_early_exit(folder / "trimmed", folder / "target", 1, token_ids=DRAFTED)
    return folder


# What is drafted


def log_probabilities(target: Path, exit: Path, num_layers: int) -> Callable[[list[int]], Tensor]:
    """Tokens -> log-probabilities [V] of the next one, as transformers computes them."""
    stored = {k: v.float() for k, v in load_file(exit / "model.safetensors").items()}
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    model.model.layers = model.model.layers[:num_layers]
    norm = model.model.norm
    norm.weight.data = stored["norm.weight"] - (1 if "Gemma" in type(norm).__name__ else 0)
    if "adapter.down.weight" in stored:
        down, up = stored["adapter.down.weight"], stored["adapter.up.weight"]
        norm.register_forward_pre_hook(lambda module, args: (args[0] + args[0] @ down.T @ up.T,))

    @torch.inference_mode()
    def of(tokens: list[int]) -> Tensor:
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits
        return logits[0, -1].float().log_softmax(-1)

    return of


@torch.inference_mode()
@pytest.mark.parametrize("kernels", ["native", "eager"])
@pytest.mark.parametrize(("family", "rank"), [("llama3", 0), ("llama3", 32), ("gemma3", 16)])
def test_drafts_are_those_of_the_first_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, family: str, rank: int
) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", kernels)
    write_family(tmp_path / "target", family, dtype=torch.float32)
    write_early_exit(tmp_path / "exit", tmp_path / "target", 2, rank)
    target = load_decoder(read_config(tmp_path / "target"), torch.float32, CPU, CAPACITY)
    layers = load_early_exit(read_config(tmp_path / "exit"), target, CAPACITY)
    assert layers.weights.layers[1].qkv is target.weights.layers[1].qkv
    assert layers.weights.embedding is target.weights.embedding
    verifier = Verifier("target", target, KeyValueCache.of(target, CAPACITY))
    drafter = EarlyExitDrafter(layers, TREE, verifier.cache)
    of = log_probabilities(tmp_path / "target", tmp_path / "exit", 2)
    other = log_probabilities(tmp_path / "target", tmp_path / "exit", 1)
    tokens = [5, 9, 2, 40, 7, 7, 30]
    for num in (1, 4, 7):
        verifier.cache.truncate(0)
        verifier.read(tokens[: num - 1]) if num > 1 else None
        verifier.cache.keep(range(num - 1))
        found = paths_of(drafter.draft(tokens[:num], TREE.depth))
        assert found == best_paths(of, TREE, tokens[:num])
        assert found != best_paths(other, TREE, tokens[:num])
        assert verifier.cache.length == num - 1, "a draft commits nothing"


# Chains


PROMPTS = [[7], [5, 9, 2, 40], list(range(3, 40))]
FLUSH = {"target": Flush(length=4)}
WINDOW = {"exit": Window(tokens=6, sinks=1)}
SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}]


def package(models: Path, out: Path, *drafters: str, target: str = "target") -> Path:
    """A chain of target, 4-bit copy and these early exits."""
    names = ["intermediate"] if target == "target" else []
    parts = [Part(name, "intermediate", "awq", models / name) for name in names]
    parts += [Part(name, "drafter", "early_exit", models / name) for name in drafters]
    plan = Plan(members=("target",), tree=TREE)
    package_around(out, models / target, parts, plan, copy_target=True)
    return out


@pytest.fixture(scope="module")
def folder(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("chains") / "chain"
    return package(models, out, "exit", "trimmed", "exit_of_copy")


def plans() -> list[Plan]:
    """Every drafter, with and without what shares its cache, and one that sees a part."""
    two = [Plan(members=("target", name), tree=TREE) for name in ("exit", "trimmed")]
    copy = Plan(members=("target", "intermediate", "exit_of_copy"), tree=TREE, flush=FLUSH)
    own = two[0].model_copy(update={"ngram": Ngram(min_match=1)})
    return [*two, copy, own, two[0].model_copy(update={"windows": WINDOW})]


@pytest.mark.parametrize("kernels", ["native", pytest.param("eager", marks=pytest.mark.proof)])
def test_answers_are_the_targets(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", kernels)
    chain = load_chain(folder, dtype="float32", context_tokens=120)
    verifiers = chain.engine.verifiers
    assert verifiers["target"].cache is verifiers["intermediate"].cache
    gained = dict.fromkeys(("exit", "trimmed", "exit_of_copy"), 0)
    prompts = PROMPTS if kernels == "native" else PROMPTS[1:2]
    for ids, settings in product(prompts, SETTINGS):
        options = {"max_new_tokens": 30, "stop_token_ids": [], **settings}
        alone = chain.generate(ids, plan=Plan(members=("target",), tree=TREE), **options)
        for plan in plans():
            found = chain.generate(ids, plan=plan, **options)
            assert found.token_ids == alone.token_ids, plan
            assert found.statistics.forward_passes[plan.members[-1]] > 0
            gained[plan.members[-1]] += max(found.statistics.accepted_lengths[plan.members[-2]]) - 1
    assert min(gained.values()) > 0, f"drafts of each are accepted now and then: {gained}"


def test_sequences_share_passes_and_leave_their_rows(folder: Path) -> None:
    """In company, after one another in one slot, and with rows taken over: the same answers."""
    chain = load_chain(folder, dtype="bfloat16", context_tokens=120, sequences=4)
    common = list(range(3, 40))
    asked = [
        ([*common[: 20 + place], place], {"max_new_tokens": 20, "plan": plan, **settings})
        for place, (plan, settings) in enumerate(product(plans(), SETTINGS))
    ]
    together: list[list[int]] = []
    for first in range(0, len(asked), 4):
        running = [chain.begin(ids, **options) for ids, options in asked[first : first + 4]]
        while chain.step():
            pass
        taken = [[piece.token_ids for piece in answering.take()] for answering in running]
        together += [[token for piece in pieces for token in piece] for pieces in taken]
    assert all(slot.is_free for slot in chain.engine.slots.made)
    for (ids, options), found in zip(asked, together, strict=True):
        for slot in chain.engine.slots.made:
            slot.clear()
        answer = chain.generate(ids, **options)
        assert answer.token_ids == found
        again = chain.generate(ids, **options)
        assert again.token_ids == found
        assert again.statistics.num_cached_tokens > 0
        assert again.statistics.accepted_lengths == answer.statistics.accepted_lengths


def test_a_chain_says_what_the_exit_is_and_takes(folder: Path, models: Path) -> None:
    manifest = read_manifest(folder)
    assert [member.drafts_for for member in manifest.drafters] == [
        ("target",),
        ("target",),
        ("intermediate",),
    ]
    assert "Early exit: drafts trees with the first layers of intermediate" in (
        folder / "README.md"
    ).read_text("utf-8")
    memory, _ = stated_memory(check_chain(folder), LoadOptions(dtype="float32", device="cpu"))
    taken = {name: memory.members[name] for name in ("exit", "exit_of_copy")}
    hidden_size, vocab_size = 128, 64
    norm, adapter = 4 * hidden_size, 4 * hidden_size * 2 * 32
    # beside a verifier in 4 bits, what only drafts is rounded in float32, too
    lm_head = round((0.5 + 3 / 64) * vocab_size * hidden_size)
    assert taken == {
        "exit": {"weights": norm, "cache": 0},
        "exit_of_copy": {"weights": norm + adapter + lm_head, "cache": 0},
    }


@torch.inference_mode()
def test_traces_along_an_answer_are_drafts_after_each_prefix(folder: Path) -> None:
    """Drafts along a text that the cache holds overwrite rows, which the next ones write again."""
    chain = load_chain(folder, dtype="float32", context_tokens=120)
    chain.stop_tokens = frozenset()
    drafting = chain.engine.drafters.named("exit", TREE)
    verifier = chain.engine.verifiers["target"]
    tokens = [5, 9, 2, 40, 7, 7, 30, 8, 1, 22]

    def drafts(again: bool) -> list[DraftTree]:
        found = []
        for num in range(4, len(tokens)):
            if again or num == 4:
                verifier.cache.truncate(0)
                verifier.read(tokens)
                verifier.cache.keep(range(len(tokens)))
            found.append(drafting.candidates(tokens[:num], 3).keep_best(tokens[num - 1], 12))
        return found

    assert drafts(again=False) == drafts(again=True)


# Refusals


def edited(models: Path, out: Path, **changes: Any) -> Path:
    """The chain's models, with another config.json of the exit."""
    shutil.copytree(models, out)
    path = out / "exit" / "config.json"
    write_json(path, json.loads(path.read_text()) | changes)
    return out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exit_layer": 3}, r"early exit behind the last layer: .*exit_layer 3 of 3 layers"),
        ({"exit_layer": 0}, r"malformed early exit: .*exit_layer 0"),
        ({"exit_layer": "2"}, r"malformed early exit: .*exit_layer '2'"),
        ({"exit_layer": True}, r"malformed early exit: .*exit_layer True"),
        ({"adapter_rank": 8}, r"malformed early exit: .*adapter_rank 8"),
        ({"adapter_rank": 16}, r"missing tensor: adapter\.down\.weight"),
        ({"polybasic": {"kind": "early_exit", "target_sha256": "0" * 64}}, "without its model"),
        ({"polybasic": {"kind": "early_exit"}}, "head without target"),
        ({"hidden_size": 64}, "hidden_size differs"),
        ({"vocab_size": 65}, "vocab_size differs"),
    ],
)
def test_exits_that_do_not_fit_are_refused(
    models: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as refused:
        package(edited(models, tmp_path / "models", **changes), tmp_path / "chain", "exit")
    assert "\n" not in str(refused.value)


def test_an_exit_behind_the_last_layer_is_refused_when_it_is_loaded(
    models: Path, tmp_path: Path
) -> None:
    config = read_config(edited(models, tmp_path / "models", exit_layer=3) / "exit")
    target = load_decoder(read_config(models / "target"), torch.float32, CPU, CAPACITY)
    with pytest.raises(UserError, match="exit_layer 3 of 3 layers"):
        load_early_exit(config, target, CAPACITY)


def test_plans_run_an_exit_below_its_own_model_alone(folder: Path) -> None:
    chain = load_chain(folder, dtype="float32", context_tokens=60)
    plan = Plan(members=("target", "intermediate", "exit"), tree=TREE, flush=FLUSH)
    with pytest.raises(UserError, match="exit drafts for target, not for intermediate"):
        chain.generate([1], plan=plan)


def test_layers_that_are_divided_over_processes_are_no_early_exit(folder: Path) -> None:
    with pytest.raises(UserError, match="exit runs those of target, tensor_parallel=2"):
        load_chain(folder, tensor_parallel=2, dtype="float32", context_tokens=60)
