"""Programs that are run apart: what they may, and what they may not."""

import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.deploy.bench.judging import sandbox
from polybasic.deploy.bench.judging.sandbox import check_sandbox, passes


def _is_allowed() -> bool:
    unshare = shutil.which("unshare")
    command = [unshare, "--user", "--map-root-user", "--net", "--pid", "--fork", "true"]
    return unshare is not None and subprocess.run(command, check=False).returncode == 0  # type: ignore[arg-type]


needs_namespaces = pytest.mark.skipif(not _is_allowed(), reason="users get no namespaces here")


@needs_namespaces
@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("assert sum([1, 2]) == 3", True),
        ("import os; assert os.listdir() == []; open('a', 'w').write('x' * 1000)", True),
        ("assert sum([1, 2]) == 4", False),
        ("def f(:", False),
        ("import sys; sys.exit(0)", False),
        ("import os; os._exit(0)", False),
        ("bytearray(600 << 20)", False),
        ("open('a', 'wb').write(bytes(2 << 20))", False),
        ("for _ in range(100000): print('x' * 1000)", False),
        ("import os; assert not {'HOME', 'PATH'} & set(os.environ)", True),
    ],
)
def test_programs_run_to_their_end_or_not(program: str, passed: bool) -> None:
    assert passes(program) is passed


@needs_namespaces
def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 1).close()
        assert not passes(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")


@needs_namespaces
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', '__import__(\"time\").sleep(61.25)'],"
        " start_new_session=True)\ntime.sleep(60)",
    ],
)
def test_nothing_outlives_its_time(program: str) -> None:
    began = time.monotonic()
    assert not passes(program)
    assert time.monotonic() - began < 3 * sandbox.SECONDS
    while _is_running(b"sleep(61.25)"):  # the kernel kills the rest in its own time
        assert time.monotonic() - began < 10 * sandbox.SECONDS


def _is_running(command: bytes) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            if command in path.read_bytes():
                return True
    return False


def test_a_machine_that_runs_nothing_apart_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not passes("")
    with pytest.raises(UserError, match="programs cannot be run apart here"):
        check_sandbox()
