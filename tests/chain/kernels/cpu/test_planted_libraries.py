"""Libraries that lie in the cache and that this user did not compile are never loaded."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from polybasic.chain.base.caching import private_folder
from polybasic.chain.kernels.cpu import build, compilers, native
from polybasic.chain.kernels.cpu.compilers import find_compiler
from polybasic.chain.kernels.cpu.instruction_sets import InstructionSet
from polybasic.chain.kernels.cpu.unavailable import NativeUnavailable
from tests.chain.kernels.cpu.fake_compilers import LOADABLE, cached, fake_compiler, num_compiled

pytestmark = pytest.mark.usefixtures("machine")

STRANGER = 54321
"""A user id that is not this process's own."""


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A compiler whose library was used once, and lies in the cache."""
    path = fake_compiler(tmp_path / "bin" / "c++")
    assert loadable().name == cached(tmp_path)[0]
    assert num_compiled(path) == 1
    return path


def loadable() -> Path:
    """The file that a process would load now."""
    compiler = find_compiler()
    assert compiler is not None
    return build.built_library(compiler, InstructionSet("native"))


def in_cache(tmp_path: Path) -> Path:
    (name,) = cached(tmp_path)
    return tmp_path / "cache" / "kernels" / name


def write_for_all(tmp_path: Path) -> None:
    in_cache(tmp_path).chmod(0o666)


def write_in_folder(tmp_path: Path) -> None:
    (tmp_path / "cache" / "kernels").chmod(0o777)


def write_in_group(tmp_path: Path) -> None:
    (tmp_path / "cache").chmod(0o775)


def replace_by_link(tmp_path: Path) -> None:
    planted = tmp_path / "planted.so"
    planted.write_bytes(LOADABLE.read_bytes())
    library = in_cache(tmp_path)
    library.unlink()
    library.symlink_to(planted)


def sticky_folder(tmp_path: Path) -> None:
    """As /tmp is: whoever comes first could have planted a library under the right name."""
    (tmp_path / "cache" / "kernels").chmod(0o1777)


PLANTED = [write_for_all, write_in_folder, write_in_group, replace_by_link, sticky_folder]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_what_others_could_have_written_is_compiled_again(
    tmp_path: Path, compiler: Path, plant: Callable[[Path], None], caplog
) -> None:
    assert loadable().is_relative_to(tmp_path)
    assert num_compiled(compiler) == 1
    plant(tmp_path)
    library = loadable()
    assert num_compiled(compiler) == 2
    build.check_private(library)
    (warning,) = caplog.messages
    assert "compiled again" in warning


def test_folders_above_may_be_open_where_nobody_else_comes() -> None:
    with tempfile.TemporaryDirectory() as top:
        home, group = Path(top) / "home", Path(top) / "home" / "group"
        group.mkdir(parents=True)
        group.chmod(0o775)
        for mode, is_refused in ((0o700, False), (0o755, True), (0o711, True)):
            Path(top).chmod(0o755)
            home.chmod(mode)
            if is_refused:
                with pytest.raises(PermissionError, match=r"others can write .*group"):
                    private_folder(group / "cache")
            else:
                assert private_folder(group / "cache") == (group / "cache").resolve()
        home.chmod(0o700)
        (group / "cache").chmod(0o775)
        with pytest.raises(PermissionError, match=r"others can write .*cache"):
            private_folder(group / "cache")


@pytest.mark.skipif(os.geteuid() != 0, reason="files are given away by root alone")
@pytest.mark.parametrize("given", ["cache", "cache/kernels", "library"])
def test_a_library_of_another_user_is_not_loaded(
    tmp_path: Path, compiler: Path, given: str, caplog
) -> None:
    place = in_cache(tmp_path) if given == "library" else tmp_path / given
    os.chown(place, STRANGER, -1)
    build.check_private(loadable())
    assert num_compiled(compiler) == 2
    assert "belongs to another user" in caplog.text


@pytest.mark.parametrize("num_bytes", [0, 100, -1])
def test_a_truncated_library_is_not_loaded(
    tmp_path: Path, compiler: Path, num_bytes: int, caplog
) -> None:
    library = in_cache(tmp_path)
    whole = library.read_bytes()
    library.write_bytes(whole[:num_bytes])
    assert loadable() == library
    assert library.read_bytes() == whole
    assert num_compiled(compiler) == 2
    assert "it is damaged" in caplog.text


def test_an_open_umask_makes_no_open_cache(tmp_path: Path) -> None:
    path = fake_compiler(tmp_path / "bin" / "c++")
    before = os.umask(0)
    try:
        assert loadable() == in_cache(tmp_path)
        assert loadable() == in_cache(tmp_path)
    finally:
        os.umask(before)
    assert num_compiled(path) == 1


def test_a_compiler_that_hangs_is_given_up(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(build, "_COMPILE_SECONDS", 0.2)
    fake_compiler(tmp_path / "bin" / "c++", "exec sleep 600")
    with pytest.raises(NativeUnavailable, match=r"c\+\+ 1.2.3 failed \(not done after 0.2 s\)"):
        native.load_library()


@pytest.mark.usefixtures("no_zig")
def test_a_compiler_without_a_version_is_none(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(compilers, "_VERSION_SECONDS", 0.2)
    path = tmp_path / "bin" / "c++"
    path.write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    path.chmod(0o755)
    assert find_compiler() is None


def test_without_any_folder_there_are_no_kernels(tmp_path: Path, monkeypatch) -> None:
    fake_compiler(tmp_path / "bin" / "c++")
    (tmp_path / "file").touch()
    monkeypatch.setenv("POLYBASIC_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(NativeUnavailable, match="no folder to compile them in"):
        native.load_library()
