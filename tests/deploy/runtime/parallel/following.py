"""Followers in threads of this process, which talk to rank 0 as processes do."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed import FileStore

from polybasic.chain.formats.checkpoints.shard import Shard
from polybasic.chain.formats.package import Part
from polybasic.deploy.runtime.parallel import processes
from polybasic.deploy.runtime.parallel.follower import follow
from polybasic.deploy.runtime.parallel.group import Group
from tests.conftest import PLAN, package_around, write_draft, write_intermediate, write_target

CPU = torch.device("cpu")
CONTEXT_TOKENS = 100


def write_divisible_chain(folder: Path) -> Path:
    """A chain of three whose models can be divided by two and by four, unevenly by four."""
    target = folder / "target"
    shape = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    write_target(target, **shape, intermediate_size=640)
    write_intermediate(folder / "intermediate", target)
    write_draft(folder / "draft", target)
    parts = [
        Part("intermediate", "intermediate", "awq", folder / "intermediate"),
        Part("draft", "drafter", "eagle2", folder / "draft"),
    ]
    package_around(folder / "chain", target, parts, PLAN, copy_target=True)
    return folder / "chain"


@contextmanager
def followers(count: int, folder: Path, code: int = 0) -> Iterator[None]:
    """As many followers as models are divided among, but for this process, as of a launcher.

    Args:
        code: that they end with.
    """
    path = str(folder / "store")
    codes: dict[int, int] = {}

    def run(rank: int) -> None:
        codes[rank] = follow(Group(FileStore(path, count), Shard(rank, count), CPU, is_local=True))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1, count)]
    for thread in threads:
        thread.start()
    group = processes._launched = Group(FileStore(path, count), Shard(0, count), CPU, is_local=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # each sum waits for all threads
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        processes._launched = None
        processes.end(group)
        for thread in threads:
            thread.join(10)
        assert codes == dict.fromkeys(range(1, count), code)
