"""What the shipped recipes say, and that their headers say what a dry run counts."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors, resolve_head
from polybasic.chain.heads.importing import import_head
from polybasic.recipes.cli.run import on_devices
from polybasic.recipes.estimates.costs import StageEstimate
from polybasic.recipes.estimates.dry_run import estimate
from polybasic.recipes.estimates.hardware_profiles import hardware_named
from polybasic.recipes.estimates.sizes import shape_of_target
from polybasic.recipes.pipeline.running import Workspace
from polybasic.recipes.pipeline.stages import stages_of
from polybasic.recipes.schema.layers import resolved_text
from polybasic.recipes.schema.loading import known_keys, load_recipe, read_layers, shipped_recipes
from polybasic.recipes.schema.presets import PRESETS, preset_overrides
from polybasic.recipes.schema.recipe import Recipe
from tests.recipes.published_configs import CONFIGS, NUM_PARAMETERS, write_config

ROOT = Path(__file__).parents[3]
NAMES = [name for name in shipped_recipes() if load_recipe(name).target.model in CONFIGS]
WITHOUT_FIGURES = {"base", "own-model", "smollm2-135m", "smollm2-135m-as-stored"}
FIGURES = re.compile(
    r"([\d.]+) (hours|minutes|GB of device memory|GB of host memory|GB of memory|GB of disk)"
)


def header(name: str) -> str:
    """The recipe's opening comment as one line."""
    head = shipped_recipes()[name].read_text("utf-8").split("\n\n")[0]
    return " ".join(line.removeprefix("#").strip() for line in head.splitlines())


def counted(name: str, folder: Path, hardware: str) -> list[StageEstimate]:
    """What a dry run says of a recipe whose models are here as config.json alone."""
    plain = load_recipe(name)
    models = {"target": plain.target.model, "small": plain.small.model if plain.small else None}
    overrides = [
        f"{section}.model={write_config(folder, model)}"
        for section, model in models.items()
        if model in CONFIGS
    ]
    if further := plain.package.intermediates:
        folders = {each: str(write_config(folder, model)) for each, model in further.items()}
        overrides.append(f"package.intermediates={json.dumps(folders)}")
    recipe = load_recipe(name, [*on_devices(hardware), *overrides])
    workspace = Workspace(recipe, folder / "out")
    return estimate(stages_of(recipe), workspace, None, hardware_named(hardware))


def dry_run(name: str, overrides: list[str], folder: Path) -> list[StageEstimate]:
    recipe = load_recipe(name, overrides)
    return estimate(stages_of(recipe), Workspace(recipe, folder / "out"), None)


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_is_shown_whole(name: str, tmp_path: Path) -> None:
    """Whoever reads it sees every key that there is, and a copy of it says the same."""
    shown = resolved_text(read_layers(name))
    assert f"polybasic run recipes/{name}.yaml" in shown.split("\n\n")[0]
    copy = tmp_path / "copy.yaml"
    copy.write_text(shown, "utf-8")
    assert read_layers(str(copy))[0].base is None
    assert load_recipe(str(copy)) == load_recipe(name)
    content = yaml.safe_load(shown)
    for key in known_keys(Recipe):
        section = content
        for part in key:
            if section is None:
                break  # a section that is left out; null is told
            assert part in section, f"{name}.yaml lacks {'.'.join(key)}"
            section = section[part]


@pytest.mark.parametrize("name", ["base", "own-model", "vicuna-7b"])
def test_presets_make_a_recipe_shorter_or_longer(name: str) -> None:
    quick, normal, thorough = (
        load_recipe(name, preset_overrides(name, preset)) for preset in PRESETS
    )
    assert normal == load_recipe(name)
    steps = [recipe.train.num_steps for recipe in (quick, normal, thorough)]
    assert steps == [normal.train.num_steps // 10, normal.train.num_steps, 4 * steps[1]]
    assert quick.bench.num_prompts_per_task < thorough.bench.num_prompts_per_task
    assert quick.target == normal.target == thorough.target
    with pytest.raises(UserError, match=r"^unknown preset: --preset fast; use one of quick, norm"):
        preset_overrides(name, "fast")


def test_own_model_needs_a_model_and_conversations_and_nothing_else(tmp_path: Path) -> None:
    conversations = tmp_path / "chats.jsonl"
    conversations.write_text("{}\n")
    given = [
        f"target.model={write_config(tmp_path, 'Qwen/Qwen3-8B')}",
        f"data.conversations={conversations}",
    ]
    for overrides in ([], given[:1], given[1:]):
        with pytest.raises(UserError, match=r"^value is to be given: .* of recipe own-model; add"):
            dry_run("own-model", overrides, tmp_path)
    assert {row.state.action for row in dry_run("own-model", given, tmp_path)} == {"run"}


def test_all_models_of_the_paper_and_more_have_a_recipe() -> None:
    recipes = [load_recipe(name) for name in NAMES]
    named = {recipe.target.model for recipe in recipes}
    named |= {recipe.small.model for recipe in recipes if recipe.small is not None}
    named |= {model for recipe in recipes for model in recipe.package.intermediates.values()}
    assert named == set(CONFIGS)


@pytest.mark.parametrize("name", sorted(shipped_recipes().keys() - WITHOUT_FIGURES))
def test_headers_say_what_a_dry_run_counts(name: str, tmp_path: Path) -> None:
    told, rest = re.split("[Ee]stimates", header(name), maxsplit=1)
    figures = {what: float(figure) for figure, what in FIGURES.findall(told)}
    dry_run = re.search(r"--dry-run --hardware ([\w-]+)", rest)
    assert len(figures) == (3 if dry_run is None else 4), told
    hardware = "cpu"
    if dry_run is not None:
        hardware = dry_run[1]
        assert f"On {hardware}: about" in told
    rows = counted(name, tmp_path, hardware)
    seconds = sum(row.seconds for row in rows)
    on_host = [row.memory_bytes for row in rows if row.is_on_host]
    found = {
        "hours": seconds / 3600,
        "minutes": seconds / 60,
        "GB of device memory": max(row.memory_bytes for row in rows if not row.is_on_host) / 1e9,
        "GB of host memory": max(on_host, default=0) / 1e9,
        "GB of memory": max(row.memory_bytes for row in rows) / 1e9,
        "GB of disk": sum(row.disk_bytes for row in rows) / 1e9,
    }
    assert figures == pytest.approx({what: found[what] for what in figures}, rel=0.2)
    assert {row.state.action for row in rows} == {"run"}


@pytest.mark.parametrize("model", CONFIGS)
def test_parameters_are_those_that_the_hub_counts(model: str, tmp_path: Path) -> None:
    recipe = load_recipe("vicuna-7b", [f"target.model={write_config(tmp_path, model)}"])
    assert shape_of_target(recipe).num_parameters == NUM_PARAMETERS[model]


@pytest.mark.parametrize("name", NAMES)
def test_recipes_answer_in_the_dtype_of_the_checkpoint(name: str) -> None:
    recipe = load_recipe(name)
    stored = CONFIGS[recipe.target.model]["torch_dtype"]
    assert {recipe.plan.dtype, recipe.bench.dtype} <= {"auto", stored}


@pytest.mark.parametrize("name", ["vicuna-7b", "vicuna-13b"])
def test_vicunas_template_writes_fastchats_format(name: str) -> None:
    vocabulary = {"<s>": 0, "</s>": 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary)), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = load_recipe(name).target.chat_template
    messages = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "How are you?"},
    ]
    system = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions."
    )
    rounds = "USER: Hello! ASSISTANT: Hi!</s>USER: How are you? ASSISTANT:"

    def written(*given: dict[str, str]) -> object:
        return tokenizer.apply_chat_template(
            list(given), tokenize=False, add_generation_prompt=True
        )

    assert written(*messages) == f"<s>{system} {rounds}"
    assert written({"role": "system", "content": "Be kind."}, *messages) == f"<s>Be kind. {rounds}"


# Heads that are shipped


@pytest.mark.parametrize(
    "folder", sorted((ROOT / "recipes" / "heads").iterdir()), ids=lambda it: it.name
)
def test_a_shipped_head_is_small_and_drafts_for_the_model_of_its_recipe(
    folder: Path, tmp_path: Path
) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) < 5e6
    config = json.loads((folder / "config.json").read_text())
    assert config["polybasic"].keys() == {"target_sha256", "exported_to"}, "no path of a machine"
    recipe = load_recipe(folder.name)
    assert recipe.draft.model == f"package:polybasic/recipes/heads/{folder.name}"
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    shape = {name: config[name] for name in names}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            **shape, vocab_size=config["vocab_size"], num_hidden_layers=1, tie_word_embeddings=True
        )
    )
    model.bfloat16().save_pretrained(tmp_path / "target")
    summary = import_head(resolve_head(recipe.draft.model), tmp_path / "target", tmp_path / "head")
    assert (summary["kind"], summary["draft_vocab_size"]) == ("eagle2", config["draft_vocab_size"])
    tensors = load_tensors(tmp_path / "head")
    assert all(tensor.isfinite().all() for tensor in tensors.values() if tensor.is_floating_point())
    assert tensors["fc.weight"].float().std() > 0
