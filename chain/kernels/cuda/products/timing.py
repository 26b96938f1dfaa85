"""Times functions on a GPU as in real use: replayed from a CUDA graph."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

_ROUNDS = 5
_CALLS = 4


def interleaved_seconds(functions: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of one call of each function on the current GPU, the best of several rounds.

    Functions take turns, so that all see the same clock rates. They must have run before, so that
    nothing is compiled during a capture.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graphs = [_captured(function) for function in functions]
        best = [float("inf")] * len(graphs)
        for _ in range(_ROUNDS):
            for index, graph in enumerate(graphs):
                graph.replay()
                best[index] = min(best[index], _seconds(graph))
    torch.cuda.current_stream().wait_stream(stream)
    return best


def _captured(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`_CALLS` calls; captured without `torch.cuda.graph`, which collects garbage each time."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for _ in range(_CALLS):
            function()
    except Exception:
        # ending it raises another error, which says less
        with suppress(Exception):
            graph.capture_end()
        raise
    graph.capture_end()
    return graph


def _seconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / _CALLS
