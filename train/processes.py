"""The processes that train together: one, or several of this machine that share each batch."""

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, distributed

from polybasic.chain.errors import UserError

MEETING_FILE = "POLYBASIC_MEETING_FILE"
"""Environment variable of a worker: the file through which the processes find each other."""

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
_EVERYWHERE = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
# the first process loads and evaluates for minutes while the others wait
_PATIENCE = datetime.timedelta(hours=6)


@contextmanager
def process_group() -> Iterator[None]:
    """The group of all processes; no port is opened, the environment is restored.

    A process that `polybasic.train.launch` started joins the others, any other is alone.

    Raises:
        UserError: another launcher has started several processes.
    """
    wanted = dict(_EVERYWHERE)
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
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl"
    store: distributed.Store = distributed.HashStore()
    if MEETING_FILE in os.environ:
        store = distributed.FileStore(str(Path(os.environ[MEETING_FILE])), count)
    distributed.init_process_group(
        backend, store=store, rank=rank, world_size=count, timeout=_PATIENCE
    )


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
