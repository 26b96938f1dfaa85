"""A function in several processes of this machine, which torch starts and which form a group."""

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import distributed
from torch.multiprocessing import ProcessExitedException, start_processes

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.logs import LogSettings, log_settings, logging_as
from polybasic.chain.base.processes.coordinator import silent_unless_first
from polybasic.chain.base.processes.interruption import (
    HANDLED_SIGNALS,
    Interrupted,
    end_at_once,
    record_signals,
)
from polybasic.chain.base.processes.place import Place, place_in
from polybasic.chain.base.processor import num_cores

_START_METHOD = "forkserver"
_LOCALHOST = "127.0.0.1"
_POLL_SECONDS = 0.1
_SAVE_SECONDS = 30.0  # for workers to save a checkpoint, when their parent is gone
_END_SECONDS = 5.0  # for those that still run at the end, after SIGTERM


def in_processes(
    function: Callable[..., Any], arguments: Mapping[str, Any], num_processes: int
) -> Any:
    """Call a function in all processes of a group: the launcher's, or so many that are started.

    The first of them writes to this process's output. However this process ends, the others end
    with it. A signal to this process comes to all of them.

    Args:
        function: of a module; its arguments and what it returns are pickled. It joins the group
            by `process_group`.
        arguments: of the function.
        num_processes: to start, at most one for each GPU; 1, or a launcher's processes, start none.

    Returns:
        What the function returns; that of the first process where they are started here.

    Raises:
        UserError: more processes than GPUs, or that of one of them.
        Interrupted: by a signal.
        RuntimeError: a process broke.
    """
    if num_processes == 1 or place_in().world_size > 1:
        return function(**arguments)
    with (
        record_signals(second_ends_at_once=True) as received,
        Workers(function, arguments, num_processes) as workers,
    ):
        is_forwarded = False
        while not workers.wait(_POLL_SECONDS):
            if received.number and not is_forwarded:
                is_forwarded = True
                workers.send(received.number)
        return workers.result


class _Ending(NamedTuple):
    """Of a worker, as it says itself."""

    rank: int
    kind: str  # result, user error, interrupted or traceback
    value: Any


class Workers:
    """Processes that run one function as the ranks of a group.

    A context manager: at its end those that still run are ended. They end with this process, too.
    On GPUs each takes its own; on a CPU they share the cores.

    Args:
        function: as in `in_processes`.
        arguments: of the function.
        world_size: of the group.

    Raises:
        UserError: more processes than GPUs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        world_size: int,
    ) -> None:
        _check_gpus(world_size)
        # of the group, served as long as this lives
        self._store = distributed.TCPStore(_LOCALHOST, 0, is_master=True, wait_for_workers=False)
        self._endings: list[_Ending] = []
        self._told = multiprocessing.get_context(_START_METHOD).SimpleQueue()
        environment = {
            **os.environ,
            "MASTER_ADDR": _LOCALHOST,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank serves one
        }
        self._context = start_processes(
            _work,
            (
                world_size,
                environment,
                log_settings(),
                Path.cwd(),
                function,
                dict(arguments),
                self._told,
            ),
            nprocs=world_size,
            join=False,
            start_method=_START_METHOD,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.send(signal.SIGTERM)
        for process in self._context.processes:
            process.join(_END_SECONDS)
            process.kill()
            process.join()

    def send(self, signal_number: int) -> None:
        """Send a signal to those that still run."""
        for process in self._context.processes:
            if process.is_alive():
                os.kill(process.pid, signal_number)

    def wait(self, seconds: float) -> bool:
        """Wait so long for all of them to end; returns whether they have.

        Raises:
            UserError: that of one of them.
            Interrupted: a signal has ended them.
            RuntimeError: one broke; its traceback or signal is in the message.
        """
        try:
            has_ended: bool = self._context.join(seconds)
        except ProcessExitedException as error:
            self._listen()
            raise self._failure(error) from None
        self._listen()
        for ending in self._endings:
            if ending.kind == "interrupted" and has_ended:
                raise Interrupted(*ending.value)
        return has_ended

    @property
    def result(self) -> Any:
        """What the function returned in the first of them, when all have ended."""
        (found,) = (
            ending.value for ending in self._endings if ending.rank == 0 and ending.kind == "result"
        )
        return found

    def _listen(self) -> None:
        while not self._told.empty():
            self._endings.append(_Ending(*self._told.get()))

    def _failure(self, error: ProcessExitedException) -> BaseException:
        """The first cause: when one process fails, the others fail soon after."""
        said = {ending.kind: ending for ending in reversed(self._endings)}
        if "user error" in said:
            return UserError(*said["user error"].value)
        for rank, process in enumerate(self._context.processes):
            if process.exitcode is not None and process.exitcode < 0:
                ending = signal.Signals(-process.exitcode).name
                return RuntimeError(f"process {rank} ended with {ending}")
        if "interrupted" in said:
            return Interrupted(*said["interrupted"].value)
        if "traceback" in said:
            rank, _, trace = said["traceback"]
            return RuntimeError(f"process {rank} broke\n{trace}")
        return RuntimeError(f"process {error.error_index} ended with exit code {error.exit_code}")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)  # training saves
    time.sleep(_SAVE_SECONDS)
    os._exit(1)


def _check_gpus(num_processes: int) -> None:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else None
    if num_gpus is not None and num_processes > num_gpus:
        raise UserError(
            "more processes than GPUs",
            f"{num_processes} on {socket.gethostname()}, GPUs {num_gpus}",
            "start one process for each GPU",
        )


def _work(
    rank: int,
    world_size: int,
    environment: dict[str, str],
    logs: LogSettings,
    folder: Path,
    function: Callable[..., Any],
    arguments: dict[str, Any],
    told: Any,
) -> None:
    """Be one of the workers."""
    place = Place(rank, world_size, rank, world_size)
    os.environ.update(environment | place.variables)
    os.chdir(folder)
    for number in HANDLED_SIGNALS:
        signal.signal(number, end_at_once)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if "OMP_NUM_THREADS" not in environment:
        torch.set_num_threads(max(1, num_cores() // place.local_world_size))
    code, kind, value = 0, "result", None
    try:
        with logging_as(logs), silent_unless_first(place):
            value = function(**arguments)
    except UserError as error:
        code, kind, value = 2, "user error", (error.what, error.where, error.do)
    except Interrupted as interrupted:
        # all of them have saved, and end: none is to be ended for it
        code = 0 if interrupted.is_saved else interrupted.exit_code
        kind, value = "interrupted", tuple(vars(interrupted).values())
    except Exception:
        code, kind, value = 1, "traceback", traceback.format_exc()
    for number in HANDLED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    told.put((rank, kind, value))
    if code:
        sys.stderr.flush()
        os._exit(code)  # an orderly end would wait for processes that wait for this one
    if distributed.is_initialized():
        distributed.destroy_process_group()
