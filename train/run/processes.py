"""The processes that train together and share each batch: of this machine, or of several."""

import datetime
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, distributed

from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import read_json, write_json

MEETING_FILE = "POLYBASIC_MEETING_FILE"
"""Environment variable of a worker: the file through which the processes find each other."""

MEETING_HOST = "POLYBASIC_MEETING_HOST"
"""Environment variable of a worker among several machines: the first process's machine."""

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
_ON_ONE_MACHINE = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
# the first process loads and evaluates for minutes while the others wait
_PATIENCE = datetime.timedelta(hours=6)
_MEETING_PATIENCE = datetime.timedelta(minutes=10)
_POLL_SECONDS = 0.05


@contextmanager
def process_group() -> Iterator[None]:
    """The group of all processes; the environment is restored.

    A process that `polybasic.train.run.launch` started joins the others, any other is alone. On one
    machine no port is opened; among several the first process opens one, and all of them those
    over which gloo or NCCL talk, neither encrypted nor guarded.

    Raises:
        UserError: another launcher has started several processes.
    """
    meeting_host = os.environ.get(MEETING_HOST)
    wanted = dict(_ON_ONE_MACHINE) if meeting_host is None else {"MASTER_ADDR": meeting_host}
    if MEETING_FILE not in os.environ:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError(
                "training runs in one process",
                f"WORLD_SIZE = {os.environ['WORLD_SIZE']}",
                "start it without a launcher; train.num_processes starts the others",
            )
        wanted |= _ALONE
    if not torch.cuda.is_available():
        wanted["DS_ACCELERATOR"] = "cpu"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        if not distributed.is_initialized():
            _join()
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _join() -> None:
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "gloo"
    if torch.cuda.is_available():
        _check_gpu(int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl"
    store: distributed.Store = distributed.HashStore()
    if MEETING_HOST in os.environ:
        store = _store_of_hosts(Path(os.environ[MEETING_FILE]), os.environ[MEETING_HOST], rank)
    elif MEETING_FILE in os.environ:
        store = distributed.FileStore(str(Path(os.environ[MEETING_FILE])), count)
    distributed.init_process_group(
        backend, store=store, rank=rank, world_size=count, timeout=_PATIENCE
    )


def _check_gpu(index: int) -> None:
    if index >= torch.cuda.device_count():
        raise UserError(
            "more processes than GPUs",
            f"{socket.gethostname()}, GPUs {torch.cuda.device_count()}",
            "lower its slots in the hostfile",
        )


def _store_of_hosts(meeting: Path, host: str, rank: int) -> distributed.Store:
    """A store that the first process serves on a free port, which it writes into a shared file.

    Raises:
        UserError: the first process cannot be reached.
    """
    if rank == 0:
        store = distributed.TCPStore(
            host, 0, is_master=True, timeout=_MEETING_PATIENCE, wait_for_workers=False
        )
        write_json(meeting, {"port": store.port})
    else:
        deadline = time.monotonic() + _MEETING_PATIENCE.total_seconds()
        while not meeting.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the first process did not write {meeting}")
            time.sleep(_POLL_SECONDS)
        port = read_json(meeting, "meeting of the processes")["port"]
        try:
            store = distributed.TCPStore(host, port, timeout=_MEETING_PATIENCE)
        except distributed.DistError as error:
            raise UserError(
                "first host does not answer",
                f"{host} port {port}, asked by {socket.gethostname()}",
                "let the hosts reach each other's ports, by the names in the hostfile",
            ) from error
    store.set_timeout(_PATIENCE)
    return store


def process_index() -> int:
    """The place of this process, from 0."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def num_processes() -> int:
    """How many there are."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def is_first_process() -> bool:
    """Whether this one writes: metrics, checkpoints' records, the head."""
    return process_index() == 0


def process_device() -> torch.device:
    """The GPU of this process, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def wait_for_all() -> None:
    """Return when every process has come here."""
    sum_over_processes(torch.zeros((), device=process_device())).item()


def sum_over_processes(values: Tensor) -> Tensor:
    """The sum of what all processes give; of one process, its `values` themselves."""
    if num_processes() > 1:
        values = values.clone()
        distributed.all_reduce(values)
    return values
