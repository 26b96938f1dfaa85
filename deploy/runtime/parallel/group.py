"""What the processes of a divided model say to each other: orders, sums and parts of results."""

import datetime
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, distributed

from polybasic.chain.base.errors import LostProcessError, UserError
from polybasic.chain.base.processes.place import is_on_one_host
from polybasic.chain.formats.checkpoints.shard import Shard

Order = list[Any]
"""Its name, then its arguments: numbers, texts and lists of them."""

TIMEOUT = datetime.timedelta(minutes=5)
"""Of a sum: the others are as far as this process, but for what one of them compiles alone."""
_START = datetime.timedelta(minutes=10)
"""Until all have started."""
_IDLE = datetime.timedelta(days=3650)
"""Of waiting for orders. Rank 0 closes its connections when it ends, which ends the waiting."""
_LOADING = datetime.timedelta(hours=2)
_GRACE_SECONDS, _POLL_SECONDS = 3.0, 0.05
_ORDER_BYTES = 4096
_LENGTH_BYTES = 4


class Group:
    """One of the processes among which models are divided.

    Orders go from rank 0 to all others as JSON in a tensor of a fixed size, and a second one if
    that is too small. They and whatever the host reads travel by gloo; sums over GPUs by NCCL.
    Neither encrypts nor asks who is there: hosts must trust the network between them.

    Args:
        store: through which the processes find each other.
        shard: which of the processes this one is.
        device: of the models' tensors.
        is_local: whether all are on this host; then nothing listens to others.
        check: of rank 0, raises what there is to say of a process that does not come.

    Attributes:
        is_open: until it is closed, or a process is lost.
        is_passing: whether rank 0 has begun what the others expect it to do with them. If that is
            broken off, they cannot be told anything any more.

    Raises:
        UserError: the others do not come.
    """

    def __init__(
        self,
        store: distributed.Store,
        shard: Shard,
        device: torch.device,
        is_local: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.shard, self.device, self._store = shard, device, store
        self.is_open, self.is_passing = True, False
        try:
            self._wait_for_all(check)
            self._host: Any = self._gloo(is_local)
            self._sums: Any = self._host
            if device.type == "cuda":
                torch.cuda.set_device(device)
                store = distributed.PrefixStore("sums", store)
                options = distributed.ProcessGroupNCCL.Options()
                options._timeout = TIMEOUT
                self._sums = distributed.ProcessGroupNCCL(store, *self._place, options)
        except RuntimeError as error:
            raise UserError(
                "processes do not find each other",
                f"rank {shard.rank} of {shard.count} ({_reason(error)})",
                "start as many as --tensor-parallel says, on hosts that reach each other",
            ) from error

    @property
    def _place(self) -> tuple[int, int]:
        return self.shard.rank, self.shard.count

    def _wait_for_all(self, check: Callable[[], None]) -> None:
        rank, count = self._place
        self._store.set(f"here {rank}", "")
        end, missing = time.monotonic() + _START.total_seconds(), list(range(1, count))
        while rank == 0 and missing:
            if time.monotonic() > end:
                raise RuntimeError(f"rank {missing[0]} does not come")
            check()
            time.sleep(_POLL_SECONDS)
            missing = [peer for peer in missing if not self._store.check([f"here {peer}"])]

    def _gloo(self, is_local: bool) -> Any:
        gloo: Any = distributed.ProcessGroupGloo  # whose options have no stubs
        options = gloo._Options()
        if is_local or is_on_one_host():
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
        elif "GLOO_SOCKET_IFNAME" in os.environ:
            options._devices = [gloo.create_device(interface=os.environ["GLOO_SOCKET_IFNAME"])]
        else:
            options._devices = [gloo.create_default_device()]
        options._timeout = TIMEOUT
        return gloo(self._store, *self._place, options)

    def send(self, orders: list[Order]) -> None:
        """Tell all others what to do; they may still be doing what they were told before."""
        content = json.dumps(orders, separators=(",", ":")).encode()
        content = len(content).to_bytes(_LENGTH_BYTES, "little") + content
        parts = [content[:_ORDER_BYTES].ljust(_ORDER_BYTES), content[_ORDER_BYTES:]]
        with self._watched():
            for part in filter(None, parts):
                tensor = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                self._broadcast(self._host, tensor)

    def receive(self) -> list[Order]:
        """What rank 0 says next; waits for it as long as rank 0 is there."""
        with self._watched():
            content = bytes(self._received(_ORDER_BYTES))
            length = int.from_bytes(content[:_LENGTH_BYTES], "little")
            content = content[_LENGTH_BYTES:]
            if length > len(content):
                content += bytes(self._received(length - len(content)))
        orders: list[Order] = json.loads(content[:length])
        return orders

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum of what all processes give, in place."""
        with self._watched():
            self._sums.allreduce([values]).wait()
        return values

    def broadcast(self, values: Tensor) -> None:
        """Give all others what rank 0 has, in place."""
        with self._watched():
            self._broadcast(self._sums, values)

    def gather(self, values: Tensor) -> list[Tensor]:
        """What all processes give, at rank 0; elsewhere nothing.

        Args:
            values: of the same shape everywhere.
        """
        return self._gathered(self._sums, values, TIMEOUT)

    def agree(self, failure: UserError | None) -> None:
        """Wait until all have come here, as long as loading may take.

        Args:
            failure: of this process; None if all is well.

        Raises:
            UserError: at rank 0, the first failure of another one.
        """
        if failure is not None:
            parts = json.dumps([failure.what, failure.where, failure.do])
            self._store.set(f"failure {self.shard.rank}", parts)
        failed = self._gathered(self._host, torch.tensor([failure is not None]).int(), _LOADING)
        for rank, flag in enumerate(failed):
            if flag.item():
                what, where, do = json.loads(self._store.get(f"failure {rank}"))
                raise UserError(what, f"{where} (rank {rank} of {self.shard.count})", do)

    def close(self) -> None:
        """Close the connections; whoever waits for this process fails."""
        if self.is_open:
            self.is_open = False
            for group in {id(channel): channel for channel in (self._sums, self._host)}.values():
                group.abort()
            self._sums = self._host = None  # which closes gloo's

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Raises what a lost process does to the others as a `LostProcessError`."""
        if not self.is_open:
            raise LostProcessError("the processes of this chain are gone; load it again")
        try:
            yield
        except RuntimeError as error:
            raise self._lost(_reason(error)) from error

    def _lost(self, reason: str) -> LostProcessError:
        """Which of the processes has ended or is stuck: the one that does not notice the loss."""
        rank, count = self._place
        if rank > 0:
            with suppress(RuntimeError):  # the store may be gone with rank 0
                self._store.set(f"noticed {rank}", "")
            return LostProcessError(f"rank {rank} of {count} lost the others ({reason})")
        self.close()
        end, missing = time.monotonic() + _GRACE_SECONDS, list(range(1, count))
        while missing and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
            missing = [peer for peer in missing if not self._store.check([f"noticed {peer}"])]
        named = f"rank {' and '.join(map(str, missing))}" if missing else "a process"
        return LostProcessError(f"{named} of {count} has ended or does not answer ({reason})")

    def _received(self, size: int) -> Any:
        tensor = torch.zeros(size, dtype=torch.uint8)
        self._broadcast(self._host, tensor)
        return tensor.numpy()

    def _broadcast(self, group: Any, tensor: Tensor) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = TIMEOUT if self.shard.rank == 0 else _IDLE
        group.broadcast([tensor], options).wait()

    def _gathered(self, group: Any, values: Tensor, timeout: datetime.timedelta) -> list[Tensor]:
        gathered: list[list[Tensor]] = []
        if self.shard.rank == 0:
            gathered = [[torch.empty_like(values) for _ in range(self.shard.count)]]
        options = distributed.GatherOptions()
        options.rootRank, options.timeout = 0, timeout
        with self._watched():
            group.gather(gathered, [values], options).wait()
        return gathered[0] if gathered else []


def _reason(error: Exception) -> str:
    """Its first sentence, without the place in gloo's source."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).strip()).partition("\n")[0].partition(". ")[0]
