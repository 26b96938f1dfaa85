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

RENDEZVOUS_FILE = "POLYBASIC_RENDEZVOUS_FILE"
"""Environment variable of a worker: the file through which the processes find each other."""

RENDEZVOUS_HOST = "POLYBASIC_RENDEZVOUS_HOST"
"""Environment variable of a worker among several machines: the first process's machine."""

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
_ON_ONE_MACHINE = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
# the first process loads and evaluates for minutes while the others wait
_TIMEOUT = datetime.timedelta(hours=6)
_RENDEZVOUS_TIMEOUT = datetime.timedelta(minutes=10)
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
    rendezvous_host = os.environ.get(RENDEZVOUS_HOST)
    wanted = dict(_ON_ONE_MACHINE) if rendezvous_host is None else {"MASTER_ADDR": rendezvous_host}
    if RENDEZVOUS_FILE not in os.environ:
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
    if RENDEZVOUS_HOST in os.environ:
        store = _store_of_hosts(
            Path(os.environ[RENDEZVOUS_FILE]), os.environ[RENDEZVOUS_HOST], rank
        )
    elif RENDEZVOUS_FILE in os.environ:
        store = distributed.FileStore(str(Path(os.environ[RENDEZVOUS_FILE])), count)
    distributed.init_process_group(
        backend, store=store, rank=rank, world_size=count, timeout=_TIMEOUT
    )


def _check_gpu(index: int) -> None:
    if index >= torch.cuda.device_count():
        raise UserError(
            "more processes than GPUs",
            f"{socket.gethostname()}, GPUs {torch.cuda.device_count()}",
            "lower its slots in the hostfile",
        )


def _store_of_hosts(rendezvous: Path, host: str, rank: int) -> distributed.Store:
    """A store that the first process serves on a free port, which it writes into a shared file.

    Raises:
        UserError: the first process cannot be reached.
    """
    if rank == 0:
        store = distributed.TCPStore(
            host, 0, is_master=True, timeout=_RENDEZVOUS_TIMEOUT, wait_for_workers=False
        )
        write_json(rendezvous, {"port": store.port})
    else:
        deadline = time.monotonic() + _RENDEZVOUS_TIMEOUT.total_seconds()
        while not rendezvous.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the first process did not write {rendezvous}")
            time.sleep(_POLL_SECONDS)
        port = read_json(rendezvous, "rendezvous of the processes")["port"]
        try:
            store = distributed.TCPStore(host, port, timeout=_RENDEZVOUS_TIMEOUT)
        except distributed.DistError as error:
            raise UserError(
                "first host does not answer",
                f"{host} port {port}, asked by {socket.gethostname()}",
                "let the hosts reach each other's ports, by the names in the hostfile",
            ) from error
    store.set_timeout(_TIMEOUT)
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
