"""CUDA graphs of passes and rounds: captured once, then launched by one call each.

A graph repeats the kernels of one run over the same memory. Whatever changes from call to call must
therefore be kept in persistent tensors, and nothing may be read on the host. On a CPU, or with
graphs switched off, the same functions are simply called.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from polybasic.chain.base.errors import UserError

MAX_GRAPHS = 256

Step = Callable[[], None]
"""Reads and writes persistent tensors; its host code has no effect of its own."""


class CapturedGraph(Protocol):
    """The result of a capture: a `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Repeat the captured work over the same memory."""


@dataclass
class GraphCounts:
    """How graphs have been used so far.

    Attributes:
        captures, replays: of all graphs.
        drops: graphs dropped to make room for others; if frequent, raise `max_graphs`.
        seconds: spent on first runs and captures.
    """

    captures: int = 0
    replays: int = 0
    drops: int = 0
    seconds: float = 0.0


class Graphs:
    """Captures functions as CUDA graphs when they first run, and replays them afterwards.

    All graphs share one memory pool, since they run one after another: results that other functions
    read must be written to tensors allocated outside of the function.

    Args:
        device: the device that the functions run on.
        enabled: False calls every function without capturing it, with the same results.
        max_graphs: graphs to keep; the least recently used one is dropped first.

    Attributes:
        counts: captures, replays and drops so far.
    """

    def __init__(
        self, device: torch.device, enabled: bool = True, max_graphs: int = MAX_GRAPHS
    ) -> None:
        assert max_graphs >= 1, f"{max_graphs} graphs"
        self.device, self.enabled, self.max_graphs = device, enabled, max_graphs
        self.counts = GraphCounts()
        # A graph needs the tensors that its function holds.
        self._kept: OrderedDict[Hashable, tuple[CapturedGraph, Step]] = OrderedDict()
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
        """Run a function; each call does its work on the device once.

        The first call with a key runs the function, which also compiles and times kernels, and
        captures it; later calls replay the capture, whatever function they pass.

        Args:
            key: identifies the function, the tensors that it holds and every number that its host
                code depends on.
            label: its name in messages; default: the key, a tuple word by word.

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
        """Capture in advance what has not been captured yet, and report it before and after.

        The functions run once, over whatever their tensors contain.

        Args:
            labelled: for each function its name in messages, its key, and the function itself.
            say: called with each line of progress; not called if there is nothing to capture.

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
            self._warm_up(function)
            try:
                captured = self._capture(function)
            except RuntimeError as error:
                # A failed capture leaves its pool in an unknown state.
                self._pool = None
                raise UserError(
                    "CUDA graph cannot be captured",
                    f"{label or _described(key)} ({_reason(error)})",
                    "use --no-graphs, or graphs=False in load_chain",
                ) from error
        self._kept[key] = captured, function
        self.counts.captures += 1
        self.counts.seconds += time.perf_counter() - begin
        # Dropped after the capture: a pool lives as long as one graph uses it.
        while len(self._kept) > self.max_graphs:
            self._drop_oldest()

    def _warm_up(self, function: Step) -> None:
        """Run once before the capture, on its stream, so that workspaces get allocated."""
        with torch.cuda.device(self.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                function()
            current.wait_stream(self._stream)

    def _capture(self, function: Step) -> CapturedGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # The outer contexts restore stream and device if the capture fails.
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


def _described(key: Hashable) -> str:
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _reason(error: RuntimeError) -> str:
    """The first line of the error that stopped a capture.

    If an error in the function has invalidated the capture, ending it raises a second error.
    """
    stopped_by = error.__context__ if isinstance(error.__context__, RuntimeError) else error
    return str(stopped_by).strip().partition("\n")[0]
