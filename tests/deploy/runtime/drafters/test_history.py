"""Drafts from earlier sequences, worked by hand and against a search through all of them."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from polybasic import History
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.deploy.runtime.drafters import history as module
from polybasic.deploy.runtime.drafters.history import MIN_MATCH


def test_probable_continuations_are_drafted_the_most_probable_first() -> None:
    history = History(64)
    for last in (7, 8, 7):
        history.add([1, 2, 3, 4, last, 6])
    # three tokens match, a confidence of 9/25: 7 has 2/3 of it, 8 a third, which is too little
    tree = history.drafted([9, 2, 3, 4], 8, 16)
    assert tree == DraftTree([4, 7], [-1, 0], "")
    assert tree is not None
    assert tree.proposer == "history"
    # four tokens match, 1/2: 7 has 1/3; 8 and what follows 7 have 1/6
    assert history.drafted([1, 2, 3, 4], 8, 16) == DraftTree([4, 7], [-1, 0], "")
    # the longest match alone, of five tokens, 25/41: 9 has that, 3 after it 0.37, 2 then 0.23
    history.add([5, 1, 2, 3, 4, 9, 3, 2, 1])
    assert history.drafted([5, 1, 2, 3, 4], 8, 16) == DraftTree([4, 9, 3, 2], [-1, 0, 1, 2], "")
    assert history.drafted([5, 1, 2, 3, 4], 8, 3) == DraftTree([4, 9, 3], [-1, 0, 1], "")
    assert history.drafted([5, 1, 2, 3, 4], 1, 16) == DraftTree([4, 9], [-1, 0], "")
    # of a longer match, 64/80, both continuations, which are equally probable, the latest first
    for last in (7, 8):
        history.add([*range(10, 18), last])
    assert history.drafted([*range(10, 18)], 8, 16) == DraftTree([17, 8, 7], [-1, 0, 0], "")
    # full to the last token, from the first one on
    full = History(16)
    full.add([*range(15)])
    assert len(full) == 16
    assert full.drafted([0, 1, 2], 1, 16) == DraftTree([2, 3], [-1, 0], "")
    # too short a match, or none, or nothing after it
    for tokens in ([3, 4], [9, 3, 4], [4, 8, 6], []):
        assert history.drafted(tokens, 8, 16) is None


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=12),
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.sampled_from([32, 128, 1024]),
)
def test_continuations_are_those_of_a_search(
    sequences: list[list[int]], tokens: list[int], capacity: int
) -> None:
    history = History(capacity)
    for sequence in sequences:
        history.add(sequence)
    held = [token for sequence in sequences for token in (*sequence, -1)]
    kept = held[-capacity:]
    assert len(history) == len(kept)
    found = history.drafted(tokens, 4, 64)
    begins = [place for place in range(len(kept) + 1) if matches(kept, place, tokens) >= MIN_MATCH]
    if not begins:
        assert found is None
        return
    most = max(matches(kept, place, tokens) for place in begins)
    # nothing but what followed somewhere, and of few places, none forgotten, all that did
    every = Counter[tuple[int, ...]]()
    for place in begins:
        if matches(kept, place, tokens) == most:
            every.update(continuations(kept[place:], 4))
    paths = [] if found is None else [tuple(path) for path in found.paths()[1:]]
    if len(held) > capacity:
        everywhere = {path for place in begins for path in continuations(kept[place:], 4)}
        assert set(paths) <= everywhere
    elif num_alike(kept, tokens, capacity) <= module._MAX_PLACES:
        num_places = sum(matches(kept, place, tokens) == most for place in begins)
        confidence = most**2 / (most**2 + 16)
        scores = {
            path: count / num_places * confidence ** len(path) for path, count in every.items()
        }
        assert set(paths) == {path for path, score in scores.items() if score >= 0.2}
        drafted = [scores[path] for path in paths]
        assert drafted == sorted(drafted, reverse=True)


def num_alike(held: list[int], tokens: list[int], capacity: int) -> int:
    """Places whose hash is that of a sequence's end."""

    def bucket(before: list[int]) -> int:
        return module._hash(before, len(before)) % capacity

    ends = [held[place - MIN_MATCH : place] for place in range(MIN_MATCH, len(held) + 1)]
    return sum(-1 not in end and bucket(end) == bucket(tokens) for end in ends)


def matches(held: list[int], place: int, tokens: list[int]) -> int:
    """How many tokens before a place are the last ones of a sequence."""
    length = 0
    while length < min(place, len(tokens)) and held[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def continuations(after: list[int], depth: int) -> list[tuple[int, ...]]:
    """Beginnings of what follows a place, up to the end of its sequence."""
    end = after.index(-1) if -1 in after else len(after)
    return [tuple(after[:length]) for length in range(1, min(end, depth) + 1)]
