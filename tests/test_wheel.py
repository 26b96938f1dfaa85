"""The wheel holds what the tree holds: a folder without __init__.py would be missing."""

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.tags import mac_platforms

from polybasic.chain.kernels.cpu.build import prebuilt_name
from polybasic.chain.kernels.cpu.instruction_sets import INSTRUCTION_SETS

ROOT = Path(__file__).parent.parent
PACKAGES = ("chain", "train", "quantize", "deploy", "recipes")
OWN = ("__init__.py", "__main__.py", "py.typed")
SUFFIXES = {".py", ".yaml", ".h", ".cpp", ".html", ".js", ".css", ".svg", ".txt", ".gz", ".json"}
SUFFIXES |= {".safetensors"}
OF_KERNELS = ROOT / ".ci" / "wheels.py"
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


@pytest.mark.parametrize("name", ["macos-arm64", "macos-x86_64"])
def test_pip_on_a_mac_takes_its_wheel(name: str) -> None:
    platform = runpy.run_path(str(OF_KERNELS))["PLATFORMS"][name]
    assert platform.architecture in INSTRUCTION_SETS
    assert platform.tag in mac_platforms((14, 0), name.removeprefix("macos-"))


def test_an_unknown_platform_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, OF_KERNELS, tmp_path, "macos-arm64", "aarch64"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr == (
        "error: unknown platform: aarch64; "
        "use linux-x86_64, linux-aarch64, macos-arm64, macos-x86_64\n"
    )


def load_commands(library: bytes) -> list[tuple[int, bytes]]:
    """Number and content of each load command of a Mach-O file of 64 bits."""
    found, place = [], 32
    for _ in range(int.from_bytes(library[16:20], "little")):
        number, size = (int.from_bytes(library[at : at + 4], "little") for at in (place, place + 4))
        found.append((number, library[place + 8 : place + size]))
        place += size
    return found


@pytest.mark.proof
def test_a_wheel_for_macs_needs_nothing_but_macos(tmp_path: Path) -> None:
    name, isa, processor = "macos-arm64", "neon-bf16", 0x0100000C
    make = ["make", ".venv-wheels/.installed", f"PYTHON={sys.executable}"]
    subprocess.run(make, cwd=ROOT, check=True)
    subprocess.run(
        [ROOT / ".venv-wheels" / "bin" / "python", OF_KERNELS, tmp_path, name],
        env=os.environ | {"POLYBASIC_ISA": isa},
        check=True,
    )
    [wheel] = tmp_path.iterdir()
    assert wheel.name.endswith(f"-py3-none-macosx_11_0_{name.removeprefix('macos-')}.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        [inside] = [member for member in names if member.endswith(".so")]
        library = packed.read(inside)
    assert package_names(names) == tree_names(ROOT) | {inside}
    assert inside == f"polybasic/chain/kernels/cpu/prebuilt/{prebuilt_name(isa)}"
    assert library[:8] == bytes.fromhex("cffaedfe") + processor.to_bytes(4, "little")
    commands = load_commands(library)
    dylibs = [content[16:].rstrip(b"\0") for number, content in commands if number == 0x0C]
    assert dylibs == [b"/usr/lib/libSystem.B.dylib"]
    assert 0x1D in dict(commands), "a signature, without which it is not loaded"


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
