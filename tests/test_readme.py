"""What the documents name exists: commands, keys, paths and links."""

import json
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from polybasic.deploy.planner.theory import predicted_speedup
from polybasic.recipes.cli.main import app
from polybasic.recipes.schema.loading import known_keys
from polybasic.recipes.schema.recipe import Recipe

ROOT = Path(__file__).parent.parent
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text("utf-8")
    for page in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        *sorted((ROOT / "docs").glob("*.md")),
    )
}
README = PAGES["README.md"]
FOLDERS = ("chain", "train", "quantize", "deploy", "recipes", "tests", "benchmarks", "docs")
FOLDERS += ("examples",)
LINK = re.compile(r"\]\(([^)#:]+)\)")
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`")
WRITTEN_BY_RUNS = ("chain/report/",)
"""Paths that look like ours and lie in the output of a run."""


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Language and text of each block of code."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def commands_of(page: str) -> Iterator[str]:
    """Commands in a page's tables and blocks."""
    for cell in re.findall(r"^\| (`polybasic [^|]*)\|", page, re.MULTILINE):
        yield from re.findall(r"`(polybasic [^`]*)`", cell)
    for _, block in blocks_of(page):
        yield from (line for line in block.splitlines() if line.startswith("polybasic "))


COMMANDS = sorted({command for page in PAGES.values() for command in commands_of(page)})


def missing_paths(page: str) -> list[str]:
    return [
        path
        for path in PATH.findall(page)
        if path not in WRITTEN_BY_RUNS and not (ROOT / path).exists()
    ]


def test_the_readme_is_short_and_opens_with_demo_and_test() -> None:
    assert len(README.splitlines()) <= 130
    assert [block.strip() for _, block in blocks_of(README)[:2]] == ["make demo", "make test"]


def test_the_makefile_has_the_named_targets() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    demo = r"^demo:.*\n\t.*polybasic run recipes/smollm2-135m-as-stored\.yaml "
    assert re.search(demo, makefile, re.MULTILINE)
    named = {
        name for page in PAGES.values() for name in re.findall(r"(?:`|^)make (\w+)", page, re.M)
    }
    targets = set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    assert {"demo", "test", "lint"} <= named <= targets
    assert "make test" in (ROOT / ".ci" / "run").read_text("utf-8")


def test_the_table_names_every_command() -> None:
    named = {shlex.split(command)[1] for command in commands_of(README)}
    assert named == set(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str) -> None:
    """Names, options and recipe keys are known; nothing is run."""
    words = [word for word in shlex.split(re.sub(r"\[.*?\]", "", command)) if word != "..."][1:]
    parser = get_command(app)
    while hasattr(parser, "commands"):
        parser = parser.commands[words.pop(0)]
    parser.make_context("polybasic", list(words))
    for word in words:
        key, equals, _ = word.partition("=")
        if equals:
            assert tuple(key.split(".")) in set(known_keys(Recipe)), key


def test_parsing_refuses_what_does_not_exist() -> None:
    with pytest.raises(Exception, match="No such option"):
        test_commands_parse("polybasic run base --surely-unknown")
    with pytest.raises(KeyError):
        test_commands_parse("polybasic surely-unknown")
    with pytest.raises(AssertionError, match=r"train\.unknown"):
        test_commands_parse("polybasic run base train.unknown=1")


@pytest.mark.parametrize("name", PAGES)
def test_links_and_paths_exist(name: str) -> None:
    page = PAGES[name]
    folder = (ROOT / name).parent
    assert [link for link in LINK.findall(page) if not (folder / link).is_file()] == []
    assert missing_paths(page) == []


def test_missing_paths_are_found() -> None:
    assert missing_paths("`chain/no_such.py`, `chain/base/errors.py`") == ["chain/no_such.py"]


def test_named_recipe_keys_exist() -> None:
    keys, sections = set(known_keys(Recipe)), tuple(Recipe.model_fields)
    named = {
        key
        for page in PAGES.values()
        for key in re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_.]+?)(?:=[^`]*)?`", page)
    }
    assert len(named) > 20
    assert [key for key in sorted(named) if tuple(key.split(".")) not in keys] == []


def test_python_blocks_compile_and_import_what_exists() -> None:
    blocks = [block for language, block in blocks_of(README) if language == "python"]
    assert blocks
    for block in blocks:
        code = compile(block, "README.md", "exec")
        assert "load_chain" in code.co_names


def test_constraints_pin_what_the_documents_install() -> None:
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert "torch==2.13.0" in pins
    for page in PAGES.values():
        for package in re.findall(r"[\w-]+==[\d.]+", page):
            assert package in pins
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins if not pin.startswith("#"))


def test_what_is_locked_is_what_is_pinned() -> None:
    """`make lock` was called after the last change of constraints.txt."""
    pins = dict(
        pin.lower().replace("_", "-").split("==")
        for pin in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        if not pin.startswith("#")
    )
    text = (ROOT / "requirements.lock").read_text("utf-8")
    locked = dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE))
    components = json.loads((ROOT / "sbom.json").read_text("utf-8"))["components"]
    listed = {each["name"]: each["version"] for each in components}
    assert {"torch", "transformers", "tokenizers", "jinja2"} <= listed.keys() < locked.keys()
    for found in (locked, listed):
        assert {name: version for name, version in found.items() if name in pins} == {
            name: pins[name] for name in found if name in pins
        }
    for block in re.split(r"\n(?=\w)", text.strip()):
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), block.partition("\n")[0]


def test_the_picture_of_a_round_is_what_its_script_draws(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "docs" / "draw_round.py"))["main"](tmp_path / "round.svg")
    assert (tmp_path / "round.svg").read_bytes() == (ROOT / "docs" / "round.svg").read_bytes()


def test_the_table_of_predicted_speedups_is_computed() -> None:
    table = PAGES["docs/theory.md"].partition("| kept | cost ")[2].partition("\n\n")[0].splitlines()
    costs = [float(cell) for cell in table[0].split("|") if cell.strip()]
    rows = [[float(cell) for cell in row.split("|") if cell.strip()] for row in table[2:]]
    assert len(rows) == 6
    for acceptance, *speedups in rows:
        fixed = {"tokens_per_round": 4, "drafts_per_round": 6, "draft_ratio": 0.054}
        found = [predicted_speedup(cost, acceptance, **fixed).speedup for cost in costs]
        assert [f"{figure:.2f}" for figure in found] == [f"{figure:.2f}" for figure in speedups]
