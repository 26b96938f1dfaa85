"""The expansion over random tables: prefixes are read back from what rows see, row by row."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.drafts import ABSENT, Candidates, DraftTree, walk
from polybasic.chain.kernels.torch.expansion import Level, expand, expansion
from polybasic.chain.kernels.torch.operations import Operations
from polybasic.chain.kernels.torch.rows import DeviceRows
from polybasic.deploy.runtime.drafters.model import ModelDrafter
from tests.deploy.runtime.drafters.expanding import expanded
from tests.deploy.small_chains import Weights, small_config

ROOT, START, CAPACITY = 99, 3, 60


class TableModel:
    """Logits are small whole numbers by prefix, so that scores tie often; a few are certain.

    A row's state is the number of its prefix: the tokens of the rows that it sees.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.seed, self.vocab_size = seed, vocab_size
        self.begin(START)

    def begin(self, start: int) -> None:
        """A draft after `start` rows."""
        self.start = start
        self.rows = [-1] * CAPACITY
        self.prefixes: list[tuple[int, ...]] = [()]

    def forward(self, tokens: Tensor, states: Tensor, rows: DeviceRows) -> Tensor:
        assert (int(rows.prefix), rows.num_rows) == (self.start, len(tokens))
        first, end = len(self.prefixes), self.start + len(rows.columns)
        self.rows[end - len(tokens) : end] = tokens.tolist()
        assert torch.equal(rows.columns[-len(tokens) :], rows.positions)
        for row, above in enumerate(states[:, 0].tolist()):
            seen = rows.among[row].nonzero().flatten().tolist()
            prefix = tuple(self.rows[self.start + place] for place in seen)
            assert prefix[:-1] == self.prefixes[int(above)]
            depths = torch.arange(len(prefix))
            assert torch.equal(rows.columns[seen], self.start + depths)
            self.prefixes.append(prefix)
        return torch.arange(first, len(self.prefixes), dtype=torch.float32)[:, None]

    def lm_head(self, states: Tensor, level: int) -> Tensor:
        return torch.stack([self.logits(self.prefixes[int(state)]) for state in states[:, 0]])

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, prefix)) % 2**31)
        size = self.vocab_size
        logits = torch.randint(0, 3, (size,), generator=generator).float()
        if torch.rand((), generator=generator) < 0.2:
            logits[int(torch.randint(0, size, (), generator=generator))] = 1000.0
        return logits


def expand_table(
    seed: int, vocab_size: int, top_k: int, depth: int, token_ids: Tensor | None = None,
    least_score: float = -math.inf,
) -> Candidates:  # fmt: skip
    model = TableModel(seed, vocab_size)
    prefix, state = torch.tensor(START), torch.zeros(1, 1)
    return expanded(
        model.forward, model.lm_head, Operations(), state, prefix, depth, top_k, token_ids,
        least_score=least_score,
    )  # fmt: skip


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
    deepest = expand_table(seed, vocab_size, top_k, depth)
    # A path among the candidates, as far as it is followed, then anything.
    paths = deepest.keep_best(ROOT, len(deepest.tokens) + 1).paths()
    followed = data.draw(st.sampled_from(paths))
    followed = followed[: data.draw(st.integers(0, depth))]
    rest = data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=depth + 1))
    continuation = followed + rest
    ranks = deepest.ranks(continuation)
    assert ranks.shape == (depth, depth)
    for shallower in range(1, depth + 1):
        candidates = expand_table(seed, vocab_size, top_k, shallower)
        for rows in range(2, len(candidates.tokens) + 3):
            tree = candidates.keep_best(ROOT, rows)
            assert len(tree) == min(rows, len(candidates.tokens) + 1)
            num_ranked = int((ranks[shallower - 1] <= rows - 1).sum())
            assert num_ranked == num_walked(tree, continuation)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.data())
def test_one_deep_expansion_gives_every_tree_with_a_least_probability(data: st.DataObject) -> None:
    seed, depth = data.draw(st.integers(0, 999)), data.draw(st.integers(1, 5))
    vocab_size = data.draw(st.integers(2, 6))
    top_k = data.draw(st.integers(1, min(4, vocab_size)))
    deepest = expand_table(seed, vocab_size, top_k, depth)
    followed = data.draw(st.sampled_from(deepest.keep_best(ROOT, 200).paths()))
    ranks = deepest.ranks(followed)
    # scores themselves, and one between any two
    distinct = sorted({*deepest.scores.tolist(), 0.0})
    least = data.draw(st.sampled_from(distinct + [(a + b) / 2 for a, b in pairwise(distinct)]))
    counts = deepest.counts([-1e9, least])
    assert counts[:, 0].tolist() == [top_k + level * top_k**2 for level in range(depth)]
    for shallower in range(1, depth + 1):
        stopped = expand_table(seed, vocab_size, top_k, shallower, least_score=least)
        goes_on = np.diff(counts[:shallower, 1], prepend=0) > 0
        assert stopped.num_levels == min(shallower, 1 + goes_on.sum())
        for rows in (2, 4, 9, 200):
            tree = stopped.keep_best(ROOT, rows, least_score=least)
            num = min(rows - 1, counts[shallower - 1, 1])
            assert len(tree) == 1 + num
            assert int((ranks[shallower - 1] <= num).sum()) == num_walked(tree, followed)


def test_a_tree_without_probable_candidates_is_its_root() -> None:
    candidates = candidates_of_two_levels([-1, -3, -1.5, -2, -4, -5])
    assert candidates.keep_best(ROOT, 6, least_score=-0.5) == DraftTree.of_root(ROOT)
    assert candidates.keep_best(ROOT, 6, least_score=-2) == DraftTree(
        [ROOT, 10, 20, 21], [-1, 0, 1, 1]
    )
    assert candidates.keep_best(ROOT, 3, least_score=-2) == DraftTree([ROOT, 10, 20], [-1, 0, 1])
    assert candidates.counts([-0.5, -2, -9]).tolist() == [[0, 1, 2], [0, 3, 6]]


def test_the_first_levels_are_those_of_a_shallower_expansion() -> None:
    deep, shallow = expand_table(7, 6, 3, 5), expand_table(7, 6, 3, 3)
    num_candidates = len(shallow.tokens)
    assert num_candidates == 3 + 2 * 9
    assert torch.equal(deep.tokens[:num_candidates], shallow.tokens)
    assert torch.equal(deep.scores[:num_candidates], shallow.scores)
    assert torch.equal(deep.beams[:2], shallow.beams)
    assert not torch.equal(expand_table(8, 6, 3, 3).tokens, shallow.tokens)


def test_drafts_that_end_at_different_levels_are_those_of_each_alone() -> None:
    shapes = [(1, -math.inf), (4, -math.inf), (4, -0.1), (2, -math.inf)]
    models, works, together = [TableModel(seed, 6) for seed in range(4)], [], []
    for place, (model, (depth, least_score)) in enumerate(zip(models, shapes, strict=True)):
        model.begin(START + place)
        prefix, state = torch.tensor(model.start), torch.zeros(1, 1)
        logits = model.lm_head(state, 0)
        works.append(
            expansion(logits, Operations(), state, prefix, depth, 3, least_score=least_score)
        )

    def run(levels: Sequence[Level]) -> list[tuple[Tensor, Tensor]]:
        found, places = [], [int(level.rows.prefix) - START for level in levels]
        for place, level in zip(places, levels, strict=True):
            states = models[place].forward(level.tokens, level.states, level.rows)
            found.append((states, models[place].lm_head(states, level.number + 1)))
        together.append(places)
        return found

    for place, found in enumerate(expand(works, run)):
        depth, least_score = shapes[place]
        alone = expand_table(place, 6, 3, depth, least_score=least_score)
        assert torch.equal(found.tokens, alone.tokens)
        assert torch.equal(found.scores, alone.scores)
        assert torch.equal(found.beams, alone.beams)
    assert together == [[1, 3], [1], [1]]


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
    model = Weights(0).decoder(small_config(num_layers=1, hidden_size=16))
    wide, narrow = (Tree(depth=1, top_k=top_k, rows=2) for top_k in (7, 6))
    with pytest.raises(UserError, match="top_k 7, 6 tokens"):
        ModelDrafter(model, wide, CAPACITY)
    drafter = ModelDrafter(model, narrow, CAPACITY)
    with pytest.raises(UserError, match="top_k 7, 6 tokens"):
        drafter.drafting(wide)
    assert drafter.tree.top_k == 6
