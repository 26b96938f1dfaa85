"""Grown models compute what the small ones compute, and what breaks that is noticed."""

import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.card import render_card
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.describe import describe_chain
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.plan import Tree
from polybasic.chain.formats.verify import check_chain
from polybasic.deploy import load_chain
from tests.benchmarks.growth.growing import (
    EPS,
    TOKEN_IDS,
    assert_moved,
    assert_same,
    change_config,
    library_logits,
    model,
    runtime_logits,
    shapes,
)
from tests.benchmarks.growth.growing import (
    chain as growing_chain,
)
from tests.chain.native_models import eager
from tests.conftest import VOCAB_SIZE, ChainParts, write_draft, write_target
from tests.conftest import write_intermediate as write_int4
from tests.head_kinds import trim, write_block, write_eagle3

GrownShape, GrownWeights, Growth = shapes.GrownShape, model.GrownWeights, model.Growth
grow_chain = growing_chain.grow_chain
SHAPE_CASES = {
    "same": GrownShape(2, 128, 256, 4, 2, 32),
    "wider and deeper": GrownShape(3, 384, 640, 4, 2, 32),
    "more heads": GrownShape(2, 256, 256, 8, 4, 32),
    "copied key/value heads": GrownShape(2, 256, 256, 8, 8, 32),
    "fewer groups": GrownShape(2, 256, 256, 16, 2, 32),
    "heads twice as wide": GrownShape(2, 256, 256, 4, 2, 64),
    "heads four times as wide": GrownShape(2, 256, 256, 4, 4, 128),
    "larger vocabulary": GrownShape(2, 256, 256, 4, 2, 32, 80),
    "all": GrownShape(4, 384, 640, 8, 8, 64, 96),
}
ALL = SHAPE_CASES["all"]
PROMPTS = ("w1 w2 w3", "w9 w4", "w7 w7 w1 w30", "w21 w5")
GREEDY: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> ChainParts:
    folder = tmp_path_factory.mktemp("small")
    write_target(folder / "target", rms_norm_eps=EPS)
    write_int4(folder / "intermediate", folder / "target")
    write_draft(folder / "draft", folder / "target")
    # a real head's size of states: random weights as large as the fixture's grow without bound
    path = folder / "draft" / "model.safetensors"
    tensors = {name: tensor * 0.1 for name, tensor in load_file(path).items()}
    tensors["fc.bias"] += torch.randn(128).bfloat16()
    save_file(tensors, path, {"format": "pt"})
    return ChainParts(folder / "target", folder / "intermediate", folder / "draft")


@pytest.fixture(scope="module")
def small_chain(parts: ChainParts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "chain"
    parts.package(out)
    return out


@pytest.fixture(scope="module")
def grown(small_chain: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The small chain grown to a shape of SHAPE_CASES; each once."""
    folder = tmp_path_factory.mktemp("grown")

    def grow(name: str) -> Path:
        out = folder / name.replace(" ", "_").replace("/", "_")
        if not out.exists():
            grow_chain(small_chain, SHAPE_CASES[name], name, out)
        return out

    return grow


@pytest.mark.parametrize("name", SHAPE_CASES)
def test_logits_of_the_target_stay(
    name: str, parts: ChainParts, grown: Callable[[str], Path]
) -> None:
    folder, shape = grown(name) / "target", SHAPE_CASES[name]
    for logits in (library_logits, runtime_logits):
        small, large = logits(parts.target), logits(folder)
        assert large.shape == (len(TOKEN_IDS), shape.vocab_size or VOCAB_SIZE)
        assert_same(small, large)
    config = read_config(folder).decoder
    for size in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "head_dim"):
        assert getattr(config, size) == getattr(shape, size)
    assert config.num_kv_heads == shape.num_kv_heads


def test_what_is_added_is_as_ordinary_as_what_was_there(grown: Callable[[str], Path]) -> None:
    """Zeros stand only where outputs would change: in what o_proj and down_proj write."""
    tensors = load_tensors(grown("all") / "target")
    for name, tensor in tensors.items():
        if "layers.3." in name and name.endswith(("q_proj.weight", "up_proj.weight")):
            assert (tensor == 0).float().mean() < 0.2, name
        if "layers.3." in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            assert not tensor.any(), name


@pytest.mark.parametrize("name", SHAPE_CASES)
def test_four_bit_weights_move_as_they_are(
    name: str, parts: ChainParts, grown: Callable[[str], Path]
) -> None:
    assert_moved(parts, SHAPE_CASES[name], grown(name))


@pytest.mark.parametrize("kernels", [nullcontext, eager])
def test_a_grown_chain_answers_as_the_small_one(
    small_chain: Path,
    grown: Callable[[str], Path],
    kernels: Callable[[], AbstractContextManager[None]],
) -> None:
    """With native kernels a rounded row may fall to the other side, which costs passes at most."""
    chain = grown("all")
    checked = check_chain(chain)
    assert [member.name for member in checked.manifest.members] == [
        "target",
        "intermediate",
        "draft",
    ]
    for members in (("target",), ("target", "draft"), ("target", "intermediate", "draft")):
        with kernels():
            small, large = (
                [loaded.generate(prompt, members=members, **GREEDY) for prompt in PROMPTS]
                for loaded in (
                    load_chain(folder, dtype="float32") for folder in (small_chain, chain)
                )
            )
        assert all(len(answer.token_ids) > 10 for answer in small)
        assert [answer.token_ids for answer in large] == [answer.token_ids for answer in small]
        passes, expected = (
            sum((Counter(answer.statistics.forward_passes) for answer in answers), Counter())
            for answers in (large, small)
        )
        assert passes == pytest.approx(expected, rel=0 if kernels is eager else 0.1)


def test_weights_are_written_in_shards_with_an_index(
    small_chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing_chain, "_SHARD_BYTES", 300_000)
    grow_chain(small_chain, ALL, "all", tmp_path / "sharded")
    monkeypatch.undo()
    checked = check_chain(tmp_path / "sharded")
    assert len(list((tmp_path / "sharded" / "target").glob("model-*.safetensors"))) > 3
    assert "model.safetensors.index.json" in checked.manifest.members[0].files
    grow_chain(small_chain, ALL, "all", tmp_path / "whole")
    sharded, whole = (load_tensors(tmp_path / name / "target") for name in ("sharded", "whole"))
    assert sharded.keys() == whole.keys()
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)


def test_a_head_with_an_mlp_of_its_own_keeps_the_proportion(
    parts: ChainParts, tmp_path: Path
) -> None:
    models = ChainParts(parts.target, parts.intermediate, tmp_path / "draft")
    shutil.copytree(parts.draft, models.draft)
    tensors = load_file(models.draft / "model.safetensors")
    for name, dimension in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        key = f"layers.0.mlp.{name}.weight"
        tensors[key] = tensors[key].narrow(dimension, 0, 128).contiguous()
    save_file(tensors, models.draft / "model.safetensors", {"format": "pt"})
    change_config(models.draft, {"intermediate_size": 128})
    models.package(tmp_path / "chain")
    grow_chain(tmp_path / "chain", GrownShape(2, 256, 1024, 4, 2, 32), "x", tmp_path / "grown")
    assert read_config(tmp_path / "grown" / "draft").head.intermediate_size == 512


def test_a_head_over_a_part_of_the_vocabulary_grows(parts: ChainParts, tmp_path: Path) -> None:
    models = ChainParts(parts.target, parts.intermediate, tmp_path / "draft")
    shutil.copytree(parts.draft, models.draft)
    trim(models.draft, token_ids := torch.arange(0, VOCAB_SIZE, 3))
    models.package(tmp_path / "chain")
    grow_chain(tmp_path / "chain", ALL, "all", tmp_path / "grown")
    check_chain(tmp_path / "grown")
    tensors = load_tensors(tmp_path / "grown" / "draft")
    assert tensors["t2d"].nonzero().flatten().tolist() == token_ids.tolist()
    assert len(tensors["t2d"]) == ALL.vocab_size > VOCAB_SIZE
    assert read_config(tmp_path / "grown" / "draft").head.num_draft_tokens == len(token_ids)
    answers = [
        load_chain(folder, dtype="float32").generate("w5", max_new_tokens=24, temperature=0.0)
        for folder in (tmp_path / "chain", tmp_path / "grown")
    ]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].statistics.forward_passes == answers[1].statistics.forward_passes


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_a_block_parallel_head_drafts_the_same_when_grown(
    parts: ChainParts, tmp_path: Path, is_trimmed: bool
) -> None:
    token_ids = torch.arange(0, VOCAB_SIZE, 3) if is_trimmed else None
    write_block(tmp_path / "draft", parts.target, token_ids)
    models = ChainParts(parts.target, parts.intermediate, tmp_path / "draft")
    intermediate, draft = models.parts
    models.package(tmp_path / "chain", parts=[intermediate, replace(draft, kind="block")])
    grow_chain(tmp_path / "chain", ALL, "all", tmp_path / "grown")
    check_chain(tmp_path / "grown")
    drafted = []
    for folder in (tmp_path / "chain", tmp_path / "grown"):
        engine = load_chain(folder, dtype="float32").engine
        drafter = engine.drafters.named("draft", Tree(depth=5, top_k=3, rows=20))
        tokens = TOKEN_IDS[:9].tolist()
        drafter.observe(engine.verifiers["target"].read(tokens[:-1]))
        drafted.append(drafter.draft(tokens, 5))
    assert drafted[0].tokens == drafted[1].tokens
    assert drafted[0].parents == drafted[1].parents


def test_an_eagle3_head_is_not_grown(parts: ChainParts, tmp_path: Path) -> None:
    write_eagle3(tmp_path / "draft", parts.target)
    models = ChainParts(parts.target, parts.intermediate, tmp_path / "draft")
    intermediate, draft = models.parts
    models.package(tmp_path / "chain", parts=[intermediate, replace(draft, kind="eagle3")])
    with pytest.raises(UserError, match=r"member cannot be grown: draft of .* kind eagle3;"):
        grow_chain(tmp_path / "chain", ALL, "all", tmp_path / "grown")
    assert not (tmp_path / "grown").exists()


# What breaks the equality


def with_filled_columns(name: str) -> Callable[..., None]:
    made = GrownWeights.__init__

    def fill(self: Any, growth: Any, group_size: int | None = None) -> None:
        made(self, growth, group_size)
        self.linears[name] = replace(self.linears[name], fills_columns=True)

    return fill


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "wrong"),
    [
        ("wider and deeper", Growth, "norm_eps", property(lambda self: EPS)),
        *(
            (name, model, "_scaled_scores", lambda small, ratio: (1.0, small.rope))
            for name in ("heads twice as wide", "heads four times as wide")
        ),
        ("all", GrownWeights, "__init__", with_filled_columns("self_attn.o_proj")),
        ("all", GrownWeights, "__init__", with_filled_columns("mlp.down_proj")),
        ("all", model, "_ADDED_TOKEN_WEIGHT", 0.0),
    ],
    ids=["epsilon", "scores by 2", "scores by 4", "o_proj", "down_proj", "added tokens"],
)
def test_each_part_of_the_growth_is_needed(
    name: str,
    owner: Any,
    attribute: str,
    wrong: Any,
    small_chain: Path,
    parts: ChainParts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, attribute, wrong)
    grow_chain(small_chain, SHAPE_CASES[name], "wrong", tmp_path / "grown")
    with pytest.raises(AssertionError):
        assert_same(runtime_logits(parts.target), runtime_logits(tmp_path / "grown" / "target"))


# Labels


def test_a_grown_chain_says_so_everywhere(small_chain: Path, grown: Callable[[str], Path]) -> None:
    chain = grown("all")
    manifest = read_manifest(chain)
    assert manifest.grown == "all"
    assert "Grown to the shapes of all" in (chain / "README.md").read_text("utf-8")
    assert describe_chain(chain)["grown"] == "all"
    assert read_manifest(small_chain).grown is None
    assert "Grown" not in render_card(read_manifest(small_chain))
    assert describe_chain(small_chain)["grown"] is None
    # what was measured on the small shapes does not hold
    assert manifest.plans == ()
    assert manifest.results is None
    assert all(member.reference.path == member.name for member in manifest.members)
    parameters = sum(tensor.numel() for tensor in load_tensors(chain / "target").values())
    assert manifest.members[0].num_parameters == parameters


# Refusals


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (GrownShape(1, 256, 256, 4, 2, 32), "layers 1, 2 needed"),
        (GrownShape(2, 64, 256, 4, 2, 32), "hidden_size 64, 128 needed"),
        (GrownShape(2, 128, 128, 4, 2, 32), "intermediate_size 128, 256 needed"),
        (GrownShape(2, 128, 256, 3, 3, 32), "key/value heads 3, 4 needed"),
        (GrownShape(2, 256, 256, 4, 2, 48), "head size 32 to 48"),
        (GrownShape(2, 128, 256, 4, 2, 32, 80), "both of hidden_size 128"),
        (GrownShape(2, 256, 320, 4, 2, 32), "320 inputs are no multiple of 128"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    shape: Any, message: str, small_chain: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        grow_chain(small_chain, shape, "wrong", tmp_path / "grown")
    assert not (tmp_path / "grown").exists()


def test_groups_that_would_mix_are_refused(tmp_path: Path) -> None:
    parts = ChainParts(*(tmp_path / name for name in ("target", "intermediate", "draft")))
    write_target(parts.target, hidden_size=256, num_attention_heads=8, num_key_value_heads=4)
    write_int4(parts.intermediate, parts.target)
    write_draft(parts.draft, parts.target)
    parts.package(tmp_path / "chain")
    # heads 0 1 - 2 | 3 - 4 5: the second group of four takes from both small ones
    with pytest.raises(UserError, match="a group of 128 inputs would take codes from two groups"):
        grow_chain(
            tmp_path / "chain", GrownShape(2, 512, 256, 12, 4, 32), "mixed", tmp_path / "grown"
        )


def test_other_targets_are_refused(parts: ChainParts, tmp_path: Path) -> None:
    target = Path(shutil.copytree(parts.target, tmp_path / "target"))
    change_config(target, {"model_type": "mistral"})
    parts.package(tmp_path / "chain", target=target, target_reference=str(target))
    with pytest.raises(
        UserError, match=r"only plain Llamas can be grown: .*\(model_type mistral\)"
    ):
        grow_chain(tmp_path / "chain", ALL, "all", tmp_path / "grown")


def test_members_that_do_not_follow_the_target_are_refused(
    parts: ChainParts, tmp_path: Path
) -> None:
    draft = Path(shutil.copytree(parts.draft, tmp_path / "draft"))
    tensors = load_file(draft / "model.safetensors")
    tensors["layers.0.self_attn.q_proj.bias"] = torch.ones(128).bfloat16()
    save_file(tensors, draft / "model.safetensors", {"format": "pt"})
    ChainParts(parts.target, parts.intermediate, draft).package(tmp_path / "chain")
    with pytest.raises(UserError, match=r"has layers\.0\.self_attn\.q_proj\.bias"):
        grow_chain(tmp_path / "chain", ALL, "all", tmp_path / "grown")


def test_a_grown_chain_is_not_grown_again(grown: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"grown already: .*\(more heads\)"):
        grow_chain(grown("more heads"), ALL, "all", tmp_path / "grown")


def test_nothing_but_a_chain_is_replaced(small_chain: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="would replace something that is no chain"):
        grow_chain(small_chain, ALL, "all", tmp_path / "mine")
    for out in (small_chain, small_chain.parent):
        with pytest.raises(UserError, match="lies in the folder to be written"):
            grow_chain(small_chain, ALL, "all", out)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    check_chain(small_chain)


def test_scaled_rotations_grow_where_they_can(parts: ChainParts) -> None:
    small = read_config(parts.target).decoder
    linear = replace(small, rope={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    assert Growth(linear, SHAPE_CASES["heads four times as wide"]).rope == linear.rope
    with pytest.raises(UserError, match="rope_type linear, a head size 2 times as large"):
        Growth(linear, SHAPE_CASES["heads twice as wide"])
    yarn = replace(small, rope=linear.rope | {"rope_type": "yarn"})
    with pytest.raises(UserError, match="rope_type yarn"):
        Growth(yarn, SHAPE_CASES["heads four times as wide"])
    assert Growth(yarn, SHAPE_CASES["more heads"]).rope == yarn.rope
