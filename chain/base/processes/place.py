"""Which of several processes this one is, as launchers say by environment variables. No torch."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from polybasic.chain.base.errors import UserError

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000  # below those that systems hand out


@dataclass(frozen=True)
class Place:
    """One process among those that were launched together.

    Attributes:
        rank: from 0 up to `world_size`.
        world_size: how many processes there are, on all hosts.
        local_rank: among those of this host.
        local_world_size: how many of them are on this host.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this one talks to people and writes files."""
        return self.rank == 0

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which torchrun says it."""
        numbers = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        return {name: str(number) for name, number in zip(_TORCHRUN, numbers, strict=True)}


# accelerate, DeepSpeed, Ray Train and Kubernetes' training operator set them too
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def place_in(environment: Mapping[str, str] = os.environ) -> Place:
    """The place of this process; alone where no launcher has set the variables.

    Of Slurm's variables those of srun's step count: a batch script by itself is one process.

    Raises:
        UserError: a variable that is no number, or a rank outside of the world.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, size = "RANK", "WORLD_SIZE"
        local = (
            _number(environment, "LOCAL_RANK", 0),
            _number(environment, "LOCAL_WORLD_SIZE", 1),
        )
    elif "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        rank, size = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
        local = _number(environment, "SLURM_LOCALID", 0), _slurm_tasks_here(environment)
    else:
        return Place()
    place = Place(_number(environment, rank), _number(environment, size), *local)
    if place.rank >= place.world_size:
        raise UserError(
            "rank outside of the world",
            f"{rank}={place.rank}, {size}={place.world_size}",
            "see what the launcher sets",
        )
    return place


def master_in(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port of the first process, which srun leaves to be told from its step.

    Raises:
        UserError: nobody says where the first process is.
    """
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return environment["MASTER_ADDR"], _number(environment, "MASTER_PORT")
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST"))
    if nodes is None:
        raise UserError(
            "several processes, and no address of the first one",
            "MASTER_ADDR and MASTER_PORT are not set",
            "start them by torchrun, or set both",
        )
    # of "rack[1-2]node[07,09-12],login" it is rack1node07
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]
    step = _number(environment, "SLURM_JOB_ID", 0) + 997 * _number(environment, "SLURM_STEP_ID", 0)
    return environment.get("MASTER_ADDR", host), _FIRST_PORT + step % _NUM_PORTS


def is_on_one_host(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the first process is found on the loopback, hence all are on this host."""
    return environment.get("MASTER_ADDR") in ("127.0.0.1", "localhost", "::1")


def _slurm_tasks_here(environment: Mapping[str, str]) -> int:
    """Of a list like 4(x2),3 the number of this node."""
    listed = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    counts = [
        int(tasks)
        for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed)
        for _ in range(int(times or 1))
    ]
    node = _number(environment, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else 1


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environment.get(name, "" if default is None else str(default))
    if not value.isdecimal():
        raise UserError(
            "environment variable is no number", f"{name}={value}", "see what the launcher sets"
        )
    return int(value)
