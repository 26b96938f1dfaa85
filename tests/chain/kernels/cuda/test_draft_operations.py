"""Draws in Triton, and a whole round between passes by kernels against PyTorch's operations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from polybasic.chain.kernels.cuda import candidates, tree_kernels
from polybasic.chain.kernels.cuda.draft_operations import DraftOperations
from polybasic.chain.kernels.cuda.draw_kernels import draw
from polybasic.chain.kernels.cuda.graphs import Graphs
from polybasic.chain.kernels.torch.operations import Operations
from polybasic.chain.kernels.torch.rows import DeviceRows
from tests.chain.kernels.cuda.compiling import CAPABILITIES, Request, compiled
from tests.deploy.recorded_graphs import RecordedGraphs
from tests.deploy.runtime.drafters.expanding import expanded

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIGHEST = 1 - 2.0**-24
"""The greatest number that `torch.rand` gives."""


def midpoints(count: int) -> Tensor:
    """Uniform numbers that stand for all of [0, 1)."""
    return ((torch.arange(count, device=DEVICE, dtype=torch.float64) + 0.5) / count).float()


@pytest.mark.parametrize("num_outputs", [3, 1000, 1024, 2500])
def test_draws_have_the_law_of_their_row(num_outputs: int) -> None:
    generator = torch.Generator().manual_seed(2)
    row = torch.randn(num_outputs, generator=generator).mul(2).softmax(0)
    row[torch.rand(num_outputs, generator=generator) < 0.3] = 0
    row[0], row = 0, row.to(DEVICE)
    count = 100
    drawn = draw(5 * row.expand(count, -1), midpoints(count))
    shares = torch.bincount(drawn, minlength=num_outputs) / count
    assert (shares - row / row.sum()).abs().max() < 1.5 / count
    assert not shares[row == 0].any()
    assert bool((drawn.diff() >= 0).all()), "inversion keeps the order of the numbers"


def test_no_number_draws_an_output_of_probability_0() -> None:
    rows = torch.zeros(3, 3000, device=DEVICE)
    rows[0, 0] = rows[1, 1500] = rows[2, 2047] = 1.0
    for uniform in (0.0, 0.5, HIGHEST):
        uniforms = torch.full((3,), uniform, device=DEVICE)
        assert draw(rows, uniforms).tolist() == [0, 1500, 2047]
    tiny = torch.full((1, 3000), 1e-7, device=DEVICE)
    tiny[0, 2000:] = 0
    highest = torch.tensor([HIGHEST], device=DEVICE)
    assert draw(tiny, highest).tolist() == [1999]
    nothing = torch.stack([torch.zeros(3000), torch.full((3000,), float("nan"))]).to(DEVICE)
    assert draw(nothing, midpoints(2)).tolist() == [0, 0]


def test_draws_are_nearly_those_of_torch() -> None:
    rows = torch.rand(5, 4000, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    found, expected = draw(rows, midpoints(5)), Operations().draw(rows, midpoints(5))
    assert (found - expected).abs().max() <= 1
    assert len(set(expected.tolist())) == 5


class Pass:
    """A model of tensors alone: a row's state is mixed of its token and of all that it sees."""

    def __init__(self, vocab_size: int, width: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(vocab_size, width, generator=generator).to(DEVICE)
        self.mixing = (torch.randn(width, width, generator=generator) / width**0.5).to(DEVICE)
        self.cache = torch.zeros(64, width, device=DEVICE)

    def forward(self, tokens: Tensor, states: Tensor, rows: DeviceRows) -> Tensor:
        new = self.embedding[tokens] + torch.cos(rows.positions.float())[:, None]
        places = rows.prefix + rows.first + torch.arange(len(new), device=DEVICE)
        self.cache.index_copy_(0, places, new)
        numbers = torch.arange(len(rows.columns), device=DEVICE)
        seen = self.cache.index_select(0, rows.prefix + numbers)
        return ((rows.among.float() @ seen + states) @ self.mixing).tanh()

    def lm_head(self, states: Tensor, level: int = 0) -> Tensor:
        return states @ self.embedding.T


def round_by(
    operations: Operations, prefix: Tensor, state: Tensor, left: Tensor
) -> Callable[[], None]:
    """A draft, a pass over its tree, draws and a walk; what comes of it goes to `left` int64."""
    model, top_k, depth = Pass(vocab_size=60, width=16), 4, 4
    token_ids = 3 * torch.arange(60, device=DEVICE) % 60
    uniforms = midpoints(12)

    def run() -> None:
        given = expanded(
            model.forward, model.lm_head, operations, state, prefix, depth, top_k, token_ids
        )
        tree = operations.keep_best(top_k, given.tokens, given.scores, given.beams, prefix * 2, 12)
        rows = DeviceRows(prefix, prefix + tree.depths, prefix + tree.depths, tree.ancestors)
        logits = model.lm_head(model.forward(tree.tokens, state.repeat(12, 1), rows))
        drawn = operations.draw((logits * 3).softmax(-1), uniforms)
        drawn = torch.where(uniforms < 0.5, operations.most_probable(logits), drawn)
        # draws that often are children: the tokens of the tree itself, turned round
        drawn = torch.where(drawn % 2 == 0, tree.tokens.roll(-1), drawn)
        walked = operations.walk(tree, drawn, prefix, token_ids[7:9], depth + 1)
        left.copy_(torch.cat([*tree[:3], tree.ancestors.flatten(), drawn, walked.num[None]]))

    return run


def test_rounds_are_those_of_torch_and_can_be_captured() -> None:
    prefix = torch.tensor(3, device=DEVICE)
    state = torch.ones(1, 16, device=DEVICE)
    found = torch.zeros(12 * 4 + 144 + 1, dtype=torch.int64, device=DEVICE)
    expected = torch.zeros_like(found)
    by_kernels = round_by(DraftOperations(), prefix, state, found)
    by_torch = round_by(Operations(), prefix, state, expected)
    graphs = Graphs(DEVICE) if DEVICE.type == "cuda" else RecordedGraphs()
    seen = set()
    for run in range(3):
        graphs.run("round", by_kernels)
        by_torch()
        assert torch.equal(found, expected)
        seen.add(tuple(found.tolist()))
        prefix.fill_(5 + run)
        state.copy_(torch.randn(1, 16, generator=torch.Generator().manual_seed(run)))
    assert len(seen) == 3
    assert graphs.counts.replays == 2


def test_what_is_large_is_left_to_torch() -> None:
    operations, torch_operations = DraftOperations(), Operations()
    top_k, width = candidates.MAX_BEST + 1, 4
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for result, other in zip(
        (*operations.best(logits, top_k), *operations.continuations(logits, top_k, None, None)),
        (*torch_operations.best(logits, top_k), *torch_operations.best(logits, top_k)),
        strict=True,
    ):
        assert torch.equal(result.flatten(), other.flatten())
    scores = -torch.arange(top_k**2, device=DEVICE).float()
    tokens = torch.arange(top_k**2, device=DEVICE)
    states = torch.zeros(top_k, width, device=DEVICE)
    visible = torch.eye(top_k, dtype=torch.bool, device=DEVICE)
    beam = operations.next_beam(scores, tokens, states, visible)
    assert torch.equal(beam.places, tokens[:top_k])
    beams = tokens[None, :top_k]
    root = torch.tensor(9, device=DEVICE)
    all_tokens, all_scores = (torch.cat([part[:top_k], part]) for part in (tokens, scores))
    rows = operations.keep_best(
        top_k, all_tokens, all_scores, beams, root, tree_kernels.MAX_ROWS + 1
    )
    assert len(rows.tokens) == tree_kernels.MAX_ROWS + 1


@pytest.mark.proof
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_draw_kernels_fit_a_gpu(capability: int) -> None:
    module = "polybasic.chain.kernels.cuda.draw_kernels"
    row = {"stride": "i32", "num_outputs": "i32"}

    given = {"probabilities": "*fp32", **row, "sums": "*fp32"}
    requests = [
        Request(module, "sum_chunks", given, {"CHUNK": 1024}, capability=capability),
        Request(
            module,
            "draw_rows",
            {**given, "uniforms": "*fp32", "drawn": "*i64", "num_chunks": "i32"},
            {"CHUNKS": 128, "CHUNK": 1024},
            ("uniforms", "num_chunks"),
            capability,
        ),
    ]
    for kernel in compiled(requests):
        assert kernel.stack_bytes == 0
        assert kernel.shared_bytes <= 48 * 1024
        assert kernel.count("LDG.E.128") >= 2 or kernel.count("LDG.E.128.CONSTANT") >= 2
