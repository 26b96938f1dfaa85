"""Where the processes of a divided model come from: a launcher, or this process itself."""

import os
import subprocess
import sys
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

import torch
from torch import distributed

from polybasic.chain.base.errors import LostProcessError, UserError
from polybasic.chain.base.processes.group import process_device
from polybasic.chain.base.processes.place import place_in
from polybasic.chain.formats.checkpoints.shard import Shard
from polybasic.deploy.runtime.parallel.group import Group

_END_SECONDS = 5.0

_launched: Group | None = None


def join_launched(count: int | None) -> int:
    """The number of processes that models are divided among, where a command is begun.

    A launcher has started the same command in all of them, and they have a group. Rank 0 goes on
    and leads; the others follow it here until `leave_launched`, and never return.

    Args:
        count: that is asked for; by default as many as were started.

    Raises:
        UserError: a launcher has started another number, or they do not find each other.
        SystemExit: of another rank than 0, which has followed to the end.
    """
    global _launched
    place = place_in()
    if count not in (None, place.world_size):
        raise UserError(
            "another number of processes than the launcher's",
            f"--tensor-parallel {count}, {place.world_size} were started",
            "leave the option out, or the launcher",
        )
    store = distributed.PrefixStore("parts", distributed.distributed_c10d._get_default_store())
    _launched = Group(store, Shard(place.rank, place.world_size), process_device())
    if not place.is_first:
        from polybasic.deploy.runtime.parallel.follower import follow, leave_to_first

        leave_to_first()
        code = follow(_launched)
        if code != 0:
            time.sleep(_END_SECONDS)  # rank 0 says what has happened, which ends this process
        raise SystemExit(code)
    return place.world_size


def leave_launched() -> None:
    """Let those that `join_launched` keeps end, once the command of rank 0 is done."""
    global _launched
    if _launched is not None:
        end(_launched)
    _launched = None


def gathered(count: int, device: torch.device) -> "tuple[Group, Followers | None]":
    """The group of this process and `count - 1` others: the launcher's, or started here.

    Raises:
        UserError: fewer GPUs than processes.
        LostProcessError: one that was started ended at once.
    """
    if _launched is not None and _launched.shard.count == count:
        return _launched, None
    followers = Followers(count, device)
    try:
        store = distributed.FileStore(followers.path, count)
        here, check = _device(device, 0), followers.check
        local = Group(store, Shard(0, count), here, is_local=True, check=check)
    except BaseException:
        followers.close()
        raise
    return local, followers


def end(group: Group) -> None:
    """Let all others end, and close the connections."""
    if group.is_open and not group.is_passing:
        with suppress(LostProcessError):
            group.send([["end"]])
    group.close()


class Followers:
    """Processes on this machine that follow this one, and share its threads with it.

    They find each other by a file in a folder of their own, so that no port is open to others.

    Args:
        count: of all processes, this one included.
        device: "cuda" for a GPU each, or "cpu".

    Attributes:
        path: of the file.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        if device.type == "cuda" and count > torch.cuda.device_count():
            raise UserError(
                "more processes than GPUs",
                f"--tensor-parallel {count}, {torch.cuda.device_count()} GPUs",
                "use one process for each GPU",
            )
        self._threads = torch.get_num_threads()
        each = max(1, self._threads // count)
        torch.set_num_threads(each)
        self._folder = tempfile.TemporaryDirectory(prefix="polybasic-")
        self.path = str(Path(self._folder.name) / "store")
        command = sys.executable, "-m", "polybasic.deploy.runtime.parallel.follower", self.path
        self._processes = [
            subprocess.Popen(
                [*command, str(rank), str(count), str(_device(device, rank))],
                env={**os.environ, "OMP_NUM_THREADS": str(each)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process
            )
            for rank in range(1, count)
        ]
        self._finalizer = weakref.finalize(self, _end_all, self._processes, self._folder)

    def check(self) -> None:
        """Raise a `LostProcessError` if one has ended."""
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                raise LostProcessError(
                    f"rank {rank} of {1 + len(self._processes)} ended with code "
                    f"{process.returncode} before it was asked anything"
                )

    def close(self) -> None:
        """Wait for all to end, which is to be at once, and take their threads back."""
        if self._finalizer.alive:
            self._finalizer()
            torch.set_num_threads(self._threads)


def _end_all(
    processes: list[subprocess.Popen[bytes]], folder: tempfile.TemporaryDirectory[str]
) -> None:
    for process in processes:
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    folder.cleanup()


def _device(given: torch.device, rank: int) -> torch.device:
    """Of a process among those of this host: a GPU for each."""
    return torch.device("cuda", rank) if given.type == "cuda" else given
