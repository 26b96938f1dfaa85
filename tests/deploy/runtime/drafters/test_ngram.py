"""Drafts by n-grams, worked by hand and against a search through the whole sequence."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polybasic.chain.formats.plan import Ngram, Tree
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.deploy.runtime.drafters import ngram
from polybasic.deploy.runtime.drafters.interface import NoDrafter
from polybasic.deploy.runtime.drafters.ngram import MAX_COPIES, NUM_MATCH_LENGTHS, NgramDrafter
from polybasic.deploy.runtime.rounds.verifier import PassClock

TREE = Tree(depth=1, top_k=1, rows=16)


def make_drafter(min_match: int = 2, num_tokens: int = 3, **changes: Any) -> NgramDrafter:
    tree = changes.pop("tree", TREE)
    fallback = changes.pop("fallback", None)
    ngram_settings = Ngram(min_match=min_match, num_tokens=num_tokens, **changes)
    return NgramDrafter(ngram_settings, tree, fallback)


def draft(drafter: NgramDrafter, tokens: list[int], max_depth: int = 99) -> DraftTree:
    """The draft after `tokens`, all missing ones of which are observed first."""
    if drafter.num_observed is not None:
        drafter.observe(torch.zeros(len(tokens) - 1 - drafter.num_observed, 1))
    return drafter.draft(tokens, max_depth)


@pytest.mark.parametrize(
    ("tokens", "drafted", "parents"),
    [
        # What followed 1 2 before.
        ([1, 2, 3, 4, 9, 1, 2], [2, 3, 4, 9], [-1, 0, 1, 2]),
        # Two places, the latest first.
        ([1, 2, 3, 8, 1, 2, 4, 9, 1, 2], [2, 4, 9, 1, 3, 8, 1], [-1, 0, 1, 2, 0, 4, 5]),
        # They share the rows of their common beginning.
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2], [2, 3, 5, 1, 4, 1], [-1, 0, 1, 2, 1, 4]),
        # The longest match decides, though 1 2 stands later without the 7.
        ([7, 1, 2, 3, 6, 1, 2, 4, 7, 1, 2], [2, 3, 6, 1], [-1, 0, 1, 2]),
        # A copy that reaches its own beginning goes round.
        ([5, 6, 5, 6], [6, 5, 6, 5], [-1, 0, 1, 2]),
        ([8, 8, 8], [8, 8, 8, 8], [-1, 0, 1, 2]),
        # One token alone is no match.
        ([1, 5, 6, 1], [1], [-1]),
        ([1, 2], [2], [-1]),
        ([1], [1], [-1]),
    ],
    ids=str,
)
def test_copies_what_followed(tokens: list[int], drafted: list[int], parents: list[int]) -> None:
    assert draft(make_drafter(), tokens) == DraftTree(drafted, parents)


class Drafts(NoDrafter):
    """The same path or tree below the last token, whatever stands before it."""

    def __init__(self, tokens: list[int], parents: list[int] | None = None) -> None:
        self.tokens = tokens
        self.parents = [*range(len(tokens))] if parents is None else parents

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        return DraftTree([tokens[-1], *self.tokens], [-1, *self.parents], "model")


BEFORE = [1, 2, 3, 4, 9, 1]
"""After the last token nothing can be copied; after a 2 behind it, 3 4 9 1 can."""


@pytest.mark.parametrize(
    ("drafted", "parents", "max_depth", "copied", "below"),
    [
        ([2], None, 99, [3, 4, 9], 1),
        ([2, 3], None, 99, [4, 9, 1], 2),
        # the answer has no room for more
        ([2], None, 3, [3, 4], 1),
        ([2], None, 1, [], 1),
        # the most probable path is that of the first children
        ([2, 7, 3], [0, 0, 1], 99, [4, 9, 1], 3),
        ([7, 2], [0, 0], 99, [], 0),
        # it ends where nothing stood before
        ([5, 6], None, 99, [], 0),
        ([], None, 99, [], 0),
    ],
)
def test_copies_go_on_from_the_most_probable_path(
    drafted: list[int], parents: list[int] | None, max_depth: int, copied: list[int], below: int
) -> None:
    fallback = Drafts(drafted, parents)
    plain = fallback.draft(BEFORE, max_depth)
    drafter = make_drafter(fallback=fallback, extends=True)
    for _ in range(2):  # nothing is learned of drafts
        found = draft(drafter, BEFORE, max_depth)
        assert found == (plain.followed_by(below, copied) if copied else plain)
        assert found.num_copied == len(copied)
    proposers = [found.proposer_of(row) for row in range(1, len(found))]
    assert proposers == ["model"] * len(drafted) + ["ngram"] * len(copied)
    assert draft(make_drafter(fallback=fallback), BEFORE, max_depth) == plain
    # a copy of the last tokens themselves comes first
    assert draft(drafter, [*BEFORE, 2], max_depth=99).tokens == [2, 3, 4, 9]


def test_a_pruned_tree_keeps_count_of_its_copies() -> None:
    tree = DraftTree([1, 2, 7], [-1, 0, 0], "model").followed_by(1, [3, 4])
    assert tree.where([True, True, False, True, True]).num_copied == 2
    assert tree.where([True, True, True, True, False]).num_copied == 1
    assert tree.where([True, False, True, True, True]).num_copied == 0


def test_min_match_is_the_shortest_match_that_is_copied() -> None:
    assert draft(make_drafter(min_match=1), [1, 5, 6, 1]).tokens == [1, 5, 6, 1]
    assert draft(make_drafter(min_match=3), [1, 2, 3, 4, 1, 2]).tokens == [2]
    assert draft(make_drafter(min_match=3), [0, 1, 2, 3, 4, 0, 1, 2]).tokens == [2, 3, 4, 0]


def test_rows_and_depth_are_limited() -> None:
    tokens = [1, 2, 3, 8, 1, 2, 4, 9, 1, 2]
    assert draft(make_drafter(tree=Tree(depth=1, top_k=1, rows=5)), tokens).tokens == [
        2,
        4,
        9,
        1,
        3,
    ]
    assert draft(make_drafter(num_tokens=1), tokens) == DraftTree([2, 4, 3], [-1, 0, 0])
    drafter = make_drafter()
    assert max(draft(drafter, tokens, 2).depths()) == 2
    assert draft(drafter, tokens, 0) == DraftTree.of_root(2)
    drafter = make_drafter(tree=Tree(depth=1, top_k=1, rows=2))
    assert draft(drafter, tokens) == DraftTree([2, 4], [-1, 0])


def test_the_latest_places_are_copied() -> None:
    tokens = [token for last in range(10, 15) for token in (1, 2, last)]
    drafted = draft(make_drafter(num_tokens=1), [*tokens, 1, 2])
    assert drafted == DraftTree([2, 14, 13, 12, 11], [-1, 0, 0, 0, 0])


def test_tokens_that_are_taken_back_are_unlearned() -> None:
    drafter = make_drafter()
    assert draft(drafter, [1, 2, 3, 9, 1, 2]).tokens == [2, 3, 9, 1]
    drafter.rewind(2)
    assert draft(drafter, [1, 2, 4, 9, 1, 2]) == DraftTree([2, 4, 9, 1], [-1, 0, 1, 2])
    # What they had covered shows again.
    assert draft(drafter, [1, 2, 4, 9, 1, 2, 5, 1, 2]).tokens == [2, 5, 1, 2, 4, 9, 1]
    drafter.rewind(5)
    assert draft(drafter, [1, 2, 4, 9, 1, 2]).tokens == [2, 4, 9, 1]
    drafter.rewind(0)
    assert draft(drafter, [3, 1, 2]).tokens == [2]
    assert len(drafter._places) == 1


def test_the_least_recently_used_ngram_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "NUM_MATCH_LENGTHS", 1)
    seen = [1, 2, 3, 4]  # 1, 2 and 3 were followed by something
    assert draft(make_drafter(1, 1, capacity=4), [*seen, 1]).tokens == [1, 2]
    assert draft(make_drafter(1, 1, capacity=3), [*seen, 1]).tokens == [1]
    assert draft(make_drafter(1, 1, capacity=3), [*seen, 2]).tokens == [2, 3]
    # To be copied from is a use: 1 survives where 2 goes.
    drafter = make_drafter(1, 1, capacity=3)
    assert draft(drafter, [1, 2, 3, 1]).tokens == [1, 2]
    assert list(drafter._places) == [(2,), (3,), (1,)]
    # To be seen again is one, too: 2 survives where 1 goes.
    drafter = make_drafter(1, 1, capacity=2)
    draft(drafter, [2, 1, 2, 5, 7])
    assert list(drafter._places) == [(2,), (5,)]


def test_a_token_is_learned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[int] = []
    learn = NgramDrafter._learn

    def recording(self: NgramDrafter, token: int) -> None:
        learned.append(token)
        learn(self, token)

    monkeypatch.setattr(NgramDrafter, "_learn", recording)
    tokens = [place % 50 for place in range(500)]
    drafter = make_drafter()
    draft(drafter, tokens)
    assert learned == tokens
    draft(drafter, [*tokens, 7, 8])
    assert learned == [*tokens, 7, 8]
    drafter.rewind(499)
    draft(drafter, [*tokens[:499], 9])
    assert learned == [*tokens, 7, 8, 9]


class RecordingDrafter(NoDrafter):
    """Records its calls and proposes one token."""

    clock = PassClock(torch.device("cpu"))

    def __init__(self) -> None:
        self.tree, self.calls = TREE, list[tuple[str, int]]()
        self.num_observed = 0

    def observe(self, states: Tensor) -> None:
        self.num_observed += len(states)
        self.calls.append(("observe", len(states)))

    def rewind(self, num_observed: int) -> None:
        self.num_observed = num_observed
        self.calls.append(("rewind", num_observed))

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        self.calls.append(("draft", max_depth))
        return DraftTree([tokens[-1], 42], [-1, 0])


def test_the_fallback_drafts_where_nothing_matches() -> None:
    fallback = RecordingDrafter()
    drafter = make_drafter(fallback=fallback)
    assert draft(drafter, [1, 2, 3, 1], 5).tokens == [1, 42]
    assert draft(drafter, [1, 2, 3, 1, 2], 5).tokens == [2, 3, 1, 2]
    drafter.rewind(3)
    assert draft(drafter, [1, 2, 3, 9], 4).tokens == [9, 42]
    assert fallback.calls == [
        ("observe", 3),
        ("draft", 5),
        ("observe", 1),
        ("rewind", 3),
        ("observe", 0),
        ("draft", 4),
    ]
    assert drafter.clock is fallback.clock
    assert make_drafter().clock is None


def searched(tokens: list[int], ngram_settings: Ngram, rows: int, max_depth: int) -> DraftTree:
    """The definition, by looking through the whole sequence for every draft."""
    depth = min(ngram_settings.num_tokens, max_depth)
    shortest = ngram_settings.min_match
    for length in reversed(range(shortest, shortest + NUM_MATCH_LENGTHS)):
        last = tokens[-length:]
        places = [
            place
            for place in range(len(tokens) - 1, length - 1, -1)
            if tokens[place - length : place] == last
        ]
        if len(last) == length and places:
            break
    drafted, parents = [tokens[-1]], [-1]
    for place in places[:MAX_COPIES]:
        period = tokens[place:]
        row = 0
        for index in range(depth):
            token = period[index % len(period)]
            children = [
                child
                for child in range(1, len(drafted))
                if parents[child] == row and drafted[child] == token
            ]
            if not children and len(drafted) == rows:
                break
            if not children:
                drafted.append(token)
                parents.append(row)
            row = children[0] if children else len(drafted) - 1
    return DraftTree(drafted, parents)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.data())
def test_any_calls_give_the_drafts_of_a_search(data: st.DataObject) -> None:
    capacity = data.draw(st.sampled_from([65536, 65536, 3, 20]))
    ngram_settings = Ngram(
        min_match=data.draw(st.integers(1, 3)),
        num_tokens=data.draw(st.integers(1, 6)),
        capacity=capacity,
    )
    rows = data.draw(st.integers(2, 12))
    drafter = NgramDrafter(ngram_settings, Tree(depth=1, top_k=1, rows=rows))
    token = st.integers(0, 2)
    tokens, num_observed = [data.draw(token)], 0
    for move in data.draw(st.lists(st.sampled_from(["gain", "gain", "cut", "draft"]), max_size=25)):
        if move == "gain":
            gained = data.draw(st.lists(token, min_size=1, max_size=6))
            drafter.observe(torch.zeros(len(gained), 1))
            tokens, num_observed = tokens + gained, num_observed + len(gained)
        elif move == "cut":
            num_observed = data.draw(st.integers(0, num_observed))
            drafter.rewind(num_observed)
            tokens = [*tokens[:num_observed], data.draw(token)]
        else:
            max_depth = data.draw(st.integers(0, 7))
            drafted = drafter.draft(tokens, max_depth)
            assert drafted.tokens[0] == tokens[-1]
            assert len(drafted) <= rows
            assert max(drafted.depths()) <= min(max_depth, ngram_settings.num_tokens)
            assert sum(map(len, drafted.children())) == len(drafted) - 1
            assert len(drafter._places) <= capacity
            if capacity == 65536:
                assert drafted == searched(tokens, ngram_settings, rows, max_depth)
    drafter.rewind(0)
    assert not drafter._places
