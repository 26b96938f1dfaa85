"""Head training in one process or in several, of this machine or more, each with its own GPU."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import disk_errors, read_json, write_json
from polybasic.train.dtypes import settled
from polybasic.train.processes import RENDEZVOUS_FILE, RENDEZVOUS_HOST, is_first_process
from polybasic.train.run.hosts import (
    NOT_SHARED,
    Host,
    check_slots,
    failure_on,
    read_hostfile,
    ssh_command,
)
from polybasic.train.run.interruption import (
    HANDLED_SIGNALS,
    Interrupted,
    ReceivedSignal,
    end_at_once,
    record_signals,
)
from polybasic.train.settings import DataSettings, HeadSettings, LoraSettings

_SETTINGS: dict[str, type[BaseModel]] = {
    "data": DataSettings,
    "settings": HeadSettings,
    "lora": LoraSettings,
}
_PATHS = ("target", "out", "tokenizer", "start", "intermediate")
_SHARED_NAME = ".processes"  # in the output folder, for processes of several machines
_ARGUMENTS_NAME = "arguments.json"
_SUMMARY_NAME = "summary.json"
_NUM_LOCAL = "LOCAL_WORLD_SIZE"
_SAVED_EXIT_CODE = 75  # exit code of a worker that a signal ended and that has saved
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0  # for workers to end after SIGTERM
_LAST_LINES = 20


@dataclass(frozen=True)
class _Place:
    """Of one worker: its number, the machine (None: this one), and its number there."""

    index: int
    host: str | None
    local_index: int
    num_local: int


def train_head_in_processes(
    num_processes: int, hostfile: Path | None = None, **arguments: Any
) -> dict[str, Any]:
    """`train_head` in so many processes; they see the batches that one process would see.

    On a machine without a GPU the processes share the CPU's cores. The first one writes to this
    process's stderr. However this process ends, the others end with it. On SIGINT or SIGTERM to
    this process or to any of them, all save a checkpoint first.

    Args:
        num_processes: at most one for each GPU; with a hostfile, one for each of its slots.
        hostfile: DeepSpeed's file of machines (`polybasic.train.run.hosts`); None: this one.
        arguments: of `train_head`.

    Returns:
        The summary of `train_head`.

    Raises:
        UserError: more processes than GPUs, a hostfile or machine that cannot be used, or what
            `train_head` raises.
        Interrupted: by a signal.
        RuntimeError: a process broke; its last lines are in the message.
    """
    if hostfile is not None:
        hosts = read_hostfile(hostfile)
        check_slots(hosts, num_processes, hostfile)
        places, folders = _places_on(hosts), _shared_folder(arguments["out"])
    elif num_processes > 1:
        _check_gpus(num_processes)
        places = [_Place(index, None, index, num_processes) for index in range(num_processes)]
        folders = _own_folder()
    else:
        from polybasic.train.run.training import train_head

        return train_head(**arguments)
    with folders as folder:
        write_json(folder / _ARGUMENTS_NAME, _as_json(arguments))
        with (
            record_signals(second_ends_at_once=True) as received,
            _workers(places, folder) as workers,
        ):
            _wait(workers, places, folder, received)
        return read_json(folder / _SUMMARY_NAME, "training summary")


def _check_gpus(num_processes: int) -> None:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else None
    if num_gpus is not None and num_processes > num_gpus:
        raise UserError(
            "more processes than GPUs",
            f"train.num_processes = {num_processes}, GPUs {num_gpus}",
            f"set train.num_processes={num_gpus}",
        )


def _places_on(hosts: Sequence[Host]) -> list[_Place]:
    slots = [(host, number) for host in hosts for number in range(host.slots)]
    return [
        _Place(index, host.name, number, host.slots) for index, (host, number) in enumerate(slots)
    ]


@contextmanager
def _own_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="polybasic-train-") as scratch:
        yield Path(scratch)


@contextmanager
def _shared_folder(out: Path) -> Iterator[Path]:
    """Where the processes of several machines meet: all see the output folder."""
    folder = out.absolute() / _SHARED_NAME
    shutil.rmtree(folder, ignore_errors=True)  # a killed launcher leaves it
    with disk_errors(folder):
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _workers(places: Sequence[_Place], folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the workers; those that still run when the block ends are ended."""
    workers: list[subprocess.Popen[bytes]] = []
    with ExitStack() as opened:
        try:
            for place in places:
                log = opened.enter_context(_log(folder, place.index).open("wb"))
                command, environment = _command(place, places, folder)
                worker = subprocess.Popen(
                    command,
                    env={**os.environ, **environment},
                    stdin=subprocess.PIPE,  # held open as long as this process lives
                    bufsize=0,
                    stdout=log,
                    stderr=None if place.index == 0 else log,
                    start_new_session=True,  # so that Ctrl-C comes to this process alone
                )
                workers.append(worker)
            yield workers
        finally:
            _stop(workers)


def _command(
    place: _Place, places: Sequence[_Place], folder: Path
) -> tuple[list[str], dict[str, str]]:
    """The command that starts a worker, and the environment variables for it."""
    arguments = ["-P", "-m", "polybasic.train.run.launch", str(folder)]
    environment = {
        "RANK": str(place.index),
        "LOCAL_RANK": str(place.local_index),
        "WORLD_SIZE": str(len(places)),
        _NUM_LOCAL: str(place.num_local),
        RENDEZVOUS_FILE: str(folder / "rendezvous"),
    }
    if place.host is None:
        return [sys.executable, *arguments], environment
    assert places[0].host is not None
    environment[RENDEZVOUS_HOST] = places[0].host.split("@")[-1]
    return ssh_command(place.host, arguments, environment), {}


def _wait(
    workers: Sequence[subprocess.Popen[bytes]],
    places: Sequence[_Place],
    folder: Path,
    received: ReceivedSignal,
) -> None:
    """Return when all workers are done; forward a received signal to them.

    Raises:
        Interrupted: a signal has ended them.
        UserError: that of a worker, or of its machine.
        RuntimeError: a worker ended in another way.
    """
    is_forwarded = False
    while True:
        if received.number and not is_forwarded:
            is_forwarded = True
            for worker in workers:
                _send_signal(worker, received.number)
        codes = [worker.poll() for worker in workers]
        if any(code not in (None, 0, _SAVED_EXIT_CODE) for code in codes):
            failure = _failure([worker.poll() for worker in workers], folder, places)
            if is_forwarded and not isinstance(failure, UserError):
                end_at_once(received.number, None)  # there was no step whose end could be awaited
            raise failure
        if None not in codes:
            break
        time.sleep(_POLL_SECONDS)
    for path in folder.glob("interrupted-*.json"):
        raise Interrupted(**read_json(path, "end of a process"))


def _send_signal(worker: subprocess.Popen[bytes], signal_number: int) -> None:
    """Forward a signal, also through ssh, unless the worker has already ended."""
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        worker.stdin.write(bytes([signal_number]))


def _failure(codes: Sequence[int | None], folder: Path, places: Sequence[_Place] = ()) -> Exception:
    """The first cause: when one process fails, the others fail soon after.

    A process writes its error before it ends, hence before the others notice.
    """
    for path in sorted(folder.glob("error-*.json")):
        return UserError(**read_json(path, "error of a process"))
    traces = sorted(folder.glob("trace-*.txt"), key=lambda path: path.stat().st_mtime_ns)
    for place, code in zip(places, codes, strict=False):
        if place.host is not None and not traces:
            last_line = "".join(_last_lines(_log(folder, place.index))[-1:])
            if (failure := failure_on(place.host, code, last_line, folder)) is not None:
                return failure
    killed = [index for index, code in enumerate(codes) if code is not None and code < 0]
    if killed or not traces:
        index = killed[0] if killed else next(index for index, code in enumerate(codes) if code)
        source = _log(folder, index)
    else:
        source = traces[0]
        index = int(source.stem.split("-")[1])
    code = codes[index] or 1  # None: it has written its error and is about to end
    ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return RuntimeError(
        "\n".join([f"training process {index} ended with {ending}", *_last_lines(source)])
    )


def _last_lines(path: Path) -> list[str]:
    return path.read_text("utf-8", "replace").strip().splitlines()[-_LAST_LINES:]


def _stop(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.stdin is not None:
            worker.stdin.close()
        worker.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _as_json(arguments: dict[str, Any]) -> dict[str, Any]:
    """Settings as their values, paths as absolute ones; the dtype is settled, once for all."""
    written = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, HeadSettings):
            value = settled(value)
        if isinstance(value, BaseModel):
            written[name] = value.model_dump(mode="json")
        elif isinstance(value, Path):
            written[name] = str(value.absolute())
    return written


def _from_json(written: dict[str, Any]) -> dict[str, Any]:
    arguments = dict(written)
    for name, value in written.items():
        if value is not None and name in _SETTINGS:
            arguments[name] = _SETTINGS[name].model_validate(value)
        elif value is not None and name in _PATHS:
            arguments[name] = Path(value)
    return arguments


def _log(folder: Path, index: int) -> Path:
    return folder / f"log-{index}.txt"


def _run_worker(folder: Path) -> int:
    """Train as one of the workers; returns the exit code."""
    if not (folder / _ARGUMENTS_NAME).is_file():
        return NOT_SHARED
    for number in HANDLED_SIGNALS:
        signal.signal(number, end_at_once)
    threading.Thread(target=_follow_launcher, daemon=True).start()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ[_NUM_LOCAL])))
    index = os.environ["RANK"]
    try:
        from polybasic.train.run.training import train_head

        summary = train_head(**_from_json(read_json(folder / _ARGUMENTS_NAME, "arguments")))
        if is_first_process():
            write_json(folder / _SUMMARY_NAME, summary)
    except UserError as error:
        parts = {"what": error.what, "where": error.where, "do": error.do}
        write_json(folder / f"error-{index}.json", parts)
        return 2
    except Interrupted as interrupted:
        if not interrupted.is_saved:
            return interrupted.exit_code
        write_json(folder / f"interrupted-{index}.json", vars(interrupted))
        return _SAVED_EXIT_CODE
    except Exception:
        (folder / f"trace-{index}.txt").write_text(traceback.format_exc(), "utf-8")
        return 1
    return 0


def _follow_launcher() -> None:
    """Raise in this process the signals that the launcher forwards, and end when it ends.

    The launcher holds the other end of stdin, which closes when it ends.
    """
    while number := os.read(0, 1):
        os.kill(os.getpid(), number[0])
    os._exit(1)


if __name__ == "__main__":
    code = _run_worker(Path(sys.argv[1]))
    if code:
        os._exit(code)  # an orderly end would wait for processes that wait for this one
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
