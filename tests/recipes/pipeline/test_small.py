"""The smaller model of a recipe: its stages, its place in the chain, and what it may not be."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.package import Part
from polybasic.chain.formats.plan import Flush
from polybasic.recipes.estimates.dry_run import estimate
from polybasic.recipes.pipeline.members import packed_plan, parts_of
from polybasic.recipes.pipeline.running import Workspace, closure
from polybasic.recipes.pipeline.small import check_small
from polybasic.recipes.pipeline.stages import stages_of
from polybasic.recipes.schema.loading import load_recipe
from polybasic.recipes.schema.presets import preset_overrides
from polybasic.recipes.schema.recipe import SmallSettings
from tests.recipes.command_line import refusal as command_refusal
from tests.recipes.published_configs import write_config

WITHOUT = ["data", "target", "draft", "intermediate", "chain", "plan", "report"]


@pytest.mark.parametrize(
    ("overrides", "added"),
    [
        ([], ["small_target", "small", "small_draft"]),
        (["small.train_head=false"], ["small_target", "small"]),
        (["small.role=drafter"], ["small_target", "small"]),
        (["small.quantize=false"], ["small_target", "small_draft"]),
        (["small.quantize=false", "small.role=drafter"], ["small_target"]),
    ],
)
def test_stages_are_those_of_the_recipe(overrides: list[str], added: list[str]) -> None:
    assert [stage.name for stage in stages_of(load_recipe("base"))] == WITHOUT
    stages = stages_of(load_recipe("llama31-8b-four", overrides))
    assert [stage.name for stage in stages] == WITHOUT[:4] + added + WITHOUT[4:]
    chain = next(stage for stage in stages if stage.name == "chain")
    made = "small" if "small" in added else "small_target"
    assert ("small_draft" in chain.needs) == ("small_draft" in added)
    assert made in chain.needs


@pytest.mark.parametrize(
    ("recipe", "overrides", "made"),
    [
        ("base", ["train.kind=none"], ["intermediate"]),
        ("base", ["quantize=null"], ["draft"]),
        ("base", ["train.kind=none", "quantize=null"], []),
        ("llama31-8b-four", ["train.kind=none", "quantize=null"], ["small_target", "small"]),
        (
            "llama31-8b-four",
            ["train.kind=none", "quantize=null", "small.quantize=false"],
            ["small_target"],
        ),
    ],
)
def test_a_chain_needs_neither_head_nor_copy(
    recipe: str, overrides: list[str], made: list[str], tmp_path: Path
) -> None:
    stages = stages_of(load_recipe(recipe, overrides))
    assert [stage.name for stage in stages] == ["data", "target", *made, "chain", "plan", "report"]
    chain = next(stage for stage in stages if stage.name == "chain")
    assert set(made) - {"small_target"} <= set(chain.needs) <= {"data", "target", *made}
    # settings of what is made of nothing are kept, presets do not ask for them
    assert preset_overrides(recipe, "quick")
    shown = {stage.name for stage in stages}
    sizes = {"target": "Llama-3.1-8B-Instruct", "small": "Llama-3.2-1B-Instruct"}
    here = [f"{key}.model={write_config(tmp_path, f'meta-llama/{sizes[key]}')}" for key in sizes]
    overrides = [*overrides, *here[: 1 + ("small_target" in made)], "data.conversations=shipped"]
    rows = estimate(stages, Workspace(load_recipe(recipe, overrides), tmp_path / "out"), None)
    assert {row.name for row in rows} == shown


def test_without_a_head_n_grams_draft_for_all_that_verify(tmp_path: Path) -> None:
    overrides = ["train.kind=none", "quantize=null"]
    for recipe, members in (("base", ()), ("llama31-8b-four", ("small",))):
        made = load_recipe(recipe, overrides)
        plan = packed_plan(made.plan, parts_of(Workspace(made, tmp_path)))
        assert plan.members == ("target", *members)
        assert plan.ngram is not None
        assert list(plan.flush) == ["target"][: len(members)]
    copied = load_recipe("base", ["train.kind=none"])
    plan = packed_plan(copied.plan, parts_of(Workspace(copied, tmp_path)))
    assert plan.members == ("target", "intermediate")


def test_commands_take_the_smaller_models_stages_with_them() -> None:
    def names(recipe: str, *only: str) -> list[str]:
        return [stage.name for stage in closure(stages_of(load_recipe(recipe)), only)]

    assert names("base", "draft", "small_draft") == ["data", "target", "draft"]
    assert names("llama31-8b-four", "draft", "small_draft") == [
        "data",
        "target",
        "draft",
        "small_target",
        "small_draft",
    ]
    assert names("llama31-8b-four", "intermediate", "small")[2:] == [
        "intermediate",
        "small_target",
        "small",
    ]


def test_a_command_that_has_nothing_to_make_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command, setting, stages in (
        ("train", "train.kind=none", "draft or small_draft"),
        ("quantize", "quantize=null", "intermediate or small"),
    ):
        told = f"error: nothing to make: recipe base has no stage {stages}; "
        assert command_refusal(command, "base", setting).startswith(told)
    assert list(tmp_path.iterdir()) == []


def write_head_config(folder: Path, **changes: Any) -> None:
    """What tells the kind of a head; no weights."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    folder.mkdir()
    config = {**dict.fromkeys(sizes, 8), "num_attention_heads": 2, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_parts_and_plan_of_four(tmp_path: Path) -> None:
    recipe = load_recipe("llama31-8b-four")
    write_head_config(tmp_path / "draft")
    fused = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    write_head_config(
        tmp_path / "small_draft", architectures=["LlamaForCausalLMEagle3"], eagle_config=fused
    )
    parts = parts_of(Workspace(recipe, tmp_path))
    assert parts == [
        Part("intermediate", "intermediate", "awq", tmp_path / "intermediate"),
        Part("small", "intermediate", "awq", tmp_path / "small"),
        Part("draft", "drafter", "eagle2", tmp_path / "draft"),
        Part("small_draft", "drafter", "eagle3", tmp_path / "small_draft"),
    ]
    plan = packed_plan(recipe.plan, parts)
    assert plan.members == ("target", "intermediate", "draft")
    flush = Flush(length=16)
    assert plan.flush == {"target": flush, "intermediate": flush}
    assert plan.rule == "coupled"
    alone = packed_plan(recipe.plan, parts, drafts_for_target_alone=True)
    assert alone.members == ("target", "draft")
    independent = load_recipe("llama31-8b-four", ["plan.rule=block"]).plan
    assert packed_plan(independent, parts).rule == "block"


def test_parts_with_a_small_drafter(tmp_path: Path) -> None:
    recipe = load_recipe("llama31-8b-four", ["small.role=drafter", "small.quantize=false"])
    write_head_config(tmp_path / "draft")
    folder = tmp_path / "ready"
    folder.mkdir()

    class Whole(Workspace):
        def identity(self, stage: str) -> dict[str, Any]:
            return {"folder": str(folder)}

    for config, kind in (({}, "decoder"), ({"quantization_config": {"bits": 4}}, "awq")):
        (folder / "config.json").write_text(json.dumps(config))
        parts = parts_of(Whole(recipe, tmp_path))
        assert [part.name for part in parts] == ["intermediate", "draft", "small"]
        assert parts[2] == Part("small", "drafter", kind, folder)
        assert list(packed_plan(recipe.plan, parts).flush) == ["target"]


def test_a_plan_keeps_its_chain_and_a_tree_does_not(tmp_path: Path) -> None:
    """What a chain is packed with: settings of measuring do not count."""
    chain = next(stage for stage in stages_of(load_recipe("base")) if stage.name == "chain")

    class Whole(Workspace):
        def identity(self, stage: str) -> dict[str, Any]:
            return {"stage": stage}

    def inputs(*overrides: str) -> dict[str, Any]:
        return chain.inputs(Whole(load_recipe("base", list(overrides)), tmp_path))

    assert inputs("plan.num_prompts_per_task=3") == inputs()
    assert inputs("plan.flush_length=3") != inputs()


@pytest.fixture
def small(tiny_four_chain_parts: Any) -> Path:
    """A ready-made smaller model, beside its 4-bit copy and a target."""
    return Path(tiny_four_chain_parts.small_target)


def refusal(settings: SmallSettings, target: Path) -> str:
    with pytest.raises(UserError) as refused:
        check_small(settings, target, target, target.parent / "prepared")
    return str(refused.value)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_models_of_another_vocabulary_are_refused(small: Path, tiny_four_chain_parts: Any) -> None:
    target, settings = tiny_four_chain_parts.target, SmallSettings(model=str(small))
    check_small(settings, target, target, target.parent / "prepared")
    tokenizer = small / "tokenizer.json"
    original = tokenizer.read_text()
    tokenizer.write_text(original.replace('"w7"', '"seven"'))
    assert refusal(settings, target).startswith(
        f"another tokenizer than the target's: {tokenizer} of small gives 'seven' id 7, "
        f"{target / 'tokenizer.json'} no id (2 tokens differ); "
    )
    tokenizer.write_text(original)
    check_small(settings, target, target, target.parent / "prepared")
    edit_config(small, vocab_size=65)
    assert refusal(settings, target).startswith(
        f"small.model has another vocabulary: vocab_size 65 in {small / 'config.json'}, the target "
        "has 64; "
    )


def test_four_bits_are_not_quantized_again(tiny_four_chain_parts: Any) -> None:
    parts = tiny_four_chain_parts
    settings = SmallSettings(model=str(parts.small), quantize=False, train_head=False)
    check_small(settings, parts.target, parts.target, parts.target)
    for key in ("quantize", "train_head"):
        changed = settings.model_copy(update={key: True})
        assert f"small.model is quantized already: quantization_config in {parts.small}" in refusal(
            changed, parts.target
        )
        assert f"set small.{key}=false" in refusal(changed, parts.target)
    as_drafter = settings.model_copy(update={"role": "drafter", "train_head": True})
    check_small(as_drafter, parts.target, parts.target, parts.target)


def test_the_targets_tokenizer_serves_a_model_without_one(
    small: Path, tiny_four_chain_parts: Any
) -> None:
    (small / "tokenizer.json").unlink()
    target = tiny_four_chain_parts.target
    check_small(SmallSettings(model=str(small)), target, target, target / "prepared")
    assert not (target / "prepared").exists()


def test_a_model_without_weights_is_told_before_training(
    small: Path, tiny_four_chain_parts: Any
) -> None:
    (small / "model.safetensors").unlink()
    assert refusal(SmallSettings(model=str(small)), tiny_four_chain_parts.target).startswith(
        f"no weights: {small} "
    )


def test_a_ready_made_model_is_stamped_with_the_target(
    small: Path, tiny_four_chain_parts: Any, tmp_path: Path
) -> None:
    recipe = load_recipe("base", [f"small.model={small}", "small.quantize=false"])
    stage = next(stage for stage in stages_of(recipe) if stage.name == "small_target")

    class Whole(Workspace):
        def identity(self, name: str) -> dict[str, Any]:
            return {"folder": str(tiny_four_chain_parts.target), "stage": name}

    def folder_of(model: Path) -> Whole:
        given = [f"small.model={model}", f"target.model={tiny_four_chain_parts.target}"]
        return Whole(load_recipe("base", given), tmp_path)

    before = stage.inputs(folder_of(small))
    assert before["folder"] == str(small)
    assert stage.run(folder_of(small), tmp_path) == {"model": str(small)}
    moved = Path(shutil.copytree(small, tmp_path / "moved"))
    assert stage.inputs(folder_of(moved)) != before
    edit_config(moved, vocab_size=65)
    with pytest.raises(UserError, match=r"^small\.model has another vocabulary"):
        stage.run(folder_of(moved), tmp_path)


def test_a_steering_is_trained_when_there_is_a_model_to_steer() -> None:
    changes = ["small.role=drafter", "small.quantize=false", "train.feature_loss_weight=0"]
    names = {}
    for kind in ("eagle3", "steering"):
        stages = stages_of(load_recipe("llama31-8b-four", [*changes, f"train.kind={kind}"]))
        names[kind] = [stage.name for stage in stages]
        needed = {need for stage in stages if stage.name == "draft" for need in stage.needs}
        assert ("small_target" in needed) == (kind == "steering")
    usual, steered = names.values()
    assert sorted(usual) == sorted(steered)
    assert usual.index("draft") < usual.index("small_target")
    assert steered.index("small_target") < steered.index("draft")
