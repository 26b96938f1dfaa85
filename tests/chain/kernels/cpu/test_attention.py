"""The attention kernels against float64, and to the bit against themselves in every arrangement."""

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polybasic.chain.kernels.cpu.build import SOURCE_FOLDER
from polybasic.chain.kernels.cpu.compilers import find_compiler
from polybasic.chain.kernels.cpu.instruction_sets import (
    NATIVE,
    InstructionSet,
    known_sets,
    wanted_set,
)

HARNESS = Path(__file__).with_name("attention_harness.cpp")
SETS = (
    wanted_set() or InstructionSet(NATIVE),
    *(isa for isa in known_sets() if isa.name == "portable"),
)
# of a float32 sum over a few hundred positions; of bfloat16 weights, relative to the values
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = (torch.float32, torch.bfloat16)


class NativeShape(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int)
            for name in ("num_kv_heads", "query_groups", "head_dim", "capacity")
        ),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int),
        ("sinks", ctypes.c_int),
    ]


class NativeRows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("num_rows", "start", "prefix")),
        ("path_ends", ctypes.c_void_p),
        ("paths", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Shape:
    """The shape of a layer: K key/value heads, G queries for each, of size H."""

    K: int = 2
    G: int = 3
    H: int = 64
    scale: float = 0.2
    softcap: float = 0.0
    window: int = 0
    sinks: int = 0

    def native(self, capacity: int) -> NativeShape:
        return NativeShape(
            self.K, self.G, self.H, capacity, self.scale, self.softcap, self.window, self.sinks
        )


@dataclass(frozen=True)
class Pass:
    """Rows of one pass: for each, the rows of the cache that it sees, by position, itself last."""

    start: int
    prefix: int
    seen: Sequence[Sequence[int]]
    is_causal: bool = False


def causal(start: int, num_rows: int) -> Pass:
    seen = [list(range(start + row + 1)) for row in range(num_rows)]
    return Pass(start, start, seen, is_causal=True)


def tree(start: int, prefix: int, paths: Sequence[Sequence[int]]) -> Pass:
    return Pass(start, prefix, [[*range(prefix), *path] for path in paths])


@pytest.fixture(scope="module", params=SETS, ids=lambda isa: isa.name)
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    compiler = find_compiler()
    assert compiler is not None, "there is no C++ compiler: install g++ to run these tests"
    built = tmp_path_factory.mktemp("attention") / "harness.so"
    flags = [*compiler.flags(request.param), "-shared", f"-I{SOURCE_FOLDER}", "-o", str(built)]
    subprocess.run([*compiler.command, str(HARNESS), *flags], check=True)
    return ctypes.CDLL(str(built))


def make_inputs(
    shape: Shape, num_rows: int, capacity: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Queries [R, K * G, H] and a cache [2K, capacity, H]."""
    generator = torch.Generator().manual_seed(num_rows + capacity)
    queries = torch.randn(num_rows, shape.K * shape.G, shape.H, generator=generator)
    cache = torch.randn(2 * shape.K, capacity, shape.H, generator=generator)
    return queries, cache.to(dtype)


def run(
    library: ctypes.CDLL,
    shape: Shape,
    done: Pass,
    queries: Tensor,
    cache: Tensor,
    num_threads: int = 1,
    is_split: bool | None = None,
) -> Tensor:
    """What the kernels make of a pass [R, K * G, H]; NaN where they write nothing."""
    paths = [seen[done.prefix :] for seen in done.seen]
    ends = torch.tensor([len(path) for path in paths], dtype=torch.int32).cumsum(0).int()
    flat = torch.tensor([row for path in paths for row in path], dtype=torch.int32)
    pointers = (None, None) if done.is_causal else (ends.data_ptr(), flat.data_ptr())
    rows = NativeRows(len(done.seen), done.start, done.prefix, *pointers)
    out = torch.full_like(queries, float("nan"))
    was_split = library.test_attend(
        int(cache.dtype == torch.bfloat16),
        ctypes.byref(shape.native(cache.shape[1])),
        ctypes.byref(rows),
        ctypes.c_void_p(queries.contiguous().data_ptr()),
        ctypes.c_void_p(cache.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        num_threads,
    )
    assert was_split >= 0, "the kernels wrote beyond their workspace"
    assert is_split is None or was_split == is_split
    return out


def reference(shape: Shape, done: Pass, queries: Tensor, cache: Tensor) -> Tensor:
    """The same in float64; queries as the kernels round them."""
    keys, values = cache.double().split(shape.K)
    rounded = queries.to(cache.dtype).double().view(-1, shape.K, shape.G, shape.H)
    results = []
    for row, seen in enumerate(done.seen):
        position = len(seen) - 1
        positions = torch.arange(len(seen))
        scores = torch.einsum("kgh,kth->kgt", rounded[row], keys[:, list(seen)]) * shape.scale
        if shape.softcap:
            scores = shape.softcap * (scores / shape.softcap).tanh()
        if shape.window:
            is_hidden = (positions <= position - shape.window) & (positions >= shape.sinks)
            scores[:, :, is_hidden] = float("-inf")
        results.append(scores.softmax(-1) @ values[:, list(seen)])
    return torch.stack(results).view(queries.shape)


def scattered_tree(start: int, prefix: int, num_rows: int) -> Pass:
    """Rows whose ancestors lie among rows of earlier passes, in no order."""
    generator = torch.Generator().manual_seed(start)
    paths = []
    for row in range(num_rows):
        depth = row % (start - prefix + 1)
        above = torch.randperm(start - prefix, generator=generator)[:depth] + prefix
        paths.append([*above.tolist(), start + row])
    return tree(start, prefix, paths)


FEATURES = {
    "plain": Shape(),
    "one query a head": Shape(K=3, G=1),
    "many groups": Shape(K=1, G=7),
    "soft-capped": Shape(softcap=2.0),
    "windowed": Shape(window=21),
    "wide window": Shape(window=300),
    "window and sinks": Shape(window=21, sinks=5),
    "sinks past a segment": Shape(K=1, window=21, sinks=270),
    "head of 16": Shape(H=16),
    "head of 80": Shape(H=80),
    "head of 96": Shape(H=96, G=2),
    "head of 128": Shape(H=128, softcap=5.0, window=40),
    "head of 240": Shape(K=1, H=240, scale=0.1),
    "head of 256": Shape(K=1, G=2, H=256, scale=0.1),
}
PASSES = {
    "prompt": causal(0, 37),
    "one row": causal(300, 1),
    "end of the cache": causal(280, 31),
    "over segments": causal(500, 30),
    "tree": scattered_tree(19, 7, 9),
    "tree past a segment": scattered_tree(265, 250, 26),
    "tree without prefix": scattered_tree(6, 0, 5),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", FEATURES.values(), ids=FEATURES.keys())
def test_is_attention(library: ctypes.CDLL, shape: Shape, dtype: torch.dtype) -> None:
    for done in PASSES.values():
        capacity = done.start + len(done.seen)
        queries, cache = make_inputs(shape, len(done.seen), capacity, dtype)
        out = run(library, shape, done, queries, cache)
        expected = reference(shape, done, queries, cache)
        assert (out - expected).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("left_out", ["scale", "softcap", "window", "sinks"])
def test_every_setting_counts(library: ctypes.CDLL, left_out: str, dtype: torch.dtype) -> None:
    shape, done = Shape(softcap=1.0, window=21, sinks=5), causal(280, 3)
    queries, cache = make_inputs(shape, 3, 283, dtype)
    out = run(library, shape, done, queries, cache)
    other = replace(shape, **{left_out: 1.0 if left_out == "scale" else 0})
    assert (out - reference(other, done, queries, cache)).abs().max() > 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(K=1, G=1, H=80, window=30, sinks=4, softcap=3.0), Shape(G=1, H=128)],
    ids=str,
)
def test_attention_is_batch_invariant(
    library: ctypes.CDLL, shape: Shape, dtype: torch.dtype
) -> None:
    start, num_rows = 241, 40  # over the end of a segment
    queries, cache = make_inputs(shape, num_rows, start + num_rows, dtype)
    together = run(library, shape, causal(start, num_rows), queries, cache)
    for row in (0, 1, 14, 15, 16, 30, 39):
        alone = run(library, shape, causal(start + row, 1), queries[row : row + 1], cache)
        assert torch.equal(alone[0], together[row])
    for cut in (7, 24):
        head = run(library, shape, causal(start, cut), queries[:cut], cache)
        tail = run(library, shape, causal(start + cut, num_rows - cut), queries[cut:], cache)
        assert torch.equal(torch.cat([head, tail]), together)
    other = queries.clone()
    other[:39] += 1
    assert torch.equal(run(library, shape, causal(start, num_rows), other, cache)[39], together[39])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [Shape(), Shape(K=1, G=1, H=80, window=30, sinks=4)], ids=str)
def test_a_path_is_the_same_to_the_bit_wherever_it_lies(
    library: ctypes.CDLL, shape: Shape, dtype: torch.dtype
) -> None:
    start, depth = 245, 20
    queries, cache = make_inputs(shape, depth, start + 3 * depth, dtype)
    in_order = run(library, shape, causal(start, depth), queries, cache)
    chain = tree(start, start, [range(start, start + row + 1) for row in range(depth)])
    assert torch.equal(run(library, shape, chain, queries, cache), in_order)
    # the same tokens, the deepest first, after rows that nobody sees, and one row a pass
    place = torch.arange(start + 3 * depth - 1, start + 2 * depth - 1, -1)
    moved = cache.clone()
    moved[:, place] = cache[:, start : start + depth]
    moved[:, start : start + 2 * depth] = float("nan")
    paths = [place[: row + 1].tolist() for row in range(depth)]
    assert torch.equal(run(library, shape, tree(0, start, paths), queries, moved), in_order)
    for row in (0, 10, 11, 19):
        alone = tree(0, start, [paths[row]])
        assert torch.equal(
            run(library, shape, alone, queries[row : row + 1], moved)[0], in_order[row]
        )
    # a shorter prefix, with what was in it at the head of the paths
    longer = [[*range(start - 9, start), *path] for path in paths]
    assert torch.equal(run(library, shape, tree(0, start - 9, longer), queries, moved), in_order)
    paths[5] = paths[5][::-1][1:] + paths[5][-1:]  # control: another order of positions
    changed = run(library, shape, tree(0, start, paths), queries, moved)
    assert [row for row in range(depth) if not torch.equal(changed[row], in_order[row])] == [5]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [Shape(), Shape(window=300, sinks=3), Shape(K=5, G=1, H=16)], ids=str
)
def test_threads_do_not_change_a_bit(
    library: ctypes.CDLL, shape: Shape, dtype: torch.dtype
) -> None:
    for done, is_split in (
        (causal(1100, 1), True),
        (causal(600, 30), None),
        (causal(3, 200), False),
    ):
        capacity = done.start + len(done.seen)
        queries, cache = make_inputs(shape, len(done.seen), capacity, dtype)
        alone = run(library, shape, done, queries, cache, is_split=False)
        for num_threads in (2, 3):
            assert torch.equal(run(library, shape, done, queries, cache, num_threads), alone)
        # seven threads have more than a head each to do only if the heads are cut by segments
        assert torch.equal(run(library, shape, done, queries, cache, 7, is_split), alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_a_row_does_not_see_may_be_anything(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    shape, done = Shape(), causal(250, 9)
    queries, cache = make_inputs(shape, 9, 300, dtype)
    out = run(library, shape, done, queries, cache)
    cache[:, 255:] = float("nan")
    assert torch.equal(run(library, shape, done, queries, cache)[:5], out[:5])
    assert run(library, shape, done, queries, cache)[5:].isnan().all()


def test_large_scores_do_not_overflow(library: ctypes.CDLL) -> None:
    shape, done = Shape(scale=30.0), causal(600, 2)
    for dtype in DTYPES:
        queries, cache = make_inputs(shape, 2, 602, dtype)
        out = run(library, shape, done, queries, cache)
        # scores of some thousands are known to a few 1e-4
        assert (out - reference(shape, done, queries, cache)).abs().max() < 1e-2


def test_results_can_be_bfloat16(library: ctypes.CDLL) -> None:
    shape, done = Shape(H=80), causal(30, 4)
    queries, cache = make_inputs(shape, 4, 34, torch.bfloat16)
    out = torch.empty_like(queries, dtype=torch.bfloat16)
    rows = NativeRows(4, 30, 30, None, None)
    library.test_attend_rounded(
        ctypes.byref(shape.native(34)),
        ctypes.byref(rows),
        ctypes.c_void_p(queries.data_ptr()),
        ctypes.c_void_p(cache.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        1,
    )
    assert torch.equal(out, run(library, shape, done, queries, cache).bfloat16())


def test_which_heads_there_are_kernels_for(library: ctypes.CDLL) -> None:
    served = [H for H in range(300) if library.test_supports(ctypes.byref(Shape(H=H).native(1)))]
    assert served == list(range(16, 257, 16))


def test_vector_functions(library: ctypes.CDLL) -> None:
    def call(name: str, *arguments: Tensor | float) -> None:
        getattr(library, name)(
            *(
                ctypes.c_float(x) if isinstance(x, float) else ctypes.c_void_p(x.data_ptr())
                for x in arguments
            )
        )

    x, out = torch.linspace(-86.9, 87.9, 16), torch.empty(16)
    call("test_exponential", x, out)
    assert (out / x.double().exp() - 1).abs().max() < 2e-7
    x = torch.tensor([0.0, -87.1, -1e30, -float("inf")] * 4)
    call("test_exponential", x, out)
    assert out.tolist() == [1, 0, 0, 0] * 4
    x = torch.tensor([0.0, 1e-3, -0.5, 3.0, -40.0, 1e4, -1e4, 7.0] * 2)
    call("test_softcapped", x, 5.0, out)
    assert (out - 5 * (x.double() / 5).tanh()).abs().max() < 2e-6
    vectors, (sums, each, largest) = torch.randn(16, 16), torch.empty(3, 16)
    call("test_sums", vectors, sums, each, largest)
    assert torch.equal(sums, each)
    assert (sums - vectors.double().sum(1)).abs().max() < 1e-5
    assert torch.equal(largest, vectors.max(1).values)
