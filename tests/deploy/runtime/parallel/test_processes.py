"""Chains that are divided over real processes: how these begin, fail and end."""

import datetime
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.chain.base.errors import LostProcessError, UserError
from polybasic.deploy import load_chain
from polybasic.deploy.runtime.parallel import group, processes
from polybasic.deploy.runtime.parallel.group import Order
from tests.deploy.runtime.parallel.following import write_divisible_chain

pytestmark = pytest.mark.proof

COMMAND = [sys.executable, "-m", "polybasic.recipes.cli.main"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_divisible_chain(tmp_path_factory.mktemp("divisible"))


def started_by(parent: int) -> list[int]:
    """Followers among the children of a process."""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(parent)], capture_output=True, text=True
    )
    lines = [line.split(maxsplit=1) for line in listed.stdout.splitlines()]
    return [int(pid) for pid, command in lines if "parallel.follower" in command]


def have_ended(pids: list[int], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_a_stuck_process_ends_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(group, "TIMEOUT", datetime.timedelta(seconds=1))
    monkeypatch.setattr(group, "_GRACE_SECONDS", 10.0)  # rank 1 may be slow beside other tests
    monkeypatch.setattr(processes, "_END_SECONDS", 0.2)
    found, followers = processes.gathered(3, torch.device("cpu"))
    assert followers is not None
    absent: list[Order] = [["load", str(tmp_path), [], None, "float32", 1, False, 0]]
    found.send(absent)
    with pytest.raises(UserError, match="rank 1 of 3"):
        found.agree(None)  # once all have joined: they may still be connecting to one another
    pids = started_by(os.getpid())
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(LostProcessError, match=r"^rank 2 of 3 has ended or does not answer \(Time"):
        found.all_reduce(torch.ones(1))
    with pytest.raises(LostProcessError, match="load it again"):
        found.send([["end"]])
    followers.close()
    assert have_ended(pids)


def test_others_end_with_a_killed_first_process() -> None:
    begin = "import time, torch; from polybasic.deploy.runtime.parallel.processes import gathered; "
    begin += "found = gathered(2, torch.device('cpu')); print('here', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", begin], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    pids = started_by(process.pid)
    assert len(pids) == 1
    process.kill()
    process.wait()
    assert have_ended(pids)


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server over two processes, and its address."""
    command = [*COMMAND, "serve", str(folder), "--tensor-parallel", "2", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "listening at" in line:
            break
    yield process, line.split()[2].rstrip(";")
    process.kill()
    process.wait()


def ask(address: str) -> int:
    body = json.dumps({"model": "tiny", "prompt": "w5 w9", "max_tokens": 4}).encode()
    request = urllib.request.Request(
        f"{address}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_server_ends_with_one_line_when_a_process_is_lost(
    server: tuple[subprocess.Popen[str], str],
) -> None:
    process, address = server
    assert ask(address) == 200
    (pid,) = started_by(process.pid)
    os.kill(pid, signal.SIGKILL)
    assert ask(address) == 500
    _, said = process.communicate(timeout=20)
    assert process.returncode == 1
    (failed,) = [line for line in said.splitlines() if "rank 1" in line]
    assert failed.startswith("failed: rank 1 of 2 has ended")
    assert "Traceback" not in said


def generate(folder: Path, *launcher: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "polybasic.recipes.cli.main", "generate", str(folder), "-p", "w5 w9 w2"]
    command += ["--max-new-tokens", "8", "--dtype", "float32", "--no-stream"]
    return subprocess.run(
        [*launcher, *command],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=60,
    )


def test_processes_of_a_launcher(folder: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "digests": False}
    text = load_chain(folder, **options).generate("w5 w9 w2", max_new_tokens=8).text
    found = generate(folder, *TORCHRUN, "2")
    assert (found.returncode, found.stdout.strip()) == (0, text.strip()), found.stderr
