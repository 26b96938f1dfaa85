"""The expansion over random tables: prefixes are read back from the mask, row by row."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polybasic.chain.errors import UserError
from polybasic.chain.formats.decoder_config import LayerKind
from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.torch.attend import Attend
from polybasic.deploy.drafters.expansion import Candidates, Expansion
from polybasic.deploy.rounds.tree import ABSENT, DraftTree, walk

ROOT, START, CAPACITY, GROUPS = 99, 3, 60, 2


class TableModel:
    """Logits are small whole numbers by prefix, so that scores tie often; a few are certain.

    A row's state is the number of its prefix: the tokens of the rows that its mask shows.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.config: Any = SimpleNamespace(
            vocab_size=vocab_size, query_groups=GROUPS, kinds=(LayerKind({}),)
        )
        self.rotary: Any = SimpleNamespace(between=lambda first, end: [(first, end)])
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.native = None
        self.cache: Any = SimpleNamespace(capacity=CAPACITY, layers=[])
        self.seed = seed
        self.begin(START)

    def begin(self, start: int) -> None:
        """A draft after `start` rows."""
        self.start = start
        self.rows = [-1] * CAPACITY
        self.prefixes: list[tuple[int, ...]] = [()]

    def forward(self, tokens: Tensor, states: Tensor, attend: Attend) -> Tensor:
        end, first = attend.start + len(tokens), len(self.prefixes)
        self.rows[attend.start : end] = tokens.tolist()
        assert attend.prepared is not None
        (view,) = attend.prepared
        assert view.mask is not None
        assert view.mask.shape == (len(tokens) * GROUPS, end)
        is_visible = (view.mask == 0).view(len(tokens), GROUPS, end)
        assert torch.equal(is_visible[:, 0], is_visible[:, 1])
        for visible, above in zip(is_visible[:, 0].tolist(), states[:, 0].tolist(), strict=True):
            assert all(visible[: self.start])
            prefix = tuple(self.rows[row] for row in range(self.start, end) if visible[row])
            assert prefix[:-1] == self.prefixes[int(above)]
            assert view.rotation == (self.start + len(prefix) - 1, self.start + len(prefix))  # type: ignore[comparison-overlap]
            self.prefixes.append(prefix)
        return torch.arange(first, len(self.prefixes), dtype=torch.float32)[:, None]

    def lm_head(self, states: Tensor) -> Tensor:
        return torch.stack([self.logits(self.prefixes[int(state)]) for state in states[:, 0]])

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, prefix)) % 2**31)
        size = self.config.vocab_size
        logits = torch.randint(0, 3, (size,), generator=generator).float()
        if torch.rand((), generator=generator) < 0.2:
            logits[int(torch.randint(0, size, (), generator=generator))] = 1000.0
        return logits


def expand(seed: int, vocab_size: int, top_k: int, depth: int) -> Candidates:
    model = TableModel(seed, vocab_size)
    tree = Tree(depth=1, top_k=top_k, rows=2)
    expansion = Expansion(model, model.forward, model.lm_head, tree, model.cache)
    # An earlier draft, after fewer rows and deeper, must leave no trace.
    model.begin(START - 2)
    expansion.expand(torch.zeros(1, 1), START - 2, depth + 1)
    model.begin(START)
    return expansion.expand(torch.zeros(1, 1), START, depth)


def num_walked(tree: DraftTree, continuation: list[int]) -> int:
    """Tokens of the continuation that a walk over the tree gains."""
    depths = tree.depths()
    path, _ = walk(tree, lambda row: [*continuation, -1, -1][depths[row]])
    return len(path) - 1


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.data())
def test_one_deep_expansion_gives_the_gain_of_every_smaller_tree(data: st.DataObject) -> None:
    seed, depth = data.draw(st.integers(0, 999)), data.draw(st.integers(1, 5))
    vocab_size = data.draw(st.integers(2, 6))
    top_k = data.draw(st.integers(1, min(4, vocab_size)))
    deepest = expand(seed, vocab_size, top_k, depth)
    # A path among the candidates, as far as it is followed, then anything.
    paths = deepest.keep_best(ROOT, len(deepest.tokens) + 1).paths()
    followed = data.draw(st.sampled_from(paths))
    followed = followed[: data.draw(st.integers(0, depth))]
    rest = data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=depth + 1))
    continuation = followed + rest
    ranks = deepest.ranks(continuation)
    assert ranks.shape == (depth, depth)
    for shallower in range(1, depth + 1):
        candidates = expand(seed, vocab_size, top_k, shallower)
        for rows in range(2, len(candidates.tokens) + 3):
            tree = candidates.keep_best(ROOT, rows)
            assert len(tree) == min(rows, len(candidates.tokens) + 1)
            num_ranked = int((ranks[shallower - 1] <= rows - 1).sum())
            assert num_ranked == num_walked(tree, continuation)


def test_the_first_levels_are_those_of_a_shallower_expansion() -> None:
    deep, shallow = expand(7, 6, 3, 5), expand(7, 6, 3, 3)
    num_candidates = len(shallow.tokens)
    assert num_candidates == 3 + 2 * 9
    assert torch.equal(deep.tokens[:num_candidates], shallow.tokens)
    assert torch.equal(deep.scores[:num_candidates], shallow.scores)
    assert torch.equal(deep.beams[:2], shallow.beams)
    assert not torch.equal(expand(8, 6, 3, 3).tokens, shallow.tokens)


def candidates_of_two_levels(scores: list[float]) -> Candidates:
    """Tokens 10 and 11 at the first level; 20, 21 below 10 and 22, 23 below 11."""
    return Candidates(
        2, torch.tensor([10, 11, 20, 21, 22, 23]), torch.tensor(scores), torch.tensor([[0, 1]])
    )


def test_ranks_of_a_hand_worked_expansion() -> None:
    candidates = candidates_of_two_levels([-1, -3, -1.5, -2, -4, -5])
    assert candidates.ranks([10, 20]).tolist() == [[1, ABSENT], [1, 2]]
    assert candidates.ranks([10, 21, 7]).tolist() == [[1, ABSENT], [1, 3]]
    # The second best of one level is overtaken by the children of the first.
    assert candidates.ranks([11, 23]).tolist() == [[2, ABSENT], [4, 6]]
    assert candidates.ranks([11, 20]).tolist() == [[2, ABSENT], [4, ABSENT]]
    assert candidates.ranks([12, 20]).tolist() == [[ABSENT, ABSENT]] * 2
    assert candidates.ranks([11]).tolist() == [[2, ABSENT], [4, ABSENT]]
    assert candidates.ranks([]).tolist() == [[ABSENT, ABSENT]] * 2
    assert candidates.keep_best(ROOT, 4) == DraftTree([ROOT, 10, 20, 21], [-1, 0, 1, 1])
    assert candidates.keep_best(ROOT, 5) == DraftTree([ROOT, 10, 11, 20, 21], [-1, 0, 0, 1, 1])


def test_equal_scores_rank_by_level_and_place() -> None:
    candidates = candidates_of_two_levels([-1, -1, -1, -9, -1, -9])
    assert candidates.ranks([10, 20]).tolist() == [[1, ABSENT], [1, 3]]
    assert candidates.ranks([11, 22]).tolist() == [[2, ABSENT], [2, 4]]
    assert candidates.keep_best(ROOT, 4) == DraftTree([ROOT, 10, 11, 20], [-1, 0, 0, 1])


def test_children_hang_below_the_members_of_their_beam() -> None:
    # The beam of the second level is reversed: the first pair are children of token 11.
    turned = Candidates(
        2,
        torch.tensor([10, 11, 20, 21, 22, 23]),
        torch.tensor([-1.0, -1.0, -2.0, -3.0, -4.0, -5.0]),
        torch.tensor([[1, 0]]),
    )
    assert turned.keep_best(ROOT, 7).paths()[3:] == [[11, 20], [11, 21], [10, 22], [10, 23]]
    assert turned.ranks([11, 20]).tolist() == [[2, ABSENT], [2, 3]]
    assert turned.ranks([10, 20]).tolist() == [[1, ABSENT], [1, ABSENT]]


def test_a_tree_wider_than_the_vocabulary_is_refused() -> None:
    model = TableModel(0, vocab_size=3)
    wide = Tree(depth=1, top_k=4, rows=2)
    with pytest.raises(UserError, match="top_k 4, 3 tokens"):
        Expansion(model, model.forward, model.lm_head, wide, model.cache)
    narrow = Tree(depth=1, top_k=3, rows=2)
    expansion = Expansion(model, model.forward, model.lm_head, narrow, model.cache)
    with pytest.raises(UserError, match="top_k 4, 3 tokens"):
        expansion.tree = wide
    assert expansion.tree.top_k == 3
