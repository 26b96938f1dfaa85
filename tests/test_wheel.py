"""The wheel holds what the tree holds: a folder without __init__.py would be missing."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("chain", "train", "quantize", "deploy", "recipes")
OWN = ("__init__.py", "__main__.py", "py.typed")
SUFFIXES = {".py", ".yaml", ".h", ".cpp", ".html", ".js", ".css", ".svg", ".txt", ".gz", ".json"}
SUFFIXES |= {".safetensors"}
BUILD = "import setuptools.build_meta as build; print(build.build_wheel('dist'))"


def copy_of_the_tree(folder: Path) -> Path:
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in (*OWN, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def wheel_names(folder: Path) -> set[str]:
    built = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    [wheel] = (folder / "dist").glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def tree_names(folder: Path) -> set[str]:
    return {f"polybasic/{name}" for name in OWN} | {
        f"polybasic/{path.relative_to(folder)}"
        for name in PACKAGES
        for path in (folder / name).rglob("*")
        if path.suffix in SUFFIXES
        # what deploys a server is not installed with it
        and path.parent != folder / "deploy" / "images"
    }


def package_names(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("polybasic/")}


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> set[str]:
    return wheel_names(copy_of_the_tree(tmp_path_factory.mktemp("wheel")))


def test_the_wheel_holds_the_tree(names: set[str]) -> None:
    assert package_names(names) == tree_names(ROOT)


def test_licence_and_command_are_in_the_wheel(names: set[str]) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("entry_points.txt") for name in names)


def test_a_folder_that_is_no_package_is_noticed(tmp_path: Path) -> None:
    folder = copy_of_the_tree(tmp_path)
    (folder / "chain" / "forgotten").mkdir()
    (folder / "chain" / "forgotten" / "module.py").write_text("")
    assert tree_names(folder) - package_names(wheel_names(folder)) == {
        "polybasic/chain/forgotten/module.py"
    }


@pytest.mark.proof
def test_types_are_seen_from_outside(tmp_path: Path) -> None:
    """mypy reads annotations of an installed package only where it says so with py.typed."""
    names = wheel_names(copy_of_the_tree(tmp_path))
    assert "polybasic/py.typed" in names
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    [packages] = (tmp_path / "venv").glob("lib/python*/site-packages")
    [wheel] = (tmp_path / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    script = tmp_path / "outside" / "script.py"
    script.parent.mkdir()
    script.write_text(
        "import polybasic\n"
        "answer = polybasic.load_chain('chain').generate('w5', max_tokens=4)\n"
        "reveal_type(answer.text)\n"
        "reveal_type(polybasic.__version__)\n"
    )

    def said() -> str:
        command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--no-incremental"]
        command += ["--python-executable", tmp_path / "venv/bin/python"]
        return subprocess.run(
            [*command, script.name], cwd=script.parent, env={}, capture_output=True, text=True
        ).stdout

    assert said().count('Revealed type is "str"') == 2, said()
    (packages / "polybasic" / "py.typed").unlink()
    assert 'Revealed type is "Any"' in said()
