"""A target that is served in a thread of this process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime.load import load_target
from polybasic.deploy.runtime.remote.keys import read_key
from polybasic.deploy.runtime.remote.server import TargetServer

KEY = "0123456789abcdef" * 2


def key_file(folder: Path, key: str = KEY) -> str:
    """A file with a key."""
    path = folder / f"{key[:8]}.key"
    path.write_text(f"{key}\n")
    return str(path)


@dataclass
class Far:
    """A served target.

    Attributes:
        near_folder: the chain without the target's weights.
        said: the server's lines.
    """

    chain: Chain
    server: TargetServer
    address: tuple[str, int]
    near_folder: Path
    said: list[str]

    @property
    def where(self) -> str:
        """HOST:PORT."""
        return f"{self.address[0]}:{self.address[1]}"

    def wait_until_free(self) -> None:
        """Until the ends of all sequences have arrived, which nobody answers."""
        until = time.monotonic() + 10
        while not all(slot.is_free for slot in self.chain.engine.slots.made):
            assert time.monotonic() < until
            time.sleep(0.01)

    def near(self, folder: Path | None = None, **options: Any) -> Chain:
        """A chain whose target is this one."""
        given = {"key_file": key_file(self.near_folder.parent), "dtype": "float32"}
        given |= {"remote": self.where} | options
        return load_chain(folder or self.near_folder, digests=False, **given)


@contextmanager
def serving(chain: Chain, near_folder: Path, port: int = 0, **options: Any) -> Iterator[Far]:
    """Serve a loaded target, until the end of the context."""
    listening = socket.create_server(("127.0.0.1", port))
    said: list[str] = []
    key = read_key(Path(key_file(near_folder.parent)))
    server = TargetServer(chain, key, listening, say=said.append, **options)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield Far(chain, server, listening.getsockname()[:2], near_folder, said)
    finally:
        server.close()
        thread.join()


def loaded_target(chain: Path, **options: Any) -> Chain:
    """The target of a chain alone."""
    return load_target(chain, digests=False, dtype="float32", **options)
