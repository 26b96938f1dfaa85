"""A process that holds a part of the models and does what rank 0 says, until that ends."""

import logging
import signal
import sys
from pathlib import Path

import torch
from torch import distributed

from polybasic.chain.base.errors import LostProcessError, UserError
from polybasic.chain.base.readable import readable_bytes
from polybasic.chain.formats.checkpoints.shard import Shard
from polybasic.chain.formats.verify import check_chain
from polybasic.chain.kernels.product_times import DTYPES
from polybasic.deploy.runtime.hardware import available_bytes, release_unused
from polybasic.deploy.runtime.parallel.group import Group
from polybasic.deploy.runtime.parallel.runner import ParallelRunner, load_parts
from polybasic.deploy.runtime.rounds.verifier import SPARE_ROWS


@torch.inference_mode()
def follow(group: Group) -> int:
    """Do what rank 0 says; 0 if it ended in order, 1 if it is lost."""
    runner: ParallelRunner | None = None
    try:
        while True:
            for name, *arguments in group.receive():
                if name == "end":
                    return 0
                if name == "load":
                    runner = None
                    release_unused(group.device)
                    runner = _load(group, *arguments)
                elif name == "unload":
                    runner = None
                else:
                    getattr(runner, name)(*arguments)
    except LostProcessError:
        return 1
    finally:
        group.close()


def leave_to_first() -> None:
    """Leave signals and warnings to rank 0, which may need this process while it ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("polybasic").setLevel(logging.ERROR)


def _load(
    group: Group,
    folder: str,
    elsewhere: list[str],
    target: str | None,
    dtype: str,
    context_tokens: int,
    graphs: bool,
    num_bytes: int,
) -> ParallelRunner | None:
    failure = None
    try:
        available = available_bytes(group.device)
        # processes on CPUs share what rank 0 has looked at
        if group.device.type != "cpu" and available is not None and num_bytes > available:
            raise UserError(
                "not enough memory",
                f"{readable_bytes(num_bytes)} needed, {readable_bytes(available)} available on "
                f"{group.device}",
                "use more processes or a shorter context",
            )
        checked = check_chain(Path(folder), False, elsewhere, target)
        members = load_parts(checked, group, DTYPES[dtype], context_tokens + SPARE_ROWS)
    except UserError as error:
        failure = error
    group.agree(failure)
    return None if failure is not None else ParallelRunner(group, members, graphs, {})


def _main(path: str, rank: str, count: str, device: str) -> int:
    leave_to_first()
    store, shard = distributed.FileStore(path, int(count)), Shard(int(rank), int(count))
    try:
        group = Group(store, shard, torch.device(device), is_local=True)
    except UserError:  # rank 0 finds the same, and says it
        return 1
    return follow(group)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
