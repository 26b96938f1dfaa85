"""The README's commands exist, and the first two are the two that everybody needs."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from polybasic.recipes.cli.main import app
from polybasic.recipes.schema.loading import known_keys
from polybasic.recipes.schema.recipe import Recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    *re.findall(r"^\| `(polybasic [^`]*)`", README, re.MULTILINE),
    *(line for _, block in BLOCKS for line in block.splitlines() if line.startswith("polybasic ")),
]


def test_the_first_two_blocks_are_demo_and_test() -> None:
    assert [block.strip() for _, block in BLOCKS[:2]] == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(r"^demo:.*\n\t.*polybasic run recipes/tiny\.yaml$", makefile, re.MULTILINE)
    assert re.search(r"^test:.*\n\t.*-m pytest$", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text("utf-8")


def test_the_table_names_every_command() -> None:
    named = {shlex.split(command)[1] for command in COMMANDS}
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
        test_commands_parse("polybasic run tiny --surely-unknown")
    with pytest.raises(KeyError):
        test_commands_parse("polybasic surely-unknown")
    with pytest.raises(AssertionError, match=r"train\.unknown"):
        test_commands_parse("polybasic run tiny train.unknown=1")


def test_linked_files_exist() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).is_file(), link


def test_python_blocks_compile_and_import_what_exists() -> None:
    blocks = [block for language, block in BLOCKS if language == "python"]
    assert blocks
    for block in blocks:
        code = compile(block, "README.md", "exec")
        assert "load_chain" in code.co_names


def test_constraints_pin_what_the_readme_installs() -> None:
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert "torch==2.13.0" in pins
    for package in re.findall(r"[\w-]+==[\d.]+", README):
        assert package in pins
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins if not pin.startswith("#"))
