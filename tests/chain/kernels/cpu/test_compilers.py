"""Which C++ compiler is taken, and what it is told."""

import sys
from pathlib import Path

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.kernels.cpu.compilers import Compiler, find_compiler
from polybasic.chain.kernels.cpu.instruction_sets import INSTRUCTION_SETS, InstructionSet
from tests.chain.kernels.cpu.fake_compilers import fake_compiler

pytestmark = pytest.mark.usefixtures("machine")

SETS = {isa.name: isa for sets in INSTRUCTION_SETS.values() for isa in sets}


@pytest.mark.usefixtures("no_zig")
def test_the_first_compiler_on_the_path_is_taken(tmp_path: Path) -> None:
    assert find_compiler() is None
    for name in ("clang++", "g++", "c++"):
        path = fake_compiler(tmp_path / "bin" / name)
        found = find_compiler()
        assert found is not None
        assert found.command == (str(path),)
        assert str(found) == f"{name} 1.2.3"
    fake_compiler(tmp_path / "bin" / "c++").write_text("#!/bin/sh\nexit 1\n")
    found = find_compiler()
    assert found is not None
    assert found.name == "g++"


def test_cxx_is_taken_before_the_path(tmp_path: Path, monkeypatch) -> None:
    fake_compiler(tmp_path / "bin" / "c++")
    mine = fake_compiler(tmp_path / "mine", version="Debian clang version 14.0.6 (x)")
    monkeypatch.setenv("CXX", f"{mine} -m64")
    found = find_compiler()
    assert found is not None
    assert found.command == (str(mine), "-m64")
    assert str(found) == "mine 14.0.6"


@pytest.mark.parametrize("value", ["missing-compiler", " ", "'", "/"])
def test_a_cxx_that_cannot_be_run_is_refused(tmp_path: Path, monkeypatch, value: str) -> None:
    fake_compiler(tmp_path / "bin" / "c++")
    monkeypatch.setenv("CXX", value)
    with pytest.raises(UserError, match="CXX"):
        find_compiler()


def test_the_package_ziglang_is_the_last_resort(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "packages" / "ziglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import sys\nassert sys.argv[1:] == ['c++', '--version']\nprint('clang version 22.1.8')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    found = find_compiler()
    assert str(found) == "zig c++ 22.1.8"
    fake_compiler(tmp_path / "bin" / "clang++")
    assert str(find_compiler()) == "clang++ 1.2.3"


@pytest.mark.parametrize(
    ("isa", "architecture", "of_gcc", "of_zig"),
    [
        ("avx2-vnni", "x86_64", "-march=x86-64-v3 -mavxvnni", "-mcpu=x86_64_v3+avxvnni"),
        (
            "avx512-amx",
            "x86_64",
            "-mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8",
            "-mcpu=x86_64_v4+avx512vnni+avx512bf16+amx_tile+amx_bf16+amx_int8",
        ),
        ("neon-dotprod", "aarch64", "-march=armv8.2-a+dotprod", "-mcpu=generic+dotprod"),
    ],
)
def test_compilers_are_told_the_instruction_set_in_their_words(
    processor, isa: str, architecture: str, of_gcc: str, of_zig: str
) -> None:
    processor("", architecture)
    flags = Compiler(("g++",), "g++", "").flags(SETS[isa])
    assert of_gcc in " ".join(flags)
    assert "-ffp-contract=off" in flags
    assert of_zig in Compiler(("zig",), "zig c++", "").flags(SETS[isa])


def test_native_is_all_that_the_processor_has(processor) -> None:
    for architecture, expected in (("x86_64", "-march=native"), ("aarch64", "-mcpu=native")):
        processor("", architecture)
        assert expected in Compiler(("g++",), "g++", "").flags(InstructionSet("native"))
