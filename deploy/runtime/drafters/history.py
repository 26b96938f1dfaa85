"""Drafts copied from earlier sequences: what followed the same tokens there may follow again.

Retrieval as in REST (He et al., "REST: Retrieval-Based Speculative Decoding", 2024), and trees of
counted continuations, the deeper the longer the match, as in SuffixDecoding (Oliaro et al., 2024).
Places of a match are found by hash chains, as LZ77's compressors find theirs.
"""

from array import array
from collections.abc import Sequence

from polybasic.chain.kernels.drafts import DraftTree

HISTORY = "history"
"""Named as the proposer of its drafts."""
MIN_MATCH = 3
"""Tokens that must repeat."""
_MAX_MATCH = 16
"""Of longer matches no more is compared."""
_MAX_PLACES = 16
"""Most recent ones that are compared."""
_HALF = 4
"""Tokens of a match that goes on as it did in half of the cases."""
_LEAST_PROBABILITY = 0.2
"""Of a token that is drafted: less is not worth a row of a pass."""
_CAPACITY = 1 << 18
_END = -1
"""Between two sequences."""


class History:
    """The latest tokens of earlier sequences, in which continuations are found.

    It holds at most `capacity` tokens, of which it takes 20 bytes each; the oldest are forgotten.

    Args:
        capacity: tokens, a power of two.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        assert capacity & (capacity - 1) == 0, f"a capacity of {capacity} tokens"
        self._last = capacity - 1
        self._tokens = array("i", [_END]) * capacity
        # by the hash of the tokens before a place, the latest such place; counted from 1, 0 is none
        self._latest = array("q", [0]) * capacity
        # of each place, the one before it with the same hash
        self._earlier = array("q", [0]) * capacity
        self._num = 0

    def __len__(self) -> int:
        """Tokens that are held."""
        return min(self._num, self._last + 1)

    def add(self, sequence: Sequence[int]) -> None:
        """Learn a sequence."""
        last, latest, earlier = self._last, self._latest, self._earlier
        for place, token in enumerate(sequence):
            self._put(token)
            if place + 1 >= MIN_MATCH:
                bucket = _hash(sequence, place + 1) & last
                earlier[self._num & last] = latest[bucket]
                latest[bucket] = self._num
        self._put(_END)

    def _put(self, token: int) -> None:
        self._tokens[self._num & self._last] = token
        self._num += 1

    def drafted(self, tokens: list[int], depth: int, rows: int) -> DraftTree | None:
        """Continuations of the longest match of a sequence's end that are probable enough.

        A token's probability is estimated as the share of places that continue so, times
        `_confidence` for each token of the path.

        Args:
            depth: of the tree at most.
            rows: of the tree at most.

        Returns:
            None if there are none.
        """
        longest, places = self._matches(tokens)
        counts: dict[tuple[int, ...], int] = {}  # of the tokens down to each row
        for place in places:
            path: tuple[int, ...] = ()
            for token in self._continuation(place, depth):
                path = (*path, token)
                counts[path] = counts.get(path, 0) + 1
        confidence = _confidence(longest)
        scores = {
            path: score
            for path, count in counts.items()
            if (score := count / len(places) * confidence ** len(path)) >= _LEAST_PROBABILITY
        }
        if not scores:
            return None
        # no parent scores less than its child; of equal ones that of the latest place comes first
        best = sorted(scores, key=lambda path: -scores[path])[: rows - 1]
        row_of: dict[tuple[int, ...], int] = {(): 0}
        parents = [-1]
        for path in best:
            parents.append(row_of[path[:-1]])
            row_of[path] = len(row_of)
        return DraftTree([tokens[-1], *(path[-1] for path in best)], parents, HISTORY)

    def _matches(self, tokens: list[int]) -> tuple[int, list[int]]:
        """The length of the longest match, and the places after it, latest first."""
        longest, found = 0, list[int]()
        if len(tokens) < MIN_MATCH:
            return longest, found
        last, held = self._last, self._tokens
        place = self._latest[_hash(tokens, len(tokens)) & last]
        first = max(self._num - (last + 1), 0)
        for _ in range(_MAX_PLACES):
            if place <= first:
                break
            length = 0
            most = min(_MAX_MATCH, len(tokens), place - first)
            while length < most and held[(place - 1 - length) & last] == tokens[-1 - length]:
                length += 1
            if length > longest:
                longest, found = length, [place]
            elif length == longest:
                found.append(place)
            place = self._earlier[place & last]
        return (longest, found) if longest >= MIN_MATCH else (0, [])

    def _continuation(self, place: int, depth: int) -> list[int]:
        """At most `depth` tokens from a place on, of its sequence."""
        found: list[int] = []
        for position in range(place, min(place + depth, self._num)):
            token = self._tokens[position & self._last]
            if token == _END:
                break
            found.append(token)
        return found


def _confidence(length: int) -> float:
    """How probable it is that a match of so many tokens goes on as it did."""
    return length**2 / (length**2 + _HALF**2)


def _hash(tokens: Sequence[int], end: int) -> int:
    """Of the `MIN_MATCH` tokens before a place."""
    found = 0
    for token in tokens[end - MIN_MATCH : end]:
        found = (found * 0x9E3779B1 + token) & 0xFFFFFFFFFFFF
    return found ^ found >> 17
