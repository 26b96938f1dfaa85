"""The emulation of CUDA graphs: replays, what they bake in, and what a capture refuses."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.kernels.cuda.graphs import Graphs
from tests.deploy.recorded_graphs import RecordedGraphs

CPU = torch.device("cpu")


class Attention:
    """A pass in small: reads and writes a cache whose length stands in a tensor."""

    def __init__(self, device: torch.device = CPU) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(24, 8, generator=generator).to(device)
        self.x = torch.zeros(3, 8, device=device)
        self.out = torch.zeros(3, 8, device=device)
        self.best = torch.zeros(3, dtype=torch.int64, device=device)
        self.cache = torch.zeros(2, 16, 8, device=device)
        self.length = torch.zeros((), dtype=torch.int64, device=device)

    def run(self) -> None:
        """Views, composed operations, writes in place, tensors made on the way."""
        query, *new = F.linear(self.x, self.weight).chunk(3, -1)
        rows = self.length + torch.arange(3, device=self.x.device)
        self.cache.index_copy_(1, rows, torch.stack(new))
        columns = torch.arange(16, device=self.x.device)
        mask = columns <= rows[:, None]
        hidden = torch.zeros(3, 16, device=self.x.device)
        hidden[:, :] = float("-inf")
        mask = hidden.masked_fill(mask, 0.0)
        attended = F.scaled_dot_product_attention(query, *self.cache, attn_mask=mask)
        self.out.copy_(F.rms_norm(attended + self.x, (8,)))
        self.best.copy_(self.out.argmax(-1))
        self.length.add_(1)

    def answers(self, graphs: Graphs, num_calls: int) -> list[list[Tensor]]:
        """What each of several calls leaves, over other inputs each."""
        generator = torch.Generator().manual_seed(1)
        answers = []
        for _ in range(num_calls):
            self.x.copy_(torch.randn(3, 8, generator=generator))
            graphs.run(("pass", 3), self.run)
            left = (self.out, self.best, self.cache, self.length)
            answers.append([tensor.clone() for tensor in left])
        return answers


def assert_same(found: list[list[Tensor]], other: list[list[Tensor]]) -> None:
    for left, right in zip(found, other, strict=True):
        for a, b in zip(left, right, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_replays_do_what_the_function_does_once_a_call() -> None:
    graphs = RecordedGraphs(checked=True)
    assert_same(Attention().answers(graphs, 5), Attention().answers(Graphs(CPU), 5))
    assert (graphs.counts.captures, graphs.counts.replays) == (1, 4)
    assert graphs.num_graphs == 1
    assert graphs.num_bytes > 0


def test_a_number_of_the_host_is_baked_in() -> None:
    """What the emulation is for: here it gives a wrong answer, as a GPU would."""
    out, numbers = torch.zeros(()), iter(range(10, 20))
    graphs = RecordedGraphs()
    seen = []
    for _ in range(4):
        graphs.run("key", lambda: out.fill_(next(numbers)))
        seen.append(out.item())
    # The first call runs, the capture reads the next number, which all replays repeat.
    assert seen == [10, 11, 11, 11]


def test_a_tensor_of_an_earlier_call_is_baked_in() -> None:
    out, graphs, seen = torch.zeros(2), RecordedGraphs(), []
    for number in range(3):
        fresh = torch.full((2,), float(number))
        graphs.run("key", lambda fresh=fresh: out.copy_(fresh))
        seen.append(out.tolist())
    assert seen == [[0, 0], [0, 0], [0, 0]]


def test_what_a_capture_makes_holds_nothing_until_it_is_replayed() -> None:
    kept: dict[str, Tensor] = {}
    out, x = torch.zeros(2), torch.ones(2)

    def function() -> None:
        kept["doubled"] = x * 2
        out.copy_(kept["doubled"])

    graphs = RecordedGraphs()
    graphs.run("key", function)
    assert out.tolist() == [2, 2]
    assert kept["doubled"].isnan().all()
    graphs.run("key", function)
    assert kept["doubled"].tolist() == [2, 2]


def test_memory_that_nothing_wrote_holds_nothing() -> None:
    out, graphs = torch.zeros(3), RecordedGraphs()

    def function() -> None:
        part = torch.empty(3, device=out.device)
        part[:2] = 1.0
        out.copy_(part)

    graphs.run("key", function)
    graphs.run("key", function)
    assert out[:2].tolist() == [1, 1]
    assert out[2].isnan()


def test_launches_in_the_interpreter_of_triton_are_recorded() -> None:
    pytest.importorskip("triton")
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    def add_one(x, out, length, num_numbers: tl.constexpr):  # type: ignore[no-untyped-def]
        places = tl.arange(0, num_numbers)
        is_first = places < tl.load(length)
        tl.store(out + places, tl.load(x + places, mask=is_first, other=0.0) + 1, mask=is_first)

    kernel = InterpretedFunction(add_one)
    x, out, length = torch.zeros(4), torch.zeros(4), torch.tensor(4)

    def function() -> None:
        doubled = x * 2
        kernel[(1,)](doubled, doubled, length, 4)
        out.copy_(doubled)

    graphs, seen = RecordedGraphs(checked=True), []
    for number in range(3):
        x.fill_(number)
        length.fill_(4 - number)
        graphs.run("key", function)
        seen.append(out.tolist())
    assert seen == [[1, 1, 1, 1], [3, 3, 3, 2], [5, 5, 4, 4]]


def test_checked_graphs_name_the_one_that_does_something_else() -> None:
    out, other, numbers = torch.zeros(()), torch.zeros(()), iter(range(10))
    graphs = RecordedGraphs(checked=True)
    graphs.run("baked", lambda: out.fill_(next(numbers)))
    with pytest.raises(AssertionError, match="baked: a replay writes other numbers"):
        graphs.run("baked", lambda: out.fill_(next(numbers)))
    graphs.run("moved", lambda: out.fill_(1))
    with pytest.raises(AssertionError, match="moved: a replay leaves 1 tensors"):
        graphs.run("moved", lambda: other.fill_(1))


def test_a_comparison_leaves_everything_as_it_was() -> None:
    plain, checked = RecordedGraphs(), RecordedGraphs(checked=True)
    assert_same(Attention().answers(plain, 4), Attention().answers(checked, 4))


def test_graphs_do_not_run_within_another() -> None:
    graphs = RecordedGraphs()
    with pytest.raises(AssertionError, match="inner: run by the function of another graph"):
        graphs.run("outer", lambda: graphs.run("inner", lambda: None))


X, MASK, NUMBER = torch.ones(4, 4), torch.ones(4, dtype=torch.bool), torch.tensor(2)
REFUSED: dict[str, Callable[[], object]] = {
    "item": lambda: X[0, 0].item(),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "a branch": lambda: 1 if NUMBER > 1 else 0,
    "float": lambda: float(NUMBER),
    "an end of a slice": lambda: X[:NUMBER],
    "a value to fill with": lambda: torch.full((2,), NUMBER, device=X.device),
    "cpu": lambda: X.cpu(),
    "to cpu": lambda: X.to("cpu"),
    "equal": lambda: torch.equal(X, X),
    "printing": lambda: f"{X}",
    "nonzero": lambda: MASK.nonzero(),
    "unique": lambda: X.unique(),
    "masked_select": lambda: X.masked_select(MASK),
    "a mask as index": lambda: X[MASK],
    "a mask as place": lambda: X.__setitem__(MASK, 2.0),
    "repeats": lambda: X.repeat_interleave(NUMBER.expand(4), 0),
    "a list of numbers": lambda: torch.tensor([1, 2], device=X.device),
    "a list as index": lambda: X[[0, 1]],
    "a tensor on the host": lambda: torch.arange(4),
    "a draw": lambda: torch.rand(4, device=X.device),
    "multinomial": lambda: X.multinomial(1),
}


@pytest.mark.parametrize("read", REFUSED.values(), ids=list(REFUSED))
def test_what_a_capture_refuses_raises(read: Callable[[], object]) -> None:
    with pytest.raises(UserError, match="CUDA graph cannot be captured: tree pass 24 "):
        RecordedGraphs().run(("tree pass", 24), read)


ALLOWED: dict[str, Callable[[], object]] = {
    "a part of a tensor": lambda: X[1:, NUMBER.expand(3)],
    "a choice by a mask": lambda: torch.where(MASK, X, 0.0).masked_fill_(~MASK, 1.0),
    "a number on the host": lambda: X.mul(2).add_(1)[0].fill_(0.5),
    "made on the device": lambda: torch.arange(4, device=X.device) + X.new_zeros(4),
    "best of a row": lambda: (
        X.topk(2).values.sort(stable=True).indices.gather(0, NUMBER[None, None] - 2)
    ),
    "no change of device": lambda: X.to(X.device, torch.float64),
    "running sums": lambda: X.softmax(-1).cumsum(-1).argmax(-1),
}


@pytest.mark.parametrize("call", ALLOWED.values(), ids=list(ALLOWED))
def test_what_a_capture_allows_does_not_raise(call: Callable[[], object]) -> None:
    graphs = RecordedGraphs()
    graphs.run("key", call)
    graphs.run("key", call)
    assert graphs.counts.replays == 1
