"""Recipes that say what differs from a base: values, places of errors, and how they are shown."""

from collections.abc import Callable
from pathlib import Path

import pytest

from polybasic.recipes.schema.layers import merged, resolved_text
from polybasic.recipes.schema.loading import load_recipe, read_layers
from tests.recipes.command_line import recipe_refusal

BASE = """\
# Opens the base.

name: base                    # where it goes
description: the base's own
seed: 1                       # of all

# of everything
train:                        # of heads
  kind: eagle2
  num_steps: 40               # steps,
                              # many of them
  learning_rate: 8e-3         # fast
  warmup_steps: 2
  adam_betas: [0.9, 0.95]     # both

small:
  role: drafter               # drafts
  quantize: false

data:
  # where from
  conversations: shipped
  limit: null                 # all
"""
OWN = """\
# Opens the derived one.

base: base.yaml
name: derived

train:
  learning_rate: 1e-4         # slow
  adam_betas: [0.5, 0.6]
  log: wandb                  # watch

small: null                   # none

data: {limit: 7}
"""
RESOLVED = """\
# Opens the derived one.

name: derived                 # where it goes
seed: 1                       # of all

# of everything
train:                        # of heads
  kind: eagle2
  num_steps: 40               # steps,
                              # many of them
  learning_rate: 1e-4         # slow
  warmup_steps: 2
  adam_betas: [0.5, 0.6]      # both
  log: wandb                  # watch

small: null                   # none

data:
  # where from
  conversations: shipped
  limit: 7                    # all
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def write_recipes(own: str, base: str = BASE) -> str:
        (tmp_path / "base.yaml").write_text(base, "utf-8")
        (tmp_path / "own.yaml").write_text(own, "utf-8")
        return str(tmp_path / "own.yaml")

    return write_recipes


def test_sections_are_merged_and_all_else_is_replaced(write) -> None:
    recipe = load_recipe(write(OWN), ["train.num_steps=50", "small.quantize=true"])
    assert (recipe.name, recipe.description, recipe.seed) == ("derived", "", 1)
    train = recipe.train
    assert (train.num_steps, train.warmup_steps, train.learning_rate) == (50, 2, 1e-4)
    assert train.adam_betas == (0.5, 0.6)
    assert recipe.small is not None
    assert recipe.small.role == "intermediate"  # the base's section was left out
    assert load_recipe(write(OWN)).small is None


def test_a_base_is_found_from_the_recipes_folder_and_by_name(write, tmp_path, monkeypatch) -> None:
    path = write(OWN)
    monkeypatch.chdir("/")
    assert load_recipe(path).seed == 1
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "own.yaml").write_text("base: ../own.yaml\nname: inner\n", "utf-8")
    assert load_recipe(str(inner / "own.yaml")).train.learning_rate == 1e-4
    assert load_recipe(write("base: llama31-8b-four\nname: mine\n")).small is not None


def test_a_resolved_recipe_is_shown_with_the_comments_of_both(write, tmp_path) -> None:
    path = write(OWN)
    shown = resolved_text(read_layers(path))
    assert shown == RESOLVED
    (tmp_path / "copy.yaml").write_text(shown, "utf-8")
    assert load_recipe(str(tmp_path / "copy.yaml")) == load_recipe(path)
    assert resolved_text(read_layers(str(tmp_path / "base.yaml"))) == BASE


def test_what_looks_like_a_comment_in_a_text_is_text(write) -> None:
    base = "target:\n  model: a\n  chat_template: null  # Jinja,\n                       # or not\n"
    own = "target:\n  model: 'a # b'\n  chat_template: |\n    # x\n"
    path = write(f"base: base.yaml\nname: derived\n{own}", f"{BASE}{base}")
    shown = resolved_text(read_layers(path))
    assert "  # Jinja,\n  # or not\n  chat_template: |\n    # x\n" in shown
    assert merged(read_layers(path))["target"] == {"model": "a # b", "chat_template": "# x\n"}


def test_mistakes_name_the_file_in_which_the_key_stands(write, tmp_path) -> None:
    path, base = write(OWN), tmp_path / "base.yaml"
    assert f"train.learning_rate = -1 ({path} line 7)" in recipe_refusal(
        write(OWN.replace("1e-4", "-1")), "seed=2"
    )
    assert f"train.num_steps = 0 ({base} line 10)" in recipe_refusal(
        write(OWN, BASE.replace("num_steps: 40", "num_steps: 0"))
    )
    wrong = BASE.replace("kind: eagle2", "knd: eagle2")
    assert f"unknown key: train.knd ({base} line 9); did you mean" in recipe_refusal(
        write(OWN, wrong)
    )
    assert "seed = -1 (on the command line)" in recipe_refusal(write(OWN), "seed=-1")
    nameless = recipe_refusal(write(OWN.replace("name: derived\n", "")))
    assert nameless == f"key is missing: name ({path}); add name"


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ("name: a\nbase: own.yaml\n", "recipe is its own base: base = own.yaml ({path} line 2)"),
        ("name: a\nbase: vicuna-7\n", "recipe not found: base = vicuna-7 ({path} line 2); did you"),
        ("name: a\nbase: .\n", "recipe is a folder: base = . ({path} line 2)"),
        ("name: a\nbase: [qwen]\n", "base is no name: base = ['qwen'] ({path} line 2); name a"),
        ("name: a\nbase:\n", "base is no name: base = None ({path} line 2)"),
        ("name: a\nbase: base\nbase: base\n", "key given twice: base ({path} line 3; first in"),
    ],
)
def test_a_base_that_cannot_be_is_refused(write, own: str, told: str) -> None:
    path = write(own)
    assert told.format(path=path) in recipe_refusal(path)


def test_a_circle_of_recipes_is_refused(write, tmp_path) -> None:
    path = write(OWN, "base: own.yaml\n" + BASE)
    line = recipe_refusal(path)
    assert line.startswith(
        f"recipe is its own base: base = own.yaml ({tmp_path / 'base.yaml'} line 1)"
    )
