"""Which kernels are loaded: those that an installation brings, compiled ones, or none."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.kernels.cpu import build, native, openmp
from polybasic.chain.kernels.cpu.unavailable import NativeUnavailable
from polybasic.chain.kernels.environment import kernels_wanted
from tests.chain.kernels.cpu.conftest import AVX2_FLAGS
from tests.chain.kernels.cpu.fake_compilers import (
    FAILS,
    LOADABLE,
    cached,
    calls_of,
    fake_compiler,
    num_compiled,
)

pytestmark = pytest.mark.usefixtures("machine")

AVX512_FLAGS = f"{AVX2_FLAGS} avx512f avx512bw avx512cd avx512dq avx512vl"


def test_without_a_cache_folder_the_library_is_the_process_own(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    path = fake_compiler(tmp_path / "bin" / "c++")
    (tmp_path / "file").touch()
    monkeypatch.setenv("POLYBASIC_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    library = native.native_library()
    assert library is native.native_library()
    assert library is not None
    assert "file" not in Path(library._name).parts
    (warning,) = caplog.messages
    assert "Not a directory" in warning
    assert "POLYBASIC_CACHE" in warning
    assert num_compiled(path) == 1


def test_a_compiler_that_fails_gives_its_first_error_line(tmp_path: Path) -> None:
    path = fake_compiler(tmp_path / "bin" / "c++", FAILS)
    for _ in range(2):
        with pytest.raises(NativeUnavailable) as caught:
            native.load_library()
        assert caught.value.reason == "c++ 1.2.3 failed (kernels.cpp:3:5: error: boom)"
    assert len(calls_of(path)) == 1
    assert cached(tmp_path) == []
    fake_compiler(path, "exit 3")
    native._outcome.cache_clear()
    with pytest.raises(NativeUnavailable, match="exit status 3"):
        native.load_library()


def test_a_library_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    fake_compiler(tmp_path / "bin" / "c++", 'for path; do :; done\necho nonsense > "$path"')
    with pytest.raises(NativeUnavailable, match=r"cannot be loaded .*remove that file"):
        native.load_library()


@pytest.mark.usefixtures("no_zig")
def test_auto_warns_once_and_native_is_an_error(tmp_path: Path, monkeypatch, caplog) -> None:
    assert kernels_wanted() == "auto"
    assert native.native_library() is None
    assert native.native_library() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no C++ compiler found; install g++ or pip install 'polybasic[native]'" in (
        record.getMessage()
    )
    monkeypatch.setenv("POLYBASIC_KERNELS", "native")
    with pytest.raises(UserError, match=r"POLYBASIC_KERNELS=native \(no C\+\+ compiler found\)"):
        native.native_library()
    native._outcome.cache_clear()
    fake_compiler(tmp_path / "bin" / "g++")
    assert native.native_library() is not None
    assert len(caplog.records) == 1


@pytest.mark.parametrize("wanted", ["eager", "device"])
def test_other_kernels_need_no_compiler(tmp_path: Path, wanted: str, monkeypatch, caplog) -> None:
    path = fake_compiler(tmp_path / "bin" / "c++")
    monkeypatch.setenv("POLYBASIC_KERNELS", wanted)
    monkeypatch.setenv("CXX", "missing-compiler")
    assert native.native_library() is None
    assert native.describe_kernels() == f"{wanted} (POLYBASIC_KERNELS={wanted})"
    assert num_compiled(path) == 0
    assert caplog.messages == []


def test_unknown_kernels_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", "fast")
    for asks in (kernels_wanted, native.native_library, native.describe_kernels):
        with pytest.raises(UserError, match="=fast; use auto, native, eager or device"):
            asks()


@pytest.mark.usefixtures("no_zig")
def test_kernels_are_described_without_compiling(tmp_path: Path, monkeypatch, processor) -> None:
    described = "(no C++ compiler found; install g++ or pip install 'polybasic[native]')"
    assert native.describe_kernels() == f"eager {described}"
    monkeypatch.setenv("POLYBASIC_KERNELS", "native")
    assert native.describe_kernels() == f"unavailable {described}"
    monkeypatch.delenv("POLYBASIC_KERNELS")
    path = fake_compiler(tmp_path / "bin" / "g++", FAILS)
    processor("sse")
    slow = "portable: generic vectors, may be slower than transformers"
    assert native.describe_kernels() == f"native (g++ 1.2.3, {slow})"
    processor(f"{AVX2_FLAGS} avx_vnni")
    assert native.describe_kernels() == "native (g++ 1.2.3, avx2-vnni)"
    monkeypatch.setenv("POLYBASIC_ISA", "avx2")
    assert native.describe_kernels() == "native (g++ 1.2.3, POLYBASIC_ISA=avx2)"
    assert num_compiled(path) == 0
    assert native.native_library() is None
    assert native.describe_kernels() == (
        "eager (g++ 1.2.3 failed (kernels.cpp:3:5: error: boom); set CXX to another compiler)"
    )


def test_the_instruction_set_is_that_of_the_kernels_that_run(
    tmp_path: Path, monkeypatch, processor
) -> None:
    fake_compiler(tmp_path / "bin" / "g++")
    processor(f"{AVX2_FLAGS} avx_vnni")
    assert native.instruction_set() == "avx2-vnni"
    monkeypatch.setenv("POLYBASIC_ISA", "avx2")
    assert native.instruction_set() == "avx2"
    monkeypatch.setenv("POLYBASIC_KERNELS", "eager")
    assert native.instruction_set() is None


def test_a_torch_without_openmp_has_no_native_kernels(tmp_path: Path, monkeypatch) -> None:
    path = fake_compiler(tmp_path / "bin" / "c++")
    monkeypatch.setattr(openmp, "_is_runtime_of_torch", lambda runtime: False)
    with pytest.raises(NativeUnavailable, match="torch's OpenMP runtime was not found"):
        native.load_library()
    assert num_compiled(path) == 0
    assert native.describe_kernels().startswith("eager (torch's OpenMP runtime was not found")


def test_the_module_needs_no_torch() -> None:
    code = "import sys, polybasic.chain.kernels.cpu.native\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def prebuilt(tmp_path: Path, *names: str) -> None:
    for name in names:
        path = tmp_path / "prebuilt" / build.prebuilt_name(name)
        path.write_bytes(LOADABLE.read_bytes())


def loaded(tmp_path: Path) -> Path:
    """The file of the library that is loaded now, below the test's folder."""
    native._outcome.cache_clear()
    return Path(native.load_library()._name).relative_to(tmp_path)


@pytest.mark.usefixtures("no_zig")
def test_the_best_prebuilt_library_is_loaded_without_a_compiler(
    tmp_path: Path, monkeypatch, processor
) -> None:
    avx512 = ("avx512", "avx512-vnni", "avx512-bf16", "avx512-amx")
    prebuilt(tmp_path, "portable", "avx2", *avx512, "neon")
    for flags, architecture, expected in (
        ("sse", "x86_64", "portable"),
        (AVX2_FLAGS.replace("fma", ""), "x86_64", "portable"),
        (AVX2_FLAGS, "x86_64", "avx2"),
        (f"{AVX2_FLAGS} avx_vnni", "x86_64", "avx2"),
        (AVX512_FLAGS, "x86_64", "avx512"),
        (f"{AVX512_FLAGS} avx512_vnni", "x86_64", "avx512-vnni"),
        (f"{AVX512_FLAGS} avx512_vnni avx512_bf16 amx_bf16", "x86_64", "avx512-bf16"),
        (
            f"{AVX512_FLAGS} avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8",
            "x86_64",
            "avx512-amx",
        ),
        ("fp asimd", "aarch64", "neon"),
    ):
        processor(flags, architecture)
        assert loaded(tmp_path) == Path("prebuilt") / build.prebuilt_name(expected)
        assert native.describe_kernels().startswith(f"native (prebuilt, {expected}")
    processor(AVX512_FLAGS)
    monkeypatch.setenv("POLYBASIC_ISA", "avx2")
    assert loaded(tmp_path) == Path("prebuilt") / build.prebuilt_name("avx2")


def test_what_is_asked_for_is_compiled(tmp_path: Path, monkeypatch, processor) -> None:
    path = fake_compiler(tmp_path / "bin" / "c++")
    prebuilt(tmp_path, "avx2")
    processor(f"{AVX2_FLAGS} avx_vnni")
    assert loaded(tmp_path).parts[0] == "prebuilt"
    assert num_compiled(path) == 0
    for isa in ("native", "avx2-vnni"):
        monkeypatch.setenv("POLYBASIC_ISA", isa)
        assert loaded(tmp_path).name.startswith(f"{isa}-")
    monkeypatch.delenv("POLYBASIC_ISA")
    monkeypatch.setenv("CXX", str(path))
    assert loaded(tmp_path).name.startswith("native-")
    monkeypatch.delenv("CXX")
    # a library of other sources is none
    (tmp_path / "source" / "part.h").write_text("constexpr int kAnswer = 43;\n")
    assert loaded(tmp_path).name.startswith("native-")
    assert num_compiled(path) == 3


@pytest.mark.parametrize(
    ("isa", "message"),
    [
        ("avx512", "this processor has no avx512f, avx512bw, .*: POLYBASIC_ISA=avx512; use native"),
        ("avx2-vnni", "this processor has no avx_vnni: .*; use native, portable or avx2, or unset"),
        ("neon", "unknown instruction set of x86_64 processors: POLYBASIC_ISA=neon; use native"),
        ("AVX2", "unknown instruction set of x86_64 processors: POLYBASIC_ISA=AVX2; use native"),
    ],
)
def test_an_instruction_set_that_the_processor_lacks_is_refused(
    tmp_path: Path, monkeypatch, processor, isa: str, message: str
) -> None:
    path = fake_compiler(tmp_path / "bin" / "c++")
    prebuilt(tmp_path, "avx512", "avx2-vnni", "neon")
    processor(AVX2_FLAGS)
    monkeypatch.setenv("POLYBASIC_ISA", isa)
    for asks in (native.native_library, native.describe_kernels):
        with pytest.raises(UserError, match=message):
            asks()
    assert calls_of(path) == []
    monkeypatch.setenv("POLYBASIC_ISA", "avx2")
    assert native.native_library() is not None


@pytest.mark.usefixtures("no_zig")
def test_a_processor_that_tells_no_flags_runs_what_needs_none(tmp_path: Path, processor) -> None:
    prebuilt(tmp_path, "portable", "avx2")
    processor("")
    assert loaded(tmp_path) == Path("prebuilt") / build.prebuilt_name("portable")
