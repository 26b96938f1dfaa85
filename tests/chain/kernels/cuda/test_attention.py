"""Attention in Triton against PyTorch's operations, which run in float32 on the same numbers."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from polybasic.chain.formats.checkpoints.decoder_config import LayerKind
from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.cuda.attention import _tickets, attention, attention_by
from polybasic.chain.kernels.cuda.attention_plan import AttentionLayer, AttentionPlan, Gpu
from polybasic.chain.kernels.cuda.graphs import Graphs
from polybasic.chain.kernels.torch.operations import Heads, Norm, Operations
from polybasic.chain.kernels.torch.rows import DeviceRows, device_consecutive_rows

pytestmark = pytest.mark.gpu
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# no GPU has shared memory for float32
DTYPES = [torch.float16, torch.bfloat16]
DTYPES = DTYPES if HAS_GPU else [torch.float32, *DTYPES]
# the grid of one dtype is run each time, those of the others are proof
GRIDS = [
    dtype if place == 0 else pytest.param(dtype, marks=pytest.mark.proof)
    for place, dtype in enumerate(DTYPES)
]
# of values around 1, which the kernels round as often as they must
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """A layer, and a pass over it; K key/value heads, G queries for each, of size H."""

    K: int = 2
    G: int = 2
    H: int = 64
    num_rows: int = 5
    first: int = 0
    prefix: int = 70
    capacity: int = 160
    shape: str = "tree"
    softcap: float | None = None
    window: Window | None = None
    kind_window: int | None = None
    has_norms: bool = False
    dtype: torch.dtype = DTYPES[0]

    def plan(self) -> AttentionPlan:
        layer = AttentionLayer(self.K, self.G, self.H, self.capacity)
        return AttentionPlan.of(Gpu.of(DEVICE), layer, self.num_rows)


@dataclass
class Inputs:
    """The inputs of attention, and the contents of the cache."""

    qkv: Tensor
    cache: Tensor
    rows: DeviceRows
    heads: Heads
    rotation: tuple[Tensor, Tensor]
    kind: LayerKind

    def run(self, plan: AttentionPlan | None = None) -> tuple[Tensor, Tensor]:
        """What the kernels return, and the cache afterwards."""
        cache = self.cache.clone()
        arguments = (
            self.qkv,
            cache,
            self.rows,
            self.rows.span_of(self.kind),
            self.heads,
            self.rotation,
        )
        return (attention(*arguments) if plan is None else attention_by(plan, *arguments)), cache

    def expected(self) -> tuple[Tensor, Tensor]:
        """The same by PyTorch's operations in float32."""
        norms = [
            None if norm is None else Norm(norm.weight.float(), norm.eps)
            for norm in (self.heads.query_norm, self.heads.key_norm)
        ]
        heads = replace(self.heads, query_norm=norms[0], key_norm=norms[1])
        cache = self.cache.float()
        cos, sin = (table.float() for table in self.rotation)
        span = self.rows.span_of(self.kind)
        out = Operations().attention(self.qkv.float(), cache, self.rows, span, heads, (cos, sin))
        return out, cache


def made(case: Case, seed: int = 0) -> Inputs:
    """Random inputs; what is in the cache after the pass is large."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, case.dtype)

    end = case.first + case.num_rows
    columns, visible = _visible(case, generator)
    cache = normal(2 * case.K, case.capacity, case.H)
    cache[:, case.prefix + end :] *= 300
    angle = torch.outer(
        torch.arange(case.capacity + 64.0), torch.rand(case.H // 2, generator=generator)
    )
    cos, sin = angle.cos(), angle.sin()
    rotation = torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]
    norms = [Norm(1 + normal(case.H) / 4, 1e-5) if case.has_norms else None for _ in range(2)]
    return Inputs(
        normal(case.num_rows, case.K * (case.G + 2) * case.H),
        cache,
        DeviceRows(
            torch.tensor(case.prefix, device=DEVICE),
            (case.prefix + columns[case.first :]).to(DEVICE),
            (case.prefix + columns).to(DEVICE),
            visible.to(DEVICE),
            case.window,
        ),
        Heads(case.K, case.G, case.H, 0.8 * case.H**-0.5, case.softcap, *norms),
        (rotation[0].to(DEVICE, case.dtype), rotation[1].to(DEVICE, case.dtype)),
        LayerKind({}, case.kind_window),
    )


def _visible(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Depths [P] of the provisional rows, and which of them the rows of the pass see [R, P]."""
    end = case.first + case.num_rows
    parents = torch.arange(end) - 1
    if case.shape == "tree":
        parents = (torch.rand(end, generator=generator) * torch.arange(end)).long()
        parents[0] = -1
    depths, visible = torch.zeros(end, dtype=torch.long), torch.eye(end, dtype=torch.bool)
    for row, parent in enumerate(parents.tolist()):
        if parent >= 0:
            depths[row] = depths[parent] + 1
            visible[row] |= visible[parent]
    return depths, visible[case.first :]


LAYERS = {
    "one query a head": Case(K=3, G=1),
    "many groups": Case(K=1, G=7, num_rows=11),
    "head of 8": Case(H=8),
    "head of 80": Case(H=80),
    "head of 96": Case(H=96),
    "head of 128": Case(H=128, G=1),
    "head of 256": Case(K=1, H=256, num_rows=3),
    "soft-capped": Case(softcap=2.0),
    "head norms": Case(has_norms=True),
    "window": Case(kind_window=21),
    "window and sinks": Case(window=Window(sinks=5, tokens=21), prefix=140, capacity=160),
    "sinks past a block": Case(window=Window(sinks=70, tokens=21), prefix=260, capacity=280),
    "kind's window narrower": Case(window=Window(sinks=5, tokens=41), kind_window=9),
    "everything": Case(
        H=96, softcap=5.0, has_norms=True, window=Window(sinks=3, tokens=130), prefix=333,
        capacity=400, first=7,
    ),
}  # fmt: skip
PASSES = {
    "one row": Case(num_rows=1),
    "block": Case(num_rows=9, shape="block"),
    "nothing before": Case(prefix=0),
    "one before": Case(prefix=1),
    "one block before": Case(prefix=64),
    "draft level": Case(num_rows=4, first=8),
    "draft level, nothing before": Case(num_rows=10, first=50, prefix=0),
    "over blocks of new rows": Case(num_rows=40, first=30),
    "tiles of queries": Case(K=1, G=5, num_rows=40),
    "end of the cache": Case(prefix=155),
    "parts": Case(prefix=1000, capacity=1400, num_rows=6),
    "parts and a window": Case(prefix=1300, capacity=1400, window=Window(sinks=100, tokens=700)),
    "parts of a wide draft": Case(prefix=450, capacity=1400, first=190, num_rows=10),
}


def assert_is_attention(case: Case, plan: AttentionPlan | None = None, seed: int = 0) -> None:
    inputs = made(case, seed)
    out, cache = inputs.run(plan)
    expected, expected_cache = inputs.expected()
    tolerance = TOLERANCE[case.dtype]
    assert (out - expected).abs().max() < tolerance
    written = slice(case.prefix + case.first, case.prefix + case.first + case.num_rows)
    new, expected_new = cache[:, written], expected_cache[:, written]
    assert ((new - expected_new).abs() <= tolerance * (1 + expected_new.abs())).all()
    cache[:, written] = inputs.cache[:, written]
    assert torch.equal(cache, inputs.cache)


@pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("dtype", GRIDS, ids=str)
def test_layers(case: Case, dtype: torch.dtype) -> None:
    assert_is_attention(replace(case, dtype=dtype))


@pytest.mark.parametrize("case", PASSES.values(), ids=PASSES.keys())
@pytest.mark.parametrize("dtype", GRIDS, ids=str)
def test_passes(case: Case, dtype: torch.dtype) -> None:
    assert_is_attention(replace(case, dtype=dtype))


@pytest.mark.parametrize("prefix", [0, 1, 64, 65, 1290])
def test_one_plan_serves_all_lengths(prefix: int) -> None:
    case = Case(K=1, prefix=prefix, capacity=1300)
    assert_is_attention(case, replace(case.plan(), parts=5))


@pytest.mark.parametrize("has_window", [False, True])
@pytest.mark.parametrize(("parts", "combines"), [(1, True), (2, False), (3, True), (9, False)])
def test_parts(parts: int, combines: bool, has_window: bool) -> None:
    combines ^= has_window
    window = Window(sinks=4, tokens=500) if has_window else None
    case = Case(K=1, G=3, num_rows=30, prefix=1100, capacity=1300, window=window)
    plan = replace(case.plan(), tile=32, num_tiles=3, parts=parts, combines=combines)
    assert_is_attention(case, plan)
    assert not _tickets(DEVICE).any()


def test_is_attention_of_random_trees() -> None:
    for seed in range(0, 10, 2):
        assert_is_attention(
            Case(K=1, num_rows=3 + 4 * seed, first=seed, prefix=17 * seed, capacity=210), seed=seed
        )


def test_rows_beyond_the_prefix_are_not_read() -> None:
    case = Case(prefix=500, first=3, num_rows=6, capacity=700)
    inputs = made(case)
    out, _ = inputs.run()
    inputs.cache[:, case.prefix + case.first :] = float("nan")
    assert torch.equal(inputs.run()[0], out)
    # the rows before are read
    inputs.cache[:, case.prefix + case.first - 1] = 7
    assert not torch.equal(inputs.run()[0], out)


def test_a_row_sees_its_ancestors_and_no_others() -> None:
    inputs = made(Case(num_rows=12, first=4))
    out, _ = inputs.run()
    inputs.rows.visible[5, 2] ^= True
    changed = (inputs.run()[0] != out).any(-1)
    assert changed.nonzero().flatten().tolist() == [5]


def test_a_window_hides_by_row() -> None:
    case = Case(window=Window(sinks=2, tokens=40), prefix=300, capacity=320, num_rows=6)
    inputs = made(replace(case, shape="block"))
    out, _ = inputs.run()
    for place, readers in ((1, 6), (2, 0), (260, 0), (261, 1), (263, 3), (299, 6)):
        changed = made(replace(case, shape="block"))
        changed.cache[:, place] += 1
        assert (changed.run()[0] != out).any(-1).tolist() == [row < readers for row in range(6)]


def test_padded_rows_may_hold_anything() -> None:
    inputs = made(Case(num_rows=8, prefix=200, capacity=210, window=Window(sinks=2, tokens=90)))
    out, _ = inputs.run()
    inputs.rows.positions[6:] = torch.tensor([10**6, -3])
    inputs.rows.visible[6:] = False
    inputs.qkv[6:] = 50
    assert torch.equal(inputs.run()[0][:6], out[:6])


def test_rows_that_see_nothing_are_0() -> None:
    inputs = made(Case(num_rows=4, prefix=0))
    inputs.rows.visible[2] = False
    out, _ = inputs.run()
    assert out[2].eq(0).all()
    assert out[[0, 1, 3]].ne(0).all()


def test_nothing_is_written_beyond_the_cache() -> None:
    case = Case(num_rows=8, prefix=156, capacity=160)
    inputs = made(case)
    numbers = inputs.cache.numel()
    around = torch.full((numbers + 2048,), 3.0, device=DEVICE, dtype=case.dtype)
    cache = around[1024 : 1024 + numbers].view_as(inputs.cache)
    cache.copy_(inputs.cache)
    span = inputs.rows.span_of(inputs.kind)
    out = attention(inputs.qkv, cache, inputs.rows, span, inputs.heads, inputs.rotation)
    assert around[:1024].eq(3).all()
    assert around[1024 + numbers :].eq(3).all()
    assert cache[:, 156:].ne(inputs.cache[:, 156:]).all()
    assert torch.equal(cache[:, :156], inputs.cache[:, :156])
    assert out.isfinite().all()


def test_tensors_may_be_views() -> None:
    inputs = made(Case(num_rows=4, first=4))
    position = inputs.rows.positions[:1]
    inputs.rows = replace(inputs.rows, positions=position.repeat(4))
    out, _ = inputs.run()
    buffer = torch.zeros(9, 30, dtype=torch.bool, device=DEVICE)
    buffer[2:6, 7:23:2] = inputs.rows.visible
    visible = buffer[2:6, 7:23:2]
    inputs.rows = replace(inputs.rows, positions=position.expand(4), visible=visible)
    assert torch.equal(inputs.run()[0], out)


def test_a_captured_pass_serves_all_lengths() -> None:
    # the longest prefix, for what lies behind it is large
    case = Case(K=1, num_rows=9, prefix=1015, capacity=1024)
    if HAS_GPU:
        case = Case(K=8, G=4, H=128, num_rows=24, prefix=4072, capacity=4096, dtype=torch.bfloat16)
    inputs = made(case)
    prefix = torch.tensor(0, device=DEVICE)
    cache, out = inputs.cache.clone(), torch.zeros_like(inputs.run()[0])
    graphs = Graphs(DEVICE)

    def run() -> None:
        rows = device_consecutive_rows(prefix, case.num_rows)
        span = rows.span_of(inputs.kind)
        out.copy_(attention(inputs.qkv, cache, rows, span, inputs.heads, inputs.rotation))

    graphs.run("pass", run)
    for length in (0, 100, case.prefix // 2, case.prefix):
        prefix.fill_(length)
        cache.copy_(inputs.cache)
        graphs.run("pass", run)
        replayed = out.clone()
        cache.copy_(inputs.cache)
        run()
        assert torch.equal(replayed, out)
        inputs.rows = device_consecutive_rows(prefix, case.num_rows)
        assert (replayed - inputs.expected()[0]).abs().max() < TOLERANCE[case.dtype]
    assert graphs.counts.replays == (4 if HAS_GPU else 0)


@pytest.mark.gpu(needed=True)
def test_results_do_not_depend_on_the_program_that_ends_last() -> None:
    inputs = made(Case(K=8, H=128, num_rows=8, prefix=3900, capacity=4096, dtype=torch.float16))
    out, _ = inputs.run()
    assert all(torch.equal(inputs.run()[0], out) for _ in range(200))
