"""Recipes from YAML and the command line: every mistake is one line with its place."""

from pathlib import Path

import pytest

from polybasic.recipes.schema.loading import find_recipe, load_recipe
from tests.recipes.command_line import recipe_refusal

VALID = """\
name: small
train:
  num_steps: 10
  warmup_steps: 1
  learning_rate: 3e-4
"""


@pytest.fixture
def write(tmp_path: Path):
    def write_recipe(text: str) -> str:
        path = tmp_path / "small.yaml"
        path.write_text(text, "utf-8")
        return str(path)

    return write_recipe


def test_exponents_that_yaml_reads_as_text_become_numbers(write) -> None:
    assert load_recipe(write(VALID)).train.learning_rate == 3e-4


def test_a_shipped_recipe_is_found_by_name_and_a_file_wins(tmp_path, monkeypatch) -> None:
    assert find_recipe("vicuna-7b").name == "vicuna-7b.yaml"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vicuna-7b").write_text(VALID, "utf-8")
    assert find_recipe("vicuna-7b") == Path("vicuna-7b")
    assert load_recipe("vicuna-7b").name == "small"


def test_overrides_win_over_the_file_and_convert(write) -> None:
    recipe = load_recipe(
        write(VALID),
        [
            "train.learning_rate=1e-3",
            "draft.lora.rank=7",
            "data.limit=5",
            "bench.systems=[target]",
            "package.copy_target=true",
            "data.conversations=org/name@main",
        ],
    )
    assert recipe.train.learning_rate == 1e-3
    assert recipe.train.num_steps == 10
    assert recipe.draft.lora.rank == 7
    assert recipe.data.limit == 5
    assert recipe.bench.systems == ("target",)
    assert recipe.package.copy_target is True
    assert recipe.data.conversations == "org/name@main"
    assert load_recipe(write(VALID), ["data.limit=null"]).data.limit is None


def test_unknown_key_names_line_and_nearest(write) -> None:
    path = write(VALID.replace("learning_rate", "lerning_rate"))
    assert recipe_refusal(path) == (
        f"unknown key: train.lerning_rate ({path} line 5); did you mean train.learning_rate?"
    )


def test_unknown_section_names_nearest(write) -> None:
    assert "did you mean train?" in recipe_refusal(write(VALID.replace("train:", "trian:")))


def test_unknown_override_names_nearest_and_a_misplaced_key_its_section(write) -> None:
    path = write(VALID)
    assert recipe_refusal(path, "train.lerning_rate=1") == (
        "unknown key: train.lerning_rate (on the command line); did you mean train.learning_rate?"
    )
    assert recipe_refusal(path, "learning_rate=1").endswith("did you mean train.learning_rate?")
    assert "known keys" in recipe_refusal(path, "zzzzzz=1")
    assert "unknown key: train.num_steps.x" in recipe_refusal(path, "train.num_steps.x=1")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.learning_rate=-1", "train.learning_rate = -1 (on the command line); it must be"),
        ("train.learning_rate=-1", "greater than 0"),
        ("train.num_steps=many", "train.num_steps = 'many'"),
        ("train.num_steps=many", "valid integer"),
        ("train.log=paper", "'none', 'wandb' or 'tensorboard'"),
        ("train.unroll_steps=9", "less than or equal to 8"),
        ("seed=", "seed = empty"),
        ("train=5", "it must be a section of keys: dtype, kind"),
        ("bench.systems=[target,nothing]", "bench.systems.1 = 'nothing'"),
        ("train.warmup_steps=10", "warmup_steps 10 must be below num_steps 10"),
        ("name=a/b", "name = 'a/b'"),
    ],
)
def test_values_out_of_range_name_key_value_and_bound(write, override: str, told: str) -> None:
    assert told in recipe_refusal(write(VALID), override)


def test_values_in_a_file_name_their_line(write) -> None:
    path = write(VALID.replace("num_steps: 10", "num_steps: 0"))
    assert recipe_refusal(path) == (
        f"value not allowed: train.num_steps = 0 ({path} line 3); "
        "it must be greater than or equal to 1"
    )


def test_override_without_equals_sign_and_with_broken_value(write) -> None:
    assert "override without '='" in recipe_refusal(write(VALID), "train.num_steps")
    assert "not YAML" in recipe_refusal(write(VALID), "name={")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (VALID + "  num_steps: 11\n", "key given twice: train.num_steps"),
        (VALID + "  num_steps: 11\n", "line 6; first in"),
        (VALID + "name: other\n", "key given twice: name"),
        (VALID + "data: [\n", "recipe is not YAML"),
        (VALID + "  data: {\n  a\n", "line"),
        ("", "recipe holds no keys"),
        ("- a\n- b\n", "recipe holds no keys"),
        ("? [a, b]\n: 1\n", "recipe is not YAML"),
        ("train: {num_steps: 10, warmup_steps: 1}\n", "key is missing: name"),
    ],
)
def test_broken_files_name_the_line(write, text: str, told: str) -> None:
    assert told in recipe_refusal(write(text))


def test_python_tags_are_not_run(write) -> None:
    line = recipe_refusal(write("name: !!python/object/apply:os.getcwd []\n"))
    assert "recipe is not YAML" in line


def test_binary_and_missing_files(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in recipe_refusal(str(binary))
    assert recipe_refusal(str(tmp_path / "no.yaml")).startswith("recipe not found")
    assert "did you mean base?" in recipe_refusal("bsae")
    assert "recipe is a folder" in recipe_refusal(str(tmp_path))
