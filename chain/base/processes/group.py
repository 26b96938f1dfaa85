"""The group of all processes: joining it, and what they say to each other."""

import datetime
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed
from torch.distributed.rendezvous import rendezvous

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.coordinator import Coordinator, has_coordinator, set_coordinator
from polybasic.chain.base.processes.place import Place, is_on_one_host, master_in, place_in

# the first process loads and evaluates for minutes while the others wait
_TIMEOUT = datetime.timedelta(hours=6)
_RENDEZVOUS_TIMEOUT = datetime.timedelta(minutes=10)


@contextmanager
def process_group() -> Iterator[Place]:
    """The group of all processes that a launcher has started; one process is a group of its own.

    A group that is there already, as of Ray Train or of the whole command, is used as it is, and
    stays as long as the process does. The environment is restored. gloo on CPUs and NCCL on GPUs
    talk without encryption.

    Raises:
        UserError: more processes on a host than GPUs, a first process that cannot be reached, or
            a group of another size than the launcher says.
    """
    place = place_in()
    wanted = place.variables
    if not torch.cuda.is_available():
        wanted["DS_ACCELERATOR"] = "cpu"
    if is_on_one_host() and "GLOO_SOCKET_IFNAME" not in os.environ:
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    with _environment(wanted):
        if not distributed.is_initialized():
            join(place)
        else:
            _check_same(place)
            if place.world_size > 1 and not has_coordinator():
                set_coordinator(
                    Coordinator(distributed.distributed_c10d._get_default_store(), place)
                )
        yield place


def join(place: Place) -> None:
    """Join the group of all processes.

    They find each other at MASTER_ADDR and MASTER_PORT, which the first process serves unless
    torchrun does. One process needs neither.

    Args:
        place: of this one.

    Raises:
        UserError: more processes on a host than GPUs, or a first process that cannot be reached.
    """
    backend = "gloo"
    store: distributed.Store
    if place.world_size == 1:
        store = distributed.HashStore()
    else:
        store = _store(place)
        store.set_timeout(_TIMEOUT)
        set_coordinator(Coordinator(store, place))
    if torch.cuda.is_available():
        _take_gpu(place, store)
        backend = "nccl"
    distributed.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.world_size, timeout=_TIMEOUT
    )


def _check_same(place: Place) -> None:
    group = distributed.get_rank(), distributed.get_world_size()
    if group != (place.rank, place.world_size):
        raise UserError(
            "the processes' group is not the one that their launcher says",
            f"rank {group[0]} of {group[1]}, RANK={place.rank} WORLD_SIZE={place.world_size}",
            "start all of them by one launcher, and join no other group before",
        )


def _store(place: Place) -> distributed.Store:
    host, port = master_in()
    here = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    try:
        with _environment(here):
            found = rendezvous("env://", place.rank, place.world_size, timeout=_RENDEZVOUS_TIMEOUT)
            store: distributed.Store = next(found)[0]
    except distributed.DistError as error:
        if place.is_first:
            raise UserError(
                "the first process cannot open its port",
                f"{host} port {port} on {socket.gethostname()}",
                "set MASTER_ADDR to this host and MASTER_PORT to a free port",
            ) from error
        raise UserError(
            "the first process cannot be reached",
            f"{host} port {port} from {socket.gethostname()}",
            "see that it has started, and that hosts reach each other's ports",
        ) from error
    return store


def _take_gpu(place: Place, store: distributed.Store) -> None:
    """Make a GPU of this host that of this process; Slurm and Ray may show each one its own."""
    index = place.local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    if store.add(f"polybasic/gpu/{torch.cuda.get_device_properties(index).uuid}", 1) > 1:
        raise UserError(
            "more processes than GPUs",
            f"{socket.gethostname()}, GPUs {torch.cuda.device_count()}",
            "start one process for each GPU",
        )


@contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def process_index() -> int:
    """The rank of this process, from 0."""
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
        return torch.device("cuda", place_in().local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def wait_for_all() -> None:
    """Return when every process has come here; fails if one is lost."""
    sum_over_processes(torch.zeros((), device=process_device())).item()


def sum_over_processes(values: Tensor) -> Tensor:
    """The sum of what all processes give; of one process, its `values` themselves."""
    if num_processes() > 1:
        values = values.clone()
        distributed.all_reduce(values)
    return values
