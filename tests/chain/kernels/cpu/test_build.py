"""What is compiled, when, and under which name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polybasic.chain.base.caching import cache_folder
from polybasic.chain.base.processor import processor_flags
from polybasic.chain.kernels.cpu import build, native
from polybasic.chain.kernels.cpu.compilers import Compiler, find_compiler
from polybasic.chain.kernels.cpu.instruction_sets import InstructionSet
from tests.chain.kernels.cpu.conftest import AVX2_FLAGS
from tests.chain.kernels.cpu.fake_compilers import (
    COPIES,
    LOADABLE,
    cached,
    calls_of,
    fake_compiler,
    num_compiled,
)

pytestmark = pytest.mark.usefixtures("machine")

NATIVE_SET = InstructionSet("native")


def test_a_real_compiler_makes_a_library_that_is_used_again(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("PATH", os.defpath + os.pathsep + "/usr/local/bin")
    compiler = find_compiler()
    if compiler is None or compiler.name == "zig c++":
        pytest.skip("no C++ compiler that is quick at its first run")
    library = native.load_library()
    assert library.answer() == 42
    assert native.load_library() is library
    message = capsys.readouterr().err.splitlines()
    assert message[0] == f"compiling the CPU kernels (native) with {compiler}, once on this machine"
    assert message[-1].startswith("compiled the CPU kernels in ")
    (name,) = cached(tmp_path)
    native._outcome.cache_clear()
    native.load_library()
    assert capsys.readouterr().err == ""
    (tmp_path / "source" / "part.h").write_text("constexpr int kAnswer = 43;\n")
    native._outcome.cache_clear()
    assert native.load_library().answer() == 43
    assert name in cached(tmp_path)
    assert len(cached(tmp_path)) == 2


def test_what_the_library_depends_on_compiles_it_again(
    tmp_path: Path, monkeypatch, processor
) -> None:
    path = fake_compiler(tmp_path / "bin" / "c++")

    def compile_or_find() -> int:
        compiler = find_compiler()
        assert compiler is not None
        assert build.built_library(compiler, NATIVE_SET).is_file()
        return num_compiled(path)

    assert [compile_or_find(), compile_or_find()] == [1, 1]
    (tmp_path / "source" / "notes.txt").write_text("no source")
    assert compile_or_find() == 1
    (tmp_path / "source" / "part.h").write_text("constexpr int kAnswer = 43;\n")
    assert [compile_or_find(), compile_or_find()] == [2, 2]
    monkeypatch.setattr(Compiler, "flags", lambda self, isa: ("-O2",))
    assert [compile_or_find(), compile_or_find()] == [3, 3]
    fake_compiler(path, version="fake 1.2.4")
    assert [compile_or_find(), compile_or_find()] == [4, 4]
    processor("sse avx2")
    assert processor_flags() == {"sse", "avx2"}
    assert [compile_or_find(), compile_or_find()] == [5, 5]


def test_two_processes_may_build_at_once(tmp_path: Path) -> None:
    # each compiler waits until the other one runs
    meets = 'while [ "$(wc -l < "$0.calls")" -lt 2 ]; do sleep 0.05; done'
    path = fake_compiler(tmp_path / "bin" / "c++", f"{meets}\n{COPIES}")
    code = (
        "from pathlib import Path\n"
        "from polybasic.chain.kernels.cpu import build\n"
        "from polybasic.chain.kernels.cpu.compilers import find_compiler\n"
        "from polybasic.chain.kernels.cpu.instruction_sets import InstructionSet\n"
        f"build.SOURCE_FOLDER = Path({str(tmp_path / 'source')!r})\n"
        "print(build.built_library(find_compiler(), InstructionSet('native')))\n"
    )
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate(timeout=600)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert num_compiled(path) == 2
    (library,) = printed
    assert cached(tmp_path) == [Path(library).name]
    assert Path(library).read_bytes() == LOADABLE.read_bytes()


def test_the_cache_folder_is_what_the_environment_names(tmp_path: Path, monkeypatch) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("POLYBASIC_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "polybasic"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "polybasic"


def test_units_are_compiled_at_once_and_linked(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "source" / "other.cpp").touch()
    # each unit waits until the other one is compiled, too
    meets = 'while [ "$(wc -l < "$0.calls")" -lt 2 ]; do sleep 0.05; done'
    path = fake_compiler(tmp_path / "bin" / "c++", f"{meets}\n{COPIES}")
    monkeypatch.setattr(build, "num_cores", lambda: 2)
    compiler = find_compiler()
    assert compiler is not None
    build.built_library(compiler, NATIVE_SET)
    *compiled, linked = calls_of(path)
    assert sorted(call.split("-c ")[1].split()[0] for call in compiled) == [
        str(tmp_path / "source" / name) for name in ("kernels.cpp", "other.cpp")
    ]
    assert [word.rpartition("-")[2] for word in linked.split() if word.endswith(".o")] == [
        "kernels.o",
        "other.o",
    ]
    assert "parts: 2 of 2" in capsys.readouterr().err


def test_machines_that_share_a_folder_share_named_sets_alone(tmp_path: Path, processor) -> None:
    fake_compiler(tmp_path / "bin" / "c++")
    compiler, avx2 = find_compiler(), InstructionSet("avx2", "x86-64-v3", needs=("avx2",))
    assert compiler is not None
    names = {"native": set(), "avx2": set()}
    for flags in (AVX2_FLAGS, f"{AVX2_FLAGS} avx512f"):
        processor(flags)
        names["native"].add(build.built_library(compiler, NATIVE_SET).name)
        names["avx2"].add(build.built_library(compiler, avx2).name)
    assert [len(of_isa) for of_isa in names.values()] == [2, 1]
    assert all(name.startswith(f"{isa}-") for isa, of_isa in names.items() for name in of_isa)
