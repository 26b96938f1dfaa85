"""Chains with heads of all kinds, over all tokens and over a part of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.files import write_json
from polybasic.chain.formats.manifest import read_manifest, write_manifest
from polybasic.chain.formats.package import Part
from polybasic.chain.formats.plan import Plan, Tree
from polybasic.chain.formats.verify import check_chain
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.model.loading import load_decoder, load_head
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.bench.members import draft_vocabularies
from polybasic.deploy.planner.measuring.costs import RoundCosts, time_plan
from polybasic.deploy.runtime.engine import Engine
from polybasic.deploy.runtime.request import Statistics
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.sampling import Sampling
from polybasic.deploy.runtime.rounds.verifier import Verifier
from tests.checkpoints import write_family
from tests.head_kinds import (
    DFLASH_SECTIONS,
    FEATURE_LAYERS,
    trim,
    write_block,
    write_dflash,
    write_eagle3,
    write_medusa,
    write_peagle,
)

DRAFTED = torch.arange(0, 64, 3)
MEMBER_SETS = [("target", "draft"), ("target", "intermediate", "draft")]
PROMPTS = [[7], [5, 9, 2, 40], list(range(3, 40))]


def package(parts: Any, out: Path, *heads: tuple[str, str]) -> Path:
    """A chain whose first draft head is of the kind that its config.json says.

    Args:
        heads: name and kind of further ones, which lie beside the target.
    """
    intermediate, draft = parts.parts
    kind = read_config(parts.draft).head.kind
    others = [Part(name, "drafter", other, parts.target.parent / name) for name, other in heads]
    members = [intermediate, replace(draft, kind=kind), *others]
    parts.package(out, parts=members)
    return out


def write_head(parts: Any, case: str) -> None:
    """In the place of the chain's head."""
    token_ids = DRAFTED if "trimmed" in case else None
    if case.endswith("eagle3"):
        write_eagle3(parts.draft, parts.target, token_ids)
    elif case.endswith("block"):
        write_block(parts.draft, parts.target, token_ids)
    elif case.endswith("peagle"):
        write_peagle(parts.draft, parts.target, token_ids)
    elif case.removeprefix("trimmed ") in DFLASH_SECTIONS:
        write_dflash(parts.draft, parts.target, case.removeprefix("trimmed "), token_ids)
    elif case.endswith(("medusa", "hydra")):
        write_medusa(parts.draft, parts.target, case.split()[-1], token_ids)
    elif token_ids is not None:
        trim(parts.draft, token_ids)


def answer(chain: Chain, ids: list[int], members: tuple[str, ...]) -> tuple[list[int], Statistics]:
    pieces = chain.stream_ids(ids, 40, Sampling(), chain.plan_of(members))
    return [token for piece in pieces for token in piece], pieces.statistics


TITLES = {
    "trimmed eagle2": "EAGLE-2",
    "eagle3": "EAGLE-3",
    "trimmed eagle3": "EAGLE-3",
    "medusa": "Medusa",
    "trimmed hydra": "Hydra",
    "block": "block-parallel",
    "trimmed block": "block-parallel",
    "dflash": "DFlash",
    "trimmed dspark rnn": "DFlash",
    "trimmed peagle": "P-EAGLE",
}


@pytest.mark.parametrize("case", TITLES)
def test_greedy_answers_are_the_targets(tiny_chain_parts: Any, tmp_path: Path, case: str) -> None:
    write_head(tiny_chain_parts, case)
    chain = load_chain(package(tiny_chain_parts, tmp_path / "chain"), dtype="float32")
    chain.stop_tokens = frozenset()
    verifiers = chain.engine.verifiers
    assert verifiers["target"].cache is verifiers["intermediate"].cache
    widths = {verifier.states_width for verifier in verifiers.values()}
    reads_layers = TITLES[case] in ("EAGLE-3", "DFlash", "P-EAGLE")
    assert widths == ({4 * 128} if reads_layers else {128})
    lengths: list[int] = []
    for ids in PROMPTS:
        alone, _ = answer(chain, ids, ("target",))
        assert len(alone) == 40
        for members in MEMBER_SETS:
            found, statistics = answer(chain, ids, members)
            assert found == alone
            lengths += statistics.accepted_lengths[members[-2]]
            assert statistics.forward_passes["draft"] > 0
    assert max(lengths) > 1, "some draft must be accepted"
    kind = f"{TITLES[case]} head: drafts trees from the features of target or intermediate"
    assert kind in (chain.folder / "README.md").read_text()


@pytest.mark.parametrize(("kind", "kernels"), [("medusa", "auto"), ("hydra", "device")])
def test_heads_by_place_draft_for_several_sequences_at_a_time(
    tiny_chain_parts: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    kernels: str,
) -> None:
    """Greedily and with common noise the target's answers; trees deeper than there are heads."""
    monkeypatch.setenv("POLYBASIC_KERNELS", kernels)
    write_medusa(tiny_chain_parts.draft, tiny_chain_parts.target, kind, num_heads=2)
    folder = package(tiny_chain_parts, tmp_path / "chain")
    chain = load_chain(folder, dtype="float32", sequences=3, context_tokens=90)
    given = {"max_new_tokens": 24, "stop_token_ids": []}
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
        alone = [
            chain.generate(ids, members=["target"], **given, **sampling).token_ids
            for ids in PROMPTS
        ]
        asked = [
            chain.begin(ids, members=list(MEMBER_SETS[1]), **given, **sampling) for ids in PROMPTS
        ]
        found: list[list[int]] = [[] for _ in asked]
        while not all(answering.is_over for answering in asked):
            chain.step()
            for tokens, answering in zip(found, asked, strict=True):
                tokens += [token for piece in answering.take() for token in piece.token_ids]
        assert found == alone
        lengths = [answering.statistics.accepted_lengths["intermediate"] for answering in asked]
        assert max(map(max, lengths)) in (2, 3), "no deeper than the heads"


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_drafts_are_timed_by_their_levels(tiny_chain_parts: Any, tmp_path: Path, kind: str) -> None:
    """However many passes they are; no level follows one of improbable candidates."""
    write_medusa(tiny_chain_parts.draft, tiny_chain_parts.target, kind, num_heads=3)
    chain = load_chain(package(tiny_chain_parts, tmp_path / "chain"), dtype="float32")
    for least, levels in ((0.0, 3), (0.9999, 1)):
        tree = Tree(depth=3, top_k=2, rows=7, least_probability=least)
        plan, costs = Plan(members=("target", "draft"), tree=tree), RoundCosts()
        time_plan(chain.engine, PROMPTS[1], plan, frozenset(), Sampling(), costs)
        num_rounds = {key: len(seconds) for key, seconds in costs.levels.items()}
        assert max(num_rounds, key=lambda key: num_rounds[key]) == ("draft", 2, levels)


def test_trimmed_heads_draft_their_tokens_alone(tiny_chain_parts: Any, tmp_path: Path) -> None:
    whole_chain = load_chain(package(tiny_chain_parts, tmp_path / "whole"), dtype="float32")
    trim(tiny_chain_parts.draft, DRAFTED)
    chain = load_chain(package(tiny_chain_parts, tmp_path / "chain"), dtype="float32")
    decoder = chain.engine.models.target
    whole, trimmed = (each.engine.models.drafters["draft"] for each in (whole_chain, chain))
    states = torch.randn(5, 128)
    assert whole.weights.draft_token_ids is None
    assert torch.equal(whole.logits(states), decoder.logits(states))
    assert trimmed.weights.draft_token_ids is not None
    assert torch.equal(trimmed.weights.draft_token_ids, DRAFTED)
    expected = decoder.logits(states)[:, DRAFTED]
    torch.testing.assert_close(trimmed.logits(states), expected, rtol=1e-5, atol=1e-5)
    drafter = chain.engine.drafters.named("draft", chain.plan.tree)
    with torch.inference_mode():
        drafter.observe(states[:3])
        drafted = drafter.candidates([1, 2, 3, 4], 3).tokens.tolist()
    assert set(drafted) <= set(DRAFTED.tolist())
    assert len(set(drafted)) > 2


def test_heads_with_projections_of_their_own_are_timed_over_their_tokens_alone(
    tiny_chain_parts: Any, tmp_path: Path
) -> None:
    write_medusa(tiny_chain_parts.draft, tiny_chain_parts.target, "medusa", DRAFTED)
    chain = load_chain(package(tiny_chain_parts, tmp_path / "chain"), dtype="float32")
    (entry,) = draft_vocabularies(chain, [PROMPTS[1]])
    assert (entry["num_tokens"], entry["vocab_size"]) == (len(DRAFTED), 64)
    assert entry["part"]["seconds_per_pass"] > 0
    assert entry["whole"]["seconds_per_pass"] is None


def test_heads_of_both_kinds_coexist(tiny_chain_parts: Any, tmp_path: Path) -> None:
    models = tiny_chain_parts.target.parent
    write_eagle3(models / "third", tiny_chain_parts.target)
    alone = load_chain(package(tiny_chain_parts, tmp_path / "alone"), dtype="float32")
    folder = package(tiny_chain_parts, tmp_path / "both", ("third", "eagle3"))
    both = load_chain(folder, dtype="float32")
    for members in [*MEMBER_SETS, ("target", "third"), ("target", "intermediate", "third")]:
        for ids in PROMPTS:
            found, statistics = answer(both, ids, members)
            assert found == answer(alone, ids, ("target",))[0]
            if members in MEMBER_SETS:
                expected = answer(alone, ids, members)[1].accepted_lengths
                assert statistics.accepted_lengths == expected


@pytest.mark.parametrize("family", ["llama3", "gemma2"])
def test_states_hold_the_inputs_of_layers_as_transformers_gives_them(
    tmp_path: Path, family: str
) -> None:
    write_family(tmp_path, family, dtype=torch.float32)
    decoder = load_decoder(read_config(tmp_path), torch.float32, torch.device("cpu"), 64)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = list(range(3, 20))
    with torch.inference_mode():
        found = model(torch.tensor([tokens]), output_hidden_states=True)
        plain = states_of(decoder, tokens)
        logits = decoder.logits(plain)
        layers = (2, 0, 2)
        states = states_of(decoder, tokens, layers)
        assert torch.equal(states[:, :128], plain)
        assert torch.equal(decoder.logits(states), logits)
    for place, layer in enumerate(layers, 1):
        inputs = states[:, 128 * place : 128 * (place + 1)]
        torch.testing.assert_close(inputs, found.hidden_states[layer][0], rtol=1e-5, atol=1e-4)
    assert not torch.allclose(states[:, 128:256], states[:, 256:384], atol=1e-2)


@pytest.mark.parametrize("family", ["llama3", "gemma2"])
def test_rows_of_the_projection_are_as_in_the_whole(tmp_path: Path, family: str) -> None:
    """Gemma's are those of its embedding, and cap the logits."""
    write_family(tmp_path, family, dtype=torch.float32)
    decoder = load_decoder(read_config(tmp_path), torch.float32, torch.device("cpu"), 64)
    token_ids, states = torch.tensor([3, 4, 90, 319]), 10 * torch.randn(5, 128)
    weights = decoder.weights
    assert weights.draft_lm_head is not None
    trimmed = replace(weights, lm_head=weights.draft_lm_head(token_ids))
    found = decoder.over(trimmed).logits(states)
    torch.testing.assert_close(found, decoder.logits(states)[:, token_ids], rtol=1e-5, atol=1e-5)
    assert decoder.config.tie_word_embeddings == (family == "gemma2")
    assert (found.abs().max() <= 3) == (family == "gemma2")


def states_of(
    decoder: Executor, tokens: list[int], feature_layers: tuple[int, ...] = ()
) -> torch.Tensor:
    cache = KeyValueCache.of(decoder, 64)
    return Verifier("target", decoder, cache, feature_layers=feature_layers).read(tokens)


# Refusals


def edit_head(folder: Path, removed: tuple[str, ...] = (), **tensors: torch.Tensor) -> None:
    stored = load_file(folder / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in stored.items() if name not in removed}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | changes)


def test_incomplete_heads_are_refused(tiny_chain_parts: Any, tmp_path: Path) -> None:
    write_eagle3(tiny_chain_parts.draft, tiny_chain_parts.target, DRAFTED)
    edit_head(tiny_chain_parts.draft, ("t2d",))
    with pytest.raises(UserError, match="missing tensor: t2d"):
        package(tiny_chain_parts, tmp_path / "chain")


def test_tables_that_disagree_are_refused(tiny_chain_parts: Any, tmp_path: Path) -> None:
    write_eagle3(tiny_chain_parts.draft, tiny_chain_parts.target, DRAFTED)
    moved = torch.zeros(64, dtype=torch.bool).index_fill(0, DRAFTED + 1 - 2 * (DRAFTED == 63), True)
    edit_head(tiny_chain_parts.draft, t2d=moved)
    chain = package(tiny_chain_parts, tmp_path / "chain")
    with pytest.raises(UserError, match=r"d2t and t2d in .*draft name different tokens"):
        load_chain(chain)


def test_a_projection_of_another_size_is_refused(tiny_chain_parts: Any, tmp_path: Path) -> None:
    write_eagle3(tiny_chain_parts.draft, tiny_chain_parts.target, DRAFTED)
    edit_config(tiny_chain_parts.draft, draft_vocab_size=20)
    with pytest.raises(UserError, match=r"lm_head\.weight in .* is \[22, 128\], .* \[20, 128\]"):
        package(tiny_chain_parts, tmp_path / "chain")


def test_a_tree_wider_than_the_draft_vocabulary_is_refused(
    tiny_chain_parts: Any, tmp_path: Path
) -> None:
    write_eagle3(tiny_chain_parts.draft, tiny_chain_parts.target, DRAFTED)
    chain = package(tiny_chain_parts, tmp_path / "chain")
    manifest = read_manifest(chain)
    for top_k in (22, 23):
        tree = manifest.plan.tree.model_copy(update={"depth": 2, "top_k": top_k})
        plan = manifest.plan.model_copy(update={"tree": tree})
        write_manifest(chain, manifest.model_copy(update={"plan": plan}))
        if top_k == 22:
            assert load_chain(chain).generate("w5", max_new_tokens=4).token_ids
    with pytest.raises(UserError, match=r"top_k 23 in a plan, draft drafts 22 tokens"):
        load_chain(chain)


def test_a_head_declared_to_be_of_another_kind_is_refused(
    tiny_chain_parts: Any, tmp_path: Path
) -> None:
    write_eagle3(tiny_chain_parts.draft, tiny_chain_parts.target)
    with pytest.raises(UserError, match=r"head of another kind: draft is eagle2, .* eagle3"):
        tiny_chain_parts.package(tmp_path / "chain")


def test_layers_beyond_those_of_the_model_are_refused(
    tiny_chain_parts: Any, tmp_path: Path
) -> None:
    write_eagle3(tiny_chain_parts.draft, tiny_chain_parts.target, feature_layers=(0, 1, 2))
    with pytest.raises(UserError, match="reads layers 0, 1, 2 of 2"):
        package(tiny_chain_parts, tmp_path / "chain")
    decoder = load_decoder(
        read_config(tiny_chain_parts.target), torch.float32, torch.device("cpu"), 64
    )
    with pytest.raises(UserError, match="reads layers 0, 1, 2 of 2"):
        load_head(read_config(tiny_chain_parts.draft), decoder, 64)


def test_heads_that_read_different_layers_are_refused(
    tiny_chain_parts: Any, tmp_path: Path
) -> None:
    models = tiny_chain_parts.target.parent
    write_eagle3(tiny_chain_parts.draft, tiny_chain_parts.target)
    write_eagle3(models / "other", tiny_chain_parts.target, feature_layers=(0, 0, 1))
    with pytest.raises(UserError, match="heads of one model read different layers"):
        package(tiny_chain_parts, tmp_path / "chain", ("other", "eagle3"))
    write_eagle3(models / "other", tiny_chain_parts.target, seed=4)
    folder = package(tiny_chain_parts, tmp_path / "chain", ("other", "eagle3"))
    check_chain(folder)
    engine = load_chain(folder).engine
    verifiers = engine.verifiers.values()
    assert {verifier.feature_layers for verifier in verifiers} == {FEATURE_LAYERS}
    other = engine.models.drafters["other"]
    changed = other.over(replace(other.weights, feature_layers=(0, 0, 1)))
    drafters = engine.models.drafters | {"other": changed}
    with pytest.raises(UserError, match=r"\(0, 0, 1\) by other, \(0, 1, 1\) by another head"):
        Engine(replace(engine.models, drafters=drafters))
