"""Drafts copied from the sequence itself: what followed its last tokens earlier, follows again.

Prompt look-up with a bounded table: the least recently used n-grams are forgotten, as in
Cacheback (Ma et al., "Cacheback: Speculative Decoding With Nothing But Cache", 2025).
"""

from collections import OrderedDict
from collections.abc import Iterator

from torch import Tensor

from polybasic.chain.formats.plan import Ngram, Tree
from polybasic.deploy.drafters.interface import Drafter, NoDrafter
from polybasic.deploy.rounds.tree import DraftTree
from polybasic.deploy.rounds.verifier import PassClock

NUM_MATCH_LENGTHS = 4
"""Lengths of matches that are looked for: from the settings' `min_match` upwards."""
MAX_COPIES = 4
"""Places that a draft copies from, the latest ones; equal beginnings share their rows."""


class NgramDrafter:
    """Copies what followed an earlier occurrence of the last tokens, or lets another draft.

    The longest match decides; several places where it occurred give a tree. The table holds the
    current sequence only, and tokens that are taken back are unlearned, so a draft depends on
    nothing but the calls since the sequence began. A token costs the same work to learn, to
    unlearn and to look up however long the sequence is.

    Args:
        settings: shortest match, longest copy and size of the table.
        tree: shape of the drafts; of a copy it bounds the rows, `settings` bound its depth.
        beside: drafts where nothing matches; by default nothing is proposed there.
    """

    def __init__(self, settings: Ngram, tree: Tree, beside: Drafter | None = None) -> None:
        self.settings, self.beside = settings, beside or NoDrafter()
        self.tree = tree
        shortest = settings.min_match
        self._match_lengths = range(shortest, shortest + NUM_MATCH_LENGTHS)
        self._num_observed = 0
        self._tokens: list[int] = []
        # n-gram -> place of the token behind its latest occurrence, the latest used n-gram last.
        self._places: OrderedDict[tuple[int, ...], int] = OrderedDict()
        # For each token, by match length, the place before its own that its n-gram pointed to.
        self._earlier: list[list[int | None]] = []

    @property
    def tree(self) -> Tree:
        """Shape of the next drafts."""
        return self.beside.tree

    @tree.setter
    def tree(self, tree: Tree) -> None:
        self.beside.tree = tree

    @property
    def clock(self) -> PassClock | None:
        return self.beside.clock

    def observe(self, states: Tensor) -> None:
        self._num_observed += len(states)
        self.beside.observe(states)

    def rewind(self, num_observed: int) -> None:
        assert num_observed <= self._num_observed
        self._num_observed = num_observed
        while len(self._tokens) > num_observed:
            self._unlearn_last()
        self.beside.rewind(num_observed)

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        assert self._num_observed == len(tokens) - 1
        for place in range(len(self._tokens), len(tokens)):
            self._learn(tokens[place])
        tree = self._copy(min(self.settings.num_tokens, max_depth))
        return self.beside.draft(tokens, max_depth) if tree is None else tree

    def _copy(self, depth: int) -> DraftTree | None:
        """Candidates from the latest places where the longest match was seen; None without one."""
        tokens, parents = [self._tokens[-1]], [-1]
        row_of: dict[tuple[int, int], int] = {}
        for place in self._matches():
            row = 0
            for token in self._continuation(place, depth):
                child = row_of.get((row, token))
                if child is None:
                    if len(tokens) == self.tree.rows:
                        break
                    child = row_of[row, token] = len(tokens)
                    tokens.append(token)
                    parents.append(row)
                row = child
        return DraftTree(tokens, parents) if len(tokens) > 1 else None

    def _matches(self) -> Iterator[int]:
        """Places of the tokens behind the longest match, the latest first, at most `MAX_COPIES`."""
        for length in reversed(self._match_lengths):
            if length > len(self._tokens):
                continue
            ngram = self._ngram_before(len(self._tokens), length)
            place = self._places.get(ngram)
            if place is None:
                continue
            self._places.move_to_end(ngram)
            for _ in range(MAX_COPIES):
                yield place
                place = self._earlier[place][length - self.settings.min_match]
                if place is None:
                    return
            return

    def _continuation(self, place: int, depth: int) -> list[int]:
        """`depth` tokens from `place` on; a copy that reaches the sequence's end repeats itself."""
        copied = self._tokens[place : place + depth]
        while len(copied) < depth:
            copied.append(copied[place - len(self._tokens)])
        return copied

    def _learn(self, token: int) -> None:
        """Append a token: the n-grams before it point to its place."""
        place = len(self._tokens)
        earlier: list[int | None] = []
        for length in self._match_lengths:
            if length > place:
                break
            ngram = self._ngram_before(place, length)
            earlier.append(self._places.get(ngram))
            self._places[ngram] = place
            self._places.move_to_end(ngram)
        while len(self._places) > self.settings.capacity:
            self._places.popitem(last=False)
        self._tokens.append(token)
        self._earlier.append(earlier)

    def _unlearn_last(self) -> None:
        """Take the last token back: the n-grams before it point where they did."""
        self._tokens.pop()
        place = len(self._tokens)
        for length, earlier in zip(self._match_lengths, self._earlier.pop(), strict=False):
            ngram = self._ngram_before(place, length)
            if ngram not in self._places:
                continue
            if earlier is None:
                del self._places[ngram]
            else:
                self._places[ngram] = earlier

    def _ngram_before(self, place: int, length: int) -> tuple[int, ...]:
        return tuple(self._tokens[place - length : place])
