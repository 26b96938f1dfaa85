"""Graphs: their bookkeeping, what they ask of CUDA, and on a GPU that they do it.

What replays of a captured function do is in test_recorded_graphs.py, for an emulation.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.kernels.cuda.graphs import Graphs, Step
from tests.deploy.recorded_graphs import RecordedGraphs
from tests.deploy.runtime.graphs.test_recorded_graphs import Attention, assert_same

CPU = torch.device("cpu")
needs_gpu = pytest.mark.gpu(needed=True)


@pytest.mark.parametrize("graphs", [Graphs(CPU), RecordedGraphs(enabled=False)])
def test_switched_off_or_on_a_cpu_functions_are_called(graphs: Graphs) -> None:
    calls, said = [], []
    for number in range(3):
        graphs.run("key", lambda number=number: calls.append(number))
    graphs.prepare([("pass", "other key", lambda: calls.append(3))], said.append)
    assert calls == [0, 1, 2]
    assert said == []
    assert not graphs.is_active
    assert (graphs.num_graphs, graphs.num_bytes, graphs.counts.captures) == (0, 0, 0)


def test_a_call_is_made_in_inference_mode() -> None:
    modes = []
    Graphs(CPU).run("key", lambda: modes.append(torch.is_inference_mode_enabled()))
    RecordedGraphs().run("key", lambda: modes.append(torch.is_inference_mode_enabled()))
    assert modes == [True, True, True]


def test_a_failing_capture_is_reported_in_one_line_and_leaves_nothing() -> None:
    graphs, out = RecordedGraphs(), torch.zeros(2)
    with pytest.raises(UserError) as message:
        graphs.prepare([("tree pass of 24 rows", 1, lambda: out.tolist())], print)
    assert str(message.value) == (
        "CUDA graph cannot be captured: tree pass of 24 rows (tolist reads device data on the "
        "host); use --no-graphs, or graphs=False in load_chain"
    )
    with pytest.raises(UserError, match="cannot be captured: pass 1 "):
        graphs.run(1, lambda: out.tolist(), "pass 1")
    assert graphs.num_graphs == 0
    graphs.run(1, lambda: out.fill_(1))
    assert graphs.counts.captures == 1


def test_an_error_of_the_first_run_is_no_failing_capture() -> None:
    graphs = RecordedGraphs()
    with pytest.raises(RuntimeError, match="must match the size"):
        graphs.run("key", lambda: torch.ones(2).add_(torch.ones(3)))
    assert graphs.num_graphs == 0


def test_the_graph_that_was_not_used_for_longest_makes_room() -> None:
    graphs, out = RecordedGraphs(max_graphs=2), torch.zeros(())

    def function() -> None:
        out.add_(1)

    for key in ("a", "b", "a", "c", "a", "b"):
        graphs.run(key, function)
    # "b" had made room for "c", and made "c" go.
    counts = graphs.counts
    assert (counts.captures, counts.replays, counts.drops) == (4, 2, 2)
    assert graphs.num_graphs == 2
    graphs.run("a", function)
    assert graphs.counts.replays == 3
    assert out.item() == 7


def test_prepare_captures_what_is_missing_and_reports_it() -> None:
    graphs, said = RecordedGraphs(), list[str]()
    outs = torch.zeros(3)
    steps: list[tuple[str, object, Step]] = [
        (f"pass {number}", number, outs[number].add_(1).zero_) for number in range(3)
    ]
    graphs.run(1, steps[1][2])
    graphs.prepare([*steps, *steps], said.append)
    graphs.prepare(steps, said.append)
    assert len(said) == 2
    assert said[0].startswith("capturing 2 CUDA graphs; ")
    assert re.fullmatch(r"captured 2 CUDA graphs in [\d.]+ s; they take \d+ MB", said[1])
    assert (graphs.counts.captures, graphs.counts.replays) == (3, 0)
    assert graphs.counts.seconds > 0


class FakeCuda:
    """What `Graphs` asks of torch.cuda, in order, where there is no GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.pools = iter(range(1, 100))
        named = {
            "device": lambda device: nullcontext(),
            "Stream": lambda: FakeStream("side", self.asked),
            "current_stream": lambda: FakeStream("main", self.asked),
            "stream": self.within,
            "graph_pool_handle": lambda: (0, next(self.pools)),
            "CUDAGraph": lambda: self,
            "graph": self.capture,
            "synchronize": lambda device: self.asked.append("synchronize"),
            "memory_snapshot": lambda: [
                {"segment_pool_id": [0, pool], "total_size": 10**pool} for pool in (0, 1, 2)
            ],
        }
        for name, value in named.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def replay(self) -> None:
        self.asked.append("replay")

    @contextmanager
    def within(self, stream: "FakeStream") -> Iterator[None]:
        self.asked.append(f"on {stream.name}")
        yield
        self.asked.append("back")

    @contextmanager
    def capture(
        self, graph: object, pool: object, stream: "FakeStream", capture_error_mode: str
    ) -> Iterator[None]:
        assert graph is self
        self.asked.append(f"capture on {stream.name} into {pool}, {capture_error_mode}")
        try:
            yield
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        self.asked.append("captured")


@dataclass
class FakeStream:
    name: str
    asked: list[str]

    def wait_stream(self, other: "FakeStream") -> None:
        self.asked.append(f"{self.name} waits for {other.name}")


def test_a_first_run_is_followed_by_a_capture_on_the_same_stream(monkeypatch) -> None:
    cuda = FakeCuda(monkeypatch)
    graphs = Graphs(torch.device("cuda"), max_graphs=1)
    assert graphs.num_bytes == 0
    for key in ("a", "a", "b"):
        graphs.run(key, lambda key=key: cuda.asked.append(f"run {key}"))
    run = ["side waits for main", "on side", "run {}", "back", "main waits for side"]
    capture = ["on side", "capture on side into (0, 1), thread_local", "run {}", "captured", "back"]
    first = [call.format("a") for call in (*run, *capture)]
    second = [call.format("b") for call in (*run, *capture)]
    assert cuda.asked == [*first, "replay", *second, "synchronize"]
    assert graphs.num_bytes == 10


def test_the_error_that_stopped_a_capture_is_reported(monkeypatch) -> None:
    cuda = FakeCuda(monkeypatch)
    graphs = Graphs(torch.device("cuda"))

    def function() -> None:
        if any(call.startswith("capture ") for call in cuda.asked):
            raise RuntimeError("CUDA error: operation not permitted\nwhen stream is capturing")

    with pytest.raises(UserError) as message:
        graphs.run("pass", function)
    assert "pass (CUDA error: operation not permitted); use --no-graphs" in str(message.value)
    assert graphs.num_graphs == 0
    # The pool of a capture that failed is not used again.
    cuda.asked.clear()
    graphs.run("other", lambda: None)
    assert "capture on side into (0, 2), thread_local" in cuda.asked


@needs_gpu
def test_on_a_gpu_replays_do_what_the_function_does_once_a_call() -> None:
    device = torch.device("cuda")
    graphs = Graphs(device)
    by_graphs = Attention(device).answers(graphs, 5)
    by_calls = Attention(device).answers(Graphs(device, enabled=False), 5)
    assert_same(by_graphs, by_calls)
    assert (graphs.counts.captures, graphs.counts.replays) == (1, 4)
    assert graphs.num_bytes > 0


@needs_gpu
def test_on_a_gpu_a_failing_capture_leaves_graphs_usable() -> None:
    device = torch.device("cuda")
    graphs, model = Graphs(device), Attention(device)
    stream = torch.cuda.current_stream()
    with pytest.raises(UserError, match=r"tree pass 24 .*--no-graphs"):
        graphs.run(("tree pass", 24), lambda: model.x[0, 0].item())
    assert torch.cuda.current_stream() == stream
    by_calls = Attention(device).answers(Graphs(device, enabled=False), 3)
    assert_same(model.answers(graphs, 3), by_calls)


@needs_gpu
def test_on_a_gpu_many_graphs_share_one_pool() -> None:
    device = torch.device("cuda")
    graphs, out = Graphs(device, max_graphs=3), torch.zeros(4096, 1024, device=device)

    def function() -> None:
        out.copy_((out * 2 + 1).sin())

    graphs.run(0, function)
    first = graphs.num_bytes
    for key in range(1, 12):
        graphs.run(key, function)
    assert graphs.num_graphs == 3
    assert graphs.num_bytes <= 2 * first
