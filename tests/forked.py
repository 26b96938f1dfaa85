"""Processes forked from a server that has imported once what takes seconds to import."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from torch import distributed

from polybasic.chain.base.processes.place import Place

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "polybasic.recipes.cli.main",
        "polybasic.recipes.pipeline.run",
        "polybasic.train.run.training",
        "polybasic.train.features.sharded_target",
        "polybasic.quantize.awq",
        "polybasic.deploy.runtime.chain",
        "polybasic.deploy.serve.server",
    ]
)


def start(
    function: Callable[..., Any],
    *arguments: Any,
    log: Path,
    environment: dict[str, str] | None = None,
) -> ForkServerProcess:
    """Call a function of a module in a process of its own.

    Args:
        function: found by its name, so no local one.
        arguments: of the function; they are pickled.
        log: file that gets what the process writes to stdout and stderr.
        environment: variables to set first.

    Returns:
        The process; its exit code is 1 after an error and -n after signal n.
    """
    process = _CONTEXT.Process(target=_call, args=(function, arguments, log, environment or {}))
    process.start()
    return process


def run(function: Callable[..., Any], *arguments: Any, log: Path) -> int:
    """`start`, and the exit code when the process has ended."""
    process = start(function, *arguments, log=log)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def run_two(function: Callable[..., Any], *arguments: Any, log: Path) -> list[int | None]:
    """Call a function in two processes that find each other, and return their exit codes."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    where["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    places = [where | Place(rank, 2, rank, 2).variables for rank in range(2)]
    processes = [
        start(function, *arguments, log=log, environment=environment) for environment in places
    ]
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def kill_this_process(*_: Any, **__: Any) -> None:
    """Take the place of a function at which a process is to be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def _call(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    log: Path,
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(written, 1)
    os.dup2(written, 2)
    function(*arguments)
