"""Head training in one process or in several of this machine, each with a GPU of its own."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from polybasic.chain.errors import UserError
from polybasic.chain.files import read_json, write_json
from polybasic.train.processes import MEETING_FILE, is_first_process
from polybasic.train.settings import DataSettings, HeadSettings, LoraSettings

_SETTINGS: dict[str, type[BaseModel]] = {
    "data": DataSettings,
    "settings": HeadSettings,
    "lora": LoraSettings,
}
_PATHS = ("target", "out", "tokenizer", "start")
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0  # for workers that were told to end
_LAST_LINES = 20


def train_head_in_processes(num_processes: int, **arguments: Any) -> dict[str, Any]:
    """`train_head` in so many processes; they see the batches that one process would see.

    On a machine without a GPU the processes share the CPU's cores. What the first one says on
    stderr is passed through. Whatever ends this process ends the others.

    Args:
        num_processes: at most one for each GPU.
        arguments: of `train_head`.

    Returns:
        The summary of `train_head`.

    Raises:
        UserError: more processes than GPUs, or what `train_head` raises.
        RuntimeError: a process broke; its last lines are in the message.
    """
    if num_processes == 1:
        from polybasic.train.head_training import train_head

        return train_head(**arguments)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else None
    if num_gpus is not None and num_processes > num_gpus:
        raise UserError(
            "more processes than GPUs",
            f"train.num_processes = {num_processes}, GPUs {num_gpus}",
            f"set train.num_processes={num_gpus}",
        )
    with tempfile.TemporaryDirectory(prefix="polybasic-train-") as scratch:
        folder = Path(scratch)
        write_json(folder / "arguments.json", _as_json(arguments))
        with _workers(num_processes, folder) as workers:
            _wait(workers, folder)
        return read_json(folder / "summary.json", "training summary")


@contextmanager
def _workers(num_processes: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the workers; those that still run when the block ends are ended."""
    workers: list[subprocess.Popen[bytes]] = []
    num_threads = max(1, (os.cpu_count() or 1) // num_processes)
    with ExitStack() as opened:
        try:
            for index in range(num_processes):
                log = opened.enter_context(_log(folder, index).open("wb"))
                environment = {
                    **os.environ,
                    "RANK": str(index),
                    "LOCAL_RANK": str(index),
                    "WORLD_SIZE": str(num_processes),
                    MEETING_FILE: str(folder / "meeting"),
                }
                environment.setdefault("OMP_NUM_THREADS", str(num_threads))
                worker = subprocess.Popen(
                    [sys.executable, "-P", "-m", "polybasic.train.launch", str(folder)],
                    env=environment,
                    stdin=subprocess.PIPE,  # held open as long as this process lives
                    stdout=log,
                    stderr=None if index == 0 else log,
                    start_new_session=True,  # so that Ctrl-C comes to this process alone
                )
                workers.append(worker)
            yield workers
        finally:
            _end(workers)


def _wait(workers: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Return when all workers are done.

    Raises:
        UserError: that of a worker.
        RuntimeError: a worker ended in another way.
    """
    while True:
        codes = [worker.poll() for worker in workers]
        if any(codes):
            raise _failure([worker.poll() for worker in workers], folder)
        if None not in codes:
            return
        time.sleep(_POLL_SECONDS)


def _failure(codes: list[int | None], folder: Path) -> Exception:
    """The first cause: where one process ends, the others soon break off too.

    What a process tells is written before it ends, hence before the others notice.
    """
    for told in sorted(folder.glob("error-*.json")):
        return UserError(**read_json(told, "error of a process"))
    traces = sorted(folder.glob("trace-*.txt"), key=lambda path: path.stat().st_mtime_ns)
    killed = [index for index, code in enumerate(codes) if code is not None and code < 0]
    if killed or not traces:
        index = killed[0] if killed else next(index for index, code in enumerate(codes) if code)
        source = _log(folder, index)
    else:
        source = traces[0]
        index = int(source.stem.split("-")[1])
    lines = source.read_text("utf-8", "replace").strip().splitlines()[-_LAST_LINES:]
    code = codes[index] or 1  # None: it has told all and is about to end
    ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return RuntimeError("\n".join([f"training process {index} ended with {ending}", *lines]))


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
        if worker.stdin is not None:
            worker.stdin.close()


def _as_json(arguments: dict[str, Any]) -> dict[str, Any]:
    """Settings as their values, paths as absolute ones."""
    written = dict(arguments)
    for name, value in arguments.items():
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


def _work(folder: Path) -> int:
    """What a worker does; returns its exit code."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    index = os.environ["RANK"]
    try:
        from polybasic.train.head_training import train_head

        summary = train_head(**_from_json(read_json(folder / "arguments.json", "arguments")))
        if is_first_process():
            write_json(folder / "summary.json", summary)
    except UserError as error:
        parts = {"what": error.what, "where": error.where, "do": error.do}
        write_json(folder / f"error-{index}.json", parts)
        return 2
    except Exception:
        (folder / f"trace-{index}.txt").write_text(traceback.format_exc(), "utf-8")
        return 1
    return 0


def _end_with_parent() -> None:
    """The parent holds the other end of stdin and writes nothing: it closes with the parent."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    code = _work(Path(sys.argv[1]))
    if code:
        os._exit(code)  # an orderly end would wait for processes that wait for this one
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
