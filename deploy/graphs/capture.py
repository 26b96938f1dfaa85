"""CUDA graphs of passes and rounds: captured once, then launched by one call each.

A graph repeats the kernels of one run over the same memory. What changes from call to call must
therefore stand in tensors that stay, and nothing may be read on the host. On a CPU, or switched
off, the same functions are called as they are.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from polybasic.chain.errors import UserError

MOST_GRAPHS = 256

Step = Callable[[], None]
"""Reads and writes tensors that stay; its host code has no effect of its own."""


class Captured(Protocol):
    """What a capture leaves: a `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Do the captured work again, over the same memory."""


@dataclass
class GraphCounts:
    """What was done with graphs so far.

    Attributes:
        captures, replays: of all graphs.
        drops: graphs that made room for others; frequent ones call for a larger `most`.
        seconds: that first runs and captures took.
    """

    captures: int = 0
    replays: int = 0
    drops: int = 0
    seconds: float = 0.0


class Graphs:
    """Captures functions as CUDA graphs when they first run, and replays them afterwards.

    All graphs share one pool for what they allocate, since one runs after the other: what a
    function leaves for others must stand in tensors that were made outside of it.

    Args:
        device: that the functions run on.
        enabled: False calls every function as it is, with the same results.
        most: graphs kept; the one that was not used for longest makes room.

    Attributes:
        counts: what was done so far.
    """

    def __init__(self, device: torch.device, enabled: bool = True, most: int = MOST_GRAPHS) -> None:
        assert most >= 1, f"{most} graphs"
        self.device, self.enabled, self.most = device, enabled, most
        self.counts = GraphCounts()
        # A graph needs the tensors that its function holds.
        self._kept: OrderedDict[Hashable, tuple[Captured, Step]] = OrderedDict()
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    @property
    def is_active(self) -> bool:
        """Whether functions are captured: on a GPU, unless switched off."""
        return self.enabled and self.device.type == "cuda"

    @property
    def num_graphs(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """What the graphs' pool holds on the device; a snapshot, not for inner loops."""
        if self._pool is None:
            return 0
        segments = torch.cuda.memory_snapshot()
        own = [part for part in segments if tuple(part["segment_pool_id"]) == tuple(self._pool)]
        return sum(part["total_size"] for part in own)

    def run(self, key: Hashable, function: Step, label: str | None = None) -> None:
        """Run a function; its work on the device is done once with each call.

        The first call with a key runs it as it is, which also compiles and measures kernels, and
        captures it; later calls replay that, whatever function they bring.

        Args:
            key: stands for the function, the tensors that it holds and every number on which its
                host code depends.
            label: what it is called in messages; default: the key, a tuple word by word.

        Raises:
            UserError: it cannot be captured.
        """
        if not self.is_active:
            with torch.inference_mode():
                function()
            return
        found = self._kept.get(key)
        if found is None:
            self._first_run(key, function, label)
            return
        self._kept.move_to_end(key)
        found[0].replay()
        self.counts.replays += 1

    def prepare(
        self, labelled: Sequence[tuple[str, Hashable, Step]], say: Callable[[str], None]
    ) -> None:
        """Capture ahead what was not captured yet; tell of it before and after.

        The functions run once, over whatever stands in their tensors.

        Args:
            labelled: what each is called in messages, its key, and the function.
            say: takes a line for people; nothing is told where nothing is captured.

        Raises:
            UserError: one cannot be captured.
        """
        missing = {
            key: (label, function) for label, key, function in labelled if key not in self._kept
        }
        if not self.is_active or not missing:
            return
        graphs = f"{len(missing)} CUDA graph{'s' if len(missing) > 1 else ''}"
        say(f"capturing {graphs}; on new hardware kernels are compiled and measured first")
        begin = time.perf_counter()
        for key, (label, function) in missing.items():
            self._first_run(key, function, label)
        seconds = time.perf_counter() - begin
        say(f"captured {graphs} in {seconds:.1f} s; they take {self.num_bytes / 1e6:.0f} MB")

    def _first_run(self, key: Hashable, function: Step, label: str | None) -> None:
        begin = time.perf_counter()
        with torch.inference_mode():
            self._run_ahead(function)
            try:
                captured = self._capture(function)
            except RuntimeError as error:
                # What a broken capture leaves of its pool cannot be relied on.
                self._pool = None
                raise UserError(
                    "CUDA graph cannot be captured",
                    f"{label or _shown(key)} ({_reason(error)})",
                    "use --no-graphs, or graphs=False in load_chain",
                ) from error
        self._kept[key] = captured, function
        self.counts.captures += 1
        self.counts.seconds += time.perf_counter() - begin
        # Dropped after the capture: a pool lives as long as one graph uses it.
        while len(self._kept) > self.most:
            self._drop_oldest()

    def _run_ahead(self, function: Step) -> None:
        """The run before the capture, on the stream of all captures, whose workspaces it makes."""
        with torch.cuda.device(self.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                function()
            current.wait_stream(self._stream)

    def _capture(self, function: Step) -> Captured:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # The outer contexts put stream and device back where a capture fails.
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            capture = torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            )
            with capture:
                function()
        return graph

    def _drop_oldest(self) -> None:
        # It may still run.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._kept.popitem(last=False)
        self.counts.drops += 1


def _shown(key: Hashable) -> str:
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _reason(error: RuntimeError) -> str:
    """The first line of what stopped a capture.

    Where a function's error has made the capture invalid, ending it raises another.
    """
    stopped_by = error.__context__ if isinstance(error.__context__, RuntimeError) else error
    return str(stopped_by).strip().partition("\n")[0]
