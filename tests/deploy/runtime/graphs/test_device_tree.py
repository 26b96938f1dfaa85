"""Trees on the device against those of the host, ties included, and in graphs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.decoder_config import LayerKind
from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.drafts import Candidates, DraftTree
from polybasic.chain.kernels.torch.operations import Operations
from polybasic.chain.kernels.torch.rows import DeviceRows
from polybasic.chain.kernels.torch.trees import DeviceTree
from tests.deploy.recorded_graphs import RecordedGraphs
from tests.deploy.runtime.drafters.expanding import expanded
from tests.deploy.runtime.drafters.test_expansion import ROOT, expand_table

CPU = torch.device("cpu")


def of_host(tree: DeviceTree) -> DraftTree:
    parents = tree.parents.tolist()
    assert parents[0] == 0
    return DraftTree(tree.tokens.tolist(), [-1, *parents[1:]])


def assert_whole(tree: DeviceTree) -> None:
    """Depths and ancestors are those of the parents."""
    expected = of_host(tree)
    assert tree.depths.tolist() == expected.depths()
    for row, parent in enumerate(expected.parents):
        above = set(tree.ancestors[parent].nonzero().flatten().tolist()) if parent >= 0 else set()
        assert set(tree.ancestors[row].nonzero().flatten().tolist()) == above | {row}


def kept(found: Candidates, root: Tensor, rows: int) -> DeviceTree:
    parts = found.tokens, found.scores, found.beams
    return Operations().keep_best(found.top_k, *parts, root, rows)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.data())
def test_trees_are_the_hosts(data: st.DataObject) -> None:
    seed, depth = data.draw(st.integers(0, 999)), data.draw(st.integers(1, 5))
    vocab_size = data.draw(st.integers(2, 6))
    found = expand_table(seed, vocab_size, data.draw(st.integers(1, min(4, vocab_size))), depth)
    for rows in range(2, len(found.tokens) + 3):
        tree = kept(found, torch.tensor(ROOT), rows)
        assert of_host(tree) == found.keep_best(ROOT, rows)
        assert_whole(tree)


def test_outputs_of_a_trimmed_head_are_tokens() -> None:
    token_ids = torch.tensor([5, 11, 12, 40, 99])
    found = expand_table(7, 5, 3, 4, token_ids)
    assert torch.equal(found.tokens[:3], token_ids[expand_table(7, 5, 3, 4).tokens[:3]])
    assert set(found.tokens.tolist()) <= set(token_ids.tolist())


def test_the_window_reaches_every_pass() -> None:
    windows = []

    def forward(tokens: Tensor, states: Tensor, rows: DeviceRows) -> Tensor:
        windows.append(rows.window)
        return states

    window = Window(tokens=16, sinks=2)
    expanded(
        forward, lambda states, level: states, Operations(), torch.eye(1, 8), torch.tensor(9), 3, 2,
        window=window,
    )  # fmt: skip
    assert windows == [window] * 2


def test_a_tree_of_the_host_is_moved() -> None:
    tree = DraftTree([7, 1, 2, 3, 4], [-1, 0, 1, 2, 0])
    moved = DeviceTree.of(tree, CPU)
    assert of_host(moved) == tree
    assert_whole(moved)
    assert moved.ancestors[3].tolist() == [True, True, True, True, False]
    assert of_host(DeviceTree.of(DraftTree.of_root(5), CPU)) == DraftTree.of_root(5)


class Pass:
    """A model of tensors alone: a row's state is mixed of its token and of all that it sees."""

    def __init__(self, vocab_size: int, width: int, places: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(vocab_size, width, generator=generator)
        self.mixing = torch.randn(width, width, generator=generator) / width**0.5
        self.cache = torch.zeros(places, width)

    def forward(self, tokens: Tensor, states: Tensor, rows: DeviceRows) -> Tensor:
        new = self.embedding[tokens] + torch.cos(rows.positions.float())[:, None]
        places = rows.prefix + rows.first + torch.arange(len(new), device=new.device)
        self.cache.index_copy_(0, places, new)
        numbers = torch.arange(len(rows.columns), device=new.device)
        seen = self.cache.index_select(0, rows.prefix + numbers)
        return ((rows.among.float() @ seen + states) @ self.mixing).tanh()

    def lm_head(self, states: Tensor, level: int) -> Tensor:
        return states @ self.embedding.T


def test_a_captured_draft_serves_other_states_and_prefixes() -> None:
    model = Pass(vocab_size=50, width=16, places=64)
    prefix, state = torch.tensor(3), torch.ones(1, 16)
    numbers = torch.zeros(3, 10, dtype=torch.int64)
    ancestors = torch.zeros(10, 10, dtype=torch.bool)

    def candidates() -> Candidates:
        return expanded(model.forward, model.lm_head, Operations(), state, prefix, depth=4, top_k=3)

    def draft() -> None:
        tree = kept(candidates(), prefix * 2, 10)
        numbers.copy_(torch.stack([tree.tokens, tree.parents, tree.depths]))
        ancestors.copy_(tree.ancestors)

    graphs, drafts = RecordedGraphs(), set()
    for run in range(4):
        graphs.run("draft", draft)
        replayed = numbers.clone(), ancestors.clone()
        draft()
        assert torch.equal(replayed[0], numbers)
        assert torch.equal(replayed[1], ancestors)
        drafts.add(tuple(numbers.flatten().tolist()))
        prefix.fill_(5 + run)
        state.normal_(generator=torch.Generator().manual_seed(run))
    assert len(drafts) == 4
    assert graphs.counts.replays == 3
    with pytest.raises(UserError, match="reads device data"):
        graphs.run("host", lambda: print(candidates().keep_best(ROOT, 10)))


def test_kinds_of_layers_see_the_draft() -> None:
    """What a window hides of a level depends on the positions that its columns have."""
    spans = []

    def forward(tokens: Tensor, states: Tensor, rows: DeviceRows) -> Tensor:
        spans.append(rows.span_of(LayerKind({}, window=2)).visible.tolist())
        return states

    expanded(
        forward, lambda states, level: states, Operations(), torch.tensor([[0.0, 1.0]]),
        torch.tensor(9), 4, 1,
    )  # fmt: skip
    assert spans == [[[True]], [[True, True]], [[False, True, True]]]
