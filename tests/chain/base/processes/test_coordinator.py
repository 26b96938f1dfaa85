"""What processes tell each other, and how all of them end."""

import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes import group
from polybasic.chain.base.processes.coordinator import Coordinator
from polybasic.chain.base.processes.launching import in_processes
from polybasic.chain.base.processes.place import Place
from polybasic.recipes.cli import main as cli
from tests import forked


def in_threads(function: Callable[[Coordinator, Place], Any], num: int = 3) -> list[Any]:
    """What each of `num` processes returns, all of them threads of this one."""
    store, found = distributed.HashStore(), dict[int, Any]()

    def call(rank: int) -> None:
        place = Place(rank, num)
        found[rank] = function(Coordinator(store, place), place)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank] for rank in range(num)]


def test_all_are_told_what_the_first_one_produces() -> None:
    def tell(coordinator: Coordinator, place: Place) -> list[Any]:
        told = [coordinator.broadcast_from_first(lambda: {"rank": place.rank}) for _ in range(2)]
        if place.rank == 2:
            time.sleep(0.2)
        came = time.monotonic()
        coordinator.wait_for_all()
        return [told, came, time.monotonic(), coordinator.end(0, "")]

    found = in_threads(tell)
    assert [each[0] for each in found] == [[{"rank": 0}] * 2] * 3
    assert min(each[2] for each in found) >= max(each[1] for each in found)
    assert [each[3] for each in found] == [0, 0, 0]


def test_one_line_and_one_exit_code_end_all(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(coordinator: Coordinator, place: Place) -> int:
        return coordinator.end(3 + place.rank, f"failed in {place.rank}")

    codes = in_threads(fail)
    assert len(set(codes)) == 1
    assert capsys.readouterr().err == f"failed in {codes[0] - 3}\n"


def test_who_has_ended_leaves_no_thread_in_the_store() -> None:
    def end(coordinator: Coordinator, place: Place) -> tuple[int, bool]:
        coordinator.watch()
        return coordinator.end(0, ""), coordinator._watcher.is_alive()

    assert in_threads(end) == [(0, False)] * 3


def launched(words: list[list[str]], log: Path, variables: dict[str, str] | None = None) -> Any:
    """Exit codes of the command line in processes, one for each list, as a launcher starts them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    places = [Place(rank, len(words), rank, len(words)) for rank in range(len(words))]
    processes = [
        forked.start(
            cli.main, given, log=log, environment={**where, **place.variables, **(variables or {})}
        )
        for given, place in zip(words, places, strict=True)
    ]
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def test_an_error_of_any_process_ends_all_with_its_line(tmp_path: Path) -> None:
    def said(*words: list[str]) -> list[str]:
        log = tmp_path / "log.txt"
        log.unlink(missing_ok=True)
        assert launched(list(words), log) == [2] * len(words), log.read_text()
        return log.read_text().splitlines()

    command = ["train", "base", "--out", str(tmp_path / "out")]
    (line,) = said(command, [*command, "seed=7"])
    assert line.startswith("error: processes have different recipes: seed: 7 on ")
    assert line.endswith(", seed: 0 in the first process; give all of them the same one")
    (line,) = said(command, ["train", "none"])
    assert line.startswith("error: recipe not found: none; ")
    assert not (tmp_path / "out").exists(), "no process has begun"


def test_a_first_process_that_is_not_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_RENDEZVOUS_TIMEOUT", timedelta(seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UserError, match=rf"cannot open its port: 127\.0\.0\.1 port {port} on "):
            group.join(Place(0, 2))
    with pytest.raises(UserError, match=rf"cannot be reached: 127\.0\.0\.1 port {port} from "):
        group.join(Place(1, 2))


def test_no_two_processes_take_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a host shows each process all GPUs, or one of its own."""
    shown = ["a", "b"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(shown))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=shown[index])
    )
    store = distributed.HashStore()
    for rank in range(2):
        group._take_gpu(Place(rank, 4, rank, 4), store)
    shown[:] = ["c"]
    group._take_gpu(Place(2, 4, 2, 4), store)
    with pytest.raises(UserError, match=r"more processes than GPUs: \S+, GPUs 1; start one "):
        group._take_gpu(Place(3, 4, 3, 4), store)


def work(what: str, folder: Path) -> str:
    with group.process_group() as place:
        if place.rank == 1 and what == "error":
            raise UserError("no such thing", str(folder), "look elsewhere")
        if place.rank == 1 and what == "kill":
            forked.kill_this_process()
        if what == "break":
            raise ZeroDivisionError(f"by process {place.rank}")
        group.wait_for_all()
        total = group.sum_over_processes(torch.tensor(1.0 + place.rank))
        return f"{int(total)} {place.rank} {torch.get_num_threads()} {Path.cwd()}"


def test_processes_that_are_started_give_what_the_first_one_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert in_processes(work, {"what": "", "folder": tmp_path}, 2) == f"3 0 1 {tmp_path}"
    for what, kind, said in (
        ("error", UserError, f"^no such thing: {tmp_path}; look elsewhere$"),
        ("kill", RuntimeError, f"^process 1 ended with {signal.Signals.SIGKILL.name}$"),
        ("break", RuntimeError, r"^process \d broke\n(.*\n)*ZeroDivisionError: by process \d\n$"),
    ):
        with pytest.raises(kind, match=said):
            in_processes(work, {"what": what, "folder": tmp_path}, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(UserError, match=r"more processes than GPUs: 5 on .*, GPUs 4; "):
        in_processes(work, {}, 5)
