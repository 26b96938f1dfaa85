"""How native kernels are compiled and found. Compilers are scripts here but for one real one."""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from polybasic.chain.errors import UserError
from polybasic.chain.kernels.cpu import build

FORTY_TWO = '#include "part.h"\nextern "C" int answer() { return kAnswer; }\n'
# something that can be loaded, for compilers that compile nothing
LOADABLE = Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"
COPIES = f'for path; do :; done\ncp "{LOADABLE}" "$path"'
FAILS = 'echo "kernels.cpp: In function:"\necho "kernels.cpp:3:5: error: boom" >&2\nexit 1'


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing was loaded or cached yet; PATH, sources and cache are the test's own."""
    for name in ("CXX", "POLYBASIC_KERNELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "kernels.cpp").write_text(FORTY_TWO)
    (tmp_path / "source" / "part.h").write_text("constexpr int kAnswer = 42;\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("POLYBASIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SOURCE_FOLDER", tmp_path / "source")
    build._outcome.cache_clear()
    build._warn_once.cache_clear()
    yield
    build._outcome.cache_clear()
    build._warn_once.cache_clear()


@pytest.fixture
def no_zig(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package ziglang, also where it is installed."""
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)


def fake_compiler(path: Path, body: str = COPIES, version: str = "fake (Test 1.0) 1.2.3") -> Path:
    """A script that prints its version, logs each compilation next to itself and runs `body`."""
    path.write_text(
        "#!/bin/sh\nPATH=/usr/bin:/bin\n"
        f'case " $* " in *" --version "*) echo "{version}"; exit 0;; esac\n'
        f'echo compiled >> "$0.count"\n{body}\n'
    )
    path.chmod(0o755)
    return path


def num_compiled(compiler: Path) -> int:
    count = compiler.with_name(f"{compiler.name}.count")
    return len(count.read_text().splitlines()) if count.exists() else 0


def cached(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "kernels").iterdir())


def library_of(name: str) -> str:
    """File of the library that the process has loaded `name` from."""
    with Path("/proc/self/maps").open() as maps:
        return next(line.split()[-1] for line in maps if name in line)


def test_the_first_compiler_on_the_path_is_taken(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    assert build.find_compiler() is None
    for name in ("clang++", "g++", "c++"):
        path = fake_compiler(tmp_path / "bin" / name)
        found = build.find_compiler()
        assert found is not None
        assert found.command == (str(path),)
        assert str(found) == f"{name} 1.2.3"
    fake_compiler(tmp_path / "bin" / "c++").write_text("#!/bin/sh\nexit 1\n")
    found = build.find_compiler()
    assert found is not None
    assert found.name == "g++"


def test_cxx_is_taken_before_the_path(tmp_path: Path, monkeypatch) -> None:
    fake_compiler(tmp_path / "bin" / "c++")
    mine = fake_compiler(tmp_path / "mine", version="Debian clang version 14.0.6 (x)")
    monkeypatch.setenv("CXX", f"{mine} -m64")
    found = build.find_compiler()
    assert found is not None
    assert found.command == (str(mine), "-m64")
    assert str(found) == "mine 14.0.6"


@pytest.mark.parametrize("value", ["missing-compiler", " ", "'", "/"])
def test_a_cxx_that_cannot_be_run_is_refused(tmp_path: Path, monkeypatch, value: str) -> None:
    fake_compiler(tmp_path / "bin" / "c++")
    monkeypatch.setenv("CXX", value)
    with pytest.raises(UserError, match="CXX"):
        build.find_compiler()


def test_the_package_ziglang_is_the_last_resort(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "packages" / "ziglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import sys\nassert sys.argv[1:] == ['c++', '--version']\nprint('clang version 22.1.8')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    found = build.find_compiler()
    assert str(found) == "zig c++ 22.1.8"
    fake_compiler(tmp_path / "bin" / "clang++")
    assert str(build.find_compiler()) == "clang++ 1.2.3"


def test_a_real_compiler_makes_a_library_that_is_used_again(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("PATH", os.defpath + os.pathsep + "/usr/local/bin")
    compiler = build.find_compiler()
    if compiler is None or compiler.name == "zig c++":
        pytest.skip("no C++ compiler that is quick at its first run")
    library = build.load_library()
    assert library.answer() == 42
    assert build.load_library() is library
    message = capsys.readouterr().err.splitlines()
    assert [line.startswith(f"compiling the CPU kernels with {compiler}") for line in message] == [
        True,
        False,
    ]
    assert message[1].startswith("compiled the CPU kernels in ")
    (name,) = cached(tmp_path)
    build._outcome.cache_clear()
    build.load_library()
    assert capsys.readouterr().err == ""
    (tmp_path / "source" / "part.h").write_text("constexpr int kAnswer = 43;\n")
    build._outcome.cache_clear()
    assert build.load_library().answer() == 43
    assert name in cached(tmp_path)
    assert len(cached(tmp_path)) == 2


def test_what_the_library_depends_on_compiles_it_again(tmp_path: Path, monkeypatch) -> None:
    path = fake_compiler(tmp_path / "bin" / "c++")

    def compile_or_find() -> int:
        compiler = build.find_compiler()
        assert compiler is not None
        assert build.built_library(compiler).is_file()
        return num_compiled(path)

    assert [compile_or_find(), compile_or_find()] == [1, 1]
    (tmp_path / "source" / "notes.txt").write_text("no source")
    assert compile_or_find() == 1
    (tmp_path / "source" / "part.h").write_text("constexpr int kAnswer = 43;\n")
    assert [compile_or_find(), compile_or_find()] == [2, 2]
    monkeypatch.setattr(build, "compiler_flags", lambda: ("-O2",))
    assert [compile_or_find(), compile_or_find()] == [3, 3]
    fake_compiler(path, version="fake 1.2.4")
    assert [compile_or_find(), compile_or_find()] == [4, 4]
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: sse avx2\n")
    monkeypatch.setattr(build, "_CPU_INFO", tmp_path / "cpuinfo")
    assert build.processor_flags() == {"sse", "avx2"}
    assert [compile_or_find(), compile_or_find()] == [5, 5]


def test_two_processes_may_build_at_once(tmp_path: Path) -> None:
    # each compiler waits until the other one runs
    meets = 'while [ "$(wc -l < "$0.count")" -lt 2 ]; do sleep 0.05; done'
    path = fake_compiler(tmp_path / "bin" / "c++", f"{meets}\n{COPIES}")
    code = (
        "from pathlib import Path\n"
        "from polybasic.chain.kernels.cpu import build\n"
        f"build.SOURCE_FOLDER = Path({str(tmp_path / 'source')!r})\n"
        "print(build.built_library(build.find_compiler()))\n"
    )
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {one.communicate(timeout=600)[0].strip() for one in running}
    assert [one.returncode for one in running] == [0, 0]
    assert num_compiled(path) == 2
    (library,) = printed
    assert cached(tmp_path) == [Path(library).name]
    assert Path(library).read_bytes() == LOADABLE.read_bytes()


def test_the_cache_folder_is_what_the_environment_names(tmp_path: Path, monkeypatch) -> None:
    assert build.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("POLYBASIC_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.cache_folder() == tmp_path / "home" / ".cache" / "polybasic"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_folder() == tmp_path / "xdg" / "polybasic"


def test_without_a_cache_folder_the_library_is_the_process_own(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    path = fake_compiler(tmp_path / "bin" / "c++")
    (tmp_path / "file").touch()
    monkeypatch.setenv("POLYBASIC_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    library = build.native_library()
    assert library is build.native_library()
    assert library is not None
    assert "file" not in Path(library._name).parts
    (warning,) = caplog.messages
    assert "Not a directory" in warning
    assert "POLYBASIC_CACHE" in warning
    assert num_compiled(path) == 1


def test_a_compiler_that_fails_gives_its_first_error_line(tmp_path: Path) -> None:
    path = fake_compiler(tmp_path / "bin" / "c++", FAILS)
    for _ in range(2):
        with pytest.raises(build.NativeUnavailable) as caught:
            build.load_library()
        assert caught.value.reason == "c++ 1.2.3 failed (kernels.cpp:3:5: error: boom)"
    assert num_compiled(path) == 1
    assert cached(tmp_path) == []
    fake_compiler(path, "exit 3")
    build._outcome.cache_clear()
    with pytest.raises(build.NativeUnavailable, match="exit status 3"):
        build.load_library()


def test_a_library_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    fake_compiler(tmp_path / "bin" / "c++", 'for path; do :; done\necho nonsense > "$path"')
    with pytest.raises(build.NativeUnavailable, match=r"cannot be loaded .*remove that file"):
        build.load_library()


@pytest.mark.usefixtures("no_zig")
def test_auto_warns_once_and_native_is_an_error(tmp_path: Path, monkeypatch, caplog) -> None:
    assert build.kernels_wanted() == "auto"
    assert build.native_library() is None
    assert build.native_library() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no C++ compiler found; install g++ or pip install 'polybasic[native]'" in (
        record.getMessage()
    )
    monkeypatch.setenv("POLYBASIC_KERNELS", "native")
    with pytest.raises(UserError, match=r"POLYBASIC_KERNELS=native \(no C\+\+ compiler found\)"):
        build.native_library()
    build._outcome.cache_clear()
    fake_compiler(tmp_path / "bin" / "g++")
    assert build.native_library() is not None
    assert len(caplog.records) == 1


@pytest.mark.parametrize("wanted", ["eager", "device"])
def test_other_kernels_need_no_compiler(tmp_path: Path, wanted: str, monkeypatch, caplog) -> None:
    path = fake_compiler(tmp_path / "bin" / "c++")
    monkeypatch.setenv("POLYBASIC_KERNELS", wanted)
    monkeypatch.setenv("CXX", "missing-compiler")
    assert build.native_library() is None
    assert build.describe_kernels() == f"{wanted} (POLYBASIC_KERNELS={wanted})"
    assert num_compiled(path) == 0
    assert caplog.messages == []


def test_unknown_kernels_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", "fast")
    for asks in (build.kernels_wanted, build.native_library, build.describe_kernels):
        with pytest.raises(UserError, match="=fast; use auto, native, eager or device"):
            asks()


@pytest.mark.usefixtures("no_zig")
def test_kernels_are_described_without_compiling(tmp_path: Path, monkeypatch) -> None:
    described = "(no C++ compiler found; install g++ or pip install 'polybasic[native]')"
    assert build.describe_kernels() == f"eager {described}"
    monkeypatch.setenv("POLYBASIC_KERNELS", "native")
    assert build.describe_kernels() == f"unavailable {described}"
    monkeypatch.delenv("POLYBASIC_KERNELS")
    path = fake_compiler(tmp_path / "bin" / "g++", FAILS)
    monkeypatch.setattr(build, "_CPU_INFO", tmp_path / "cpuinfo")
    assert build.describe_kernels() == "native (g++ 1.2.3, portable)"
    (tmp_path / "cpuinfo").write_text("flags : avx512_vnni sse avx512_bf16\n")
    assert build.describe_kernels() == "native (g++ 1.2.3, avx512_bf16, avx512_vnni)"
    assert num_compiled(path) == 0
    assert build.native_library() is None
    assert build.describe_kernels() == (
        "eager (g++ 1.2.3 failed (kernels.cpp:3:5: error: boom); set CXX to another compiler)"
    )


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def threads_of_a_region(parallel: int, thread_num: int, num_threads: int) -> dict[int, int]:
    """Run GOMP_parallel with three threads: operating system's thread id -> OpenMP's number."""
    number = ctypes.CFUNCTYPE(ctypes.c_int)(thread_num)
    count = ctypes.CFUNCTYPE(ctypes.c_int)(num_threads)
    region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    ran: dict[int, int] = {}

    @region
    def note(_: int | None) -> None:
        assert count() == 3
        ran[threading.get_native_id()] = number()

    ctypes.CFUNCTYPE(None, region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(parallel)(
        note, None, 3, 0
    )
    return ran


def threads_of_the_process() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.usefixtures("three_threads")
def test_the_openmp_functions_run_torchs_own_threads(tmp_path: Path) -> None:
    torch.ones(1 << 20).add_(1)  # torch starts its threads
    before = threads_of_the_process()
    ran = threads_of_a_region(*build.openmp_functions())
    assert sorted(ran.values()) == [0, 1, 2]
    assert ran[threading.get_native_id()] == 0
    assert set(ran) <= before
    assert torch.get_num_threads() == 3

    # a second copy of the same runtime has threads of its own, and is distinguished
    copy = tmp_path / "other-openmp.so"
    shutil.copy(library_of("libgomp"), copy)
    other = ctypes.CDLL(str(copy))
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    addresses = [build._address(other, name) for name in names]
    ran_by_other = threads_of_a_region(*addresses)
    assert sorted(ran_by_other.values()) == [0, 1, 2]
    assert set(ran_by_other) & before == {threading.get_native_id()}
    assert not build._is_runtime_of_torch(other)
    assert build._is_runtime_of_torch(ctypes.CDLL(torch._C.__file__))


def test_a_torch_without_openmp_has_no_native_kernels(tmp_path: Path, monkeypatch) -> None:
    path = fake_compiler(tmp_path / "bin" / "c++")
    monkeypatch.setattr(build, "_is_runtime_of_torch", lambda runtime: False)
    with pytest.raises(build.NativeUnavailable, match="torch's OpenMP runtime was not found"):
        build.load_library()
    assert num_compiled(path) == 0
    assert build.describe_kernels().startswith("eager (torch's OpenMP runtime was not found")


def test_the_module_needs_no_torch() -> None:
    code = "import sys, polybasic.chain.kernels.cpu.build\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
