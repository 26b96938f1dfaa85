"""A full device, too little memory, no right, a locale without UTF-8: one line, exit code 2."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from polybasic.recipes.cli.shared.lacking import what_is_lacking

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def command(
    *arguments: object,
    limit: Callable[[], object] | None = None,
    out: str | None = None,
    **env: str,
) -> subprocess.CompletedProcess[bytes]:
    run = [sys.executable, "-m", "polybasic.recipes.cli.main", *map(str, arguments)]
    with Path(out or os.devnull).open("wb") as written:
        return subprocess.run(
            run,
            stdout=subprocess.PIPE if out is None else written,
            stderr=subprocess.PIPE,
            env=os.environ | env,
            preexec_fn=limit,
            check=False,
        )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
def test_a_full_device_is_one_line() -> None:
    for arguments in (["recipes", "ls"], ["recipes", "show", "base"]):
        ran = command(*arguments, out="/dev/full")
        assert ran.returncode == 2
        [line] = ran.stderr.decode().splitlines()
        assert line.startswith("error: disk full: standard output (")


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux")
def test_too_little_memory_is_one_line(micro_recipe: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20))

    ran = command("run", micro_recipe, "--dry-run", limit=limit)
    assert ran.returncode == 2
    assert ran.stderr.decode().splitlines()[-1].startswith("error: out of memory: ")


def test_a_locale_without_utf8_loses_nothing(tiny_chain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "Straße"
    tiny_chain.rename(folder)
    ran = command("inspect", folder, **C_LOCALE)
    assert ran.returncode == 0, ran.stderr
    assert b"Traceback" not in ran.stderr
    ran = command("inspect", tmp_path / "東京", **C_LOCALE)
    assert ran.returncode == 2
    assert ran.stderr.startswith(b"error: checkpoint not found: ")


def test_the_words_of_libraries_are_known() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(1 << 60)
    told = [
        MemoryError(),
        failed.value,
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ]
    assert all(str(what_is_lacking(error)).startswith("out of memory: ") for error in told)
    full = OSError(errno.ENOSPC, "No space left on device", "/a/file")
    assert str(what_is_lacking(full)).startswith("disk full: /a/file (")
    none = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    assert str(what_is_lacking(none)).startswith("no temporary folder: ")
    shut = PermissionError(errno.EACCES, "Permission denied", "/a/chain.json")
    line = f"no permission: /a/chain.json (Permission denied); give user {os.geteuid()}, who runs"
    assert str(what_is_lacking(shut)).startswith(line)
    others: list[Exception] = [PermissionError(errno.EPERM, "Operation not permitted")]
    others += [ValueError("no memory of it"), OSError(errno.EIO, "Input/output error"), KeyError()]
    assert [what_is_lacking(error) for error in others] == [None] * 4
