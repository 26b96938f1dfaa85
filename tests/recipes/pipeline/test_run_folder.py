"""What lies in an output folder and was written by no run stays there."""

from pathlib import Path

import pytest

from tests.recipes.command_line import call, refusal

OWN = {
    "data/mine.txt": "data/",
    "target/model.safetensors": "target/",
    "draft/notes.md": "draft/",
    "chain": "chain",
    "recipe.yaml": "recipe.yaml",
}


@pytest.mark.parametrize("name", OWN)
def test_what_no_run_has_written_is_never_replaced(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    assert refusal("run", "base", "--out", tmp_path) == (
        f"error: would replace what no run has written: {tmp_path / OWN[name].rstrip('/')}; "
        "choose another folder with --out, or move that away"
    )
    assert path.read_text() == "mine"
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == [path]


def test_a_recipe_in_its_own_output_folder_is_kept(tmp_path: Path) -> None:
    code, text, _ = call("recipes", "show", "base")
    assert code == 0
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"# my own remarks\n{text}")
    assert "recipe.yaml" in refusal("run", recipe, "--out", tmp_path)
    assert recipe.read_text().startswith("# my own remarks")


def test_an_output_folder_that_is_a_file_is_a_line(micro_recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "below", tmp_path / ("n" * 300)):
        assert refusal("train", micro_recipe, "--out", out).startswith("error: cannot write: ")
    assert file.read_text() == "mine"
