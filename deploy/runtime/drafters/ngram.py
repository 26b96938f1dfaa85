"""Drafts copied from the sequence itself: what followed the last tokens before may follow again.

Prompt lookup with a bounded table: the least recently used n-grams are forgotten, as in
Cacheback (Ma et al., "Cacheback: Speculative Decoding With Nothing But Cache", 2025).
"""

from collections import OrderedDict
from collections.abc import Iterator

from torch import Tensor

from polybasic.chain.formats.plan import MAX_TREE_ROWS, Ngram, Tree
from polybasic.chain.kernels.drafts import NGRAM, DraftTree
from polybasic.deploy.runtime.drafters.history import History
from polybasic.deploy.runtime.drafters.interface import Drafter, NoDrafter
from polybasic.deploy.runtime.rounds.verifier import PassClock

NUM_MATCH_LENGTHS = 4
"""How many match lengths are tried, from the settings' `min_match` upwards."""
MAX_COPIES = 4
"""Most recent places that a draft copies from; common beginnings share rows."""


class NgramDrafter:
    """Copies what followed an earlier occurrence of the last tokens; else another drafter drafts.

    The longest match is used; several places where it occurred give a tree. The table holds only
    the current sequence, and tokens that are rewound are unlearned, so a draft depends only on the
    calls since the sequence began. Learning, unlearning and looking up a token take the same time
    however long the sequence is.

    Args:
        settings: shortest match, longest copy and size of the table.
        tree: shape of the drafts; it bounds the rows of a copy, `settings` bound its depth.
        fallback: drafts if nothing matches; by default nothing is proposed then.
        history: what was said before, from which is copied where the sequence has no match.
    """

    def __init__(
        self,
        settings: Ngram,
        tree: Tree,
        fallback: Drafter | None = None,
        history: History | None = None,
    ) -> None:
        self.settings, self.fallback = settings, fallback or NoDrafter()
        self.tree, self.history = tree, history
        shortest = settings.min_match
        self._match_lengths = range(shortest, shortest + NUM_MATCH_LENGTHS)
        self._tokens: list[int] = []
        # n-gram -> place of the token after its latest occurrence; most recently used last.
        self._places: OrderedDict[tuple[int, ...], int] = OrderedDict()
        # For each token, by match length, the place that its n-gram pointed to before.
        self._earlier: list[list[int | None]] = []

    @property
    def clock(self) -> PassClock | None:
        return self.fallback.clock

    @property
    def num_observed(self) -> int | None:
        return self.fallback.num_observed

    def observe(self, states: Tensor) -> None:
        self.fallback.observe(states)

    def rewind(self, num_observed: int) -> None:
        while len(self._tokens) > num_observed:
            self._unlearn_last()
        self.fallback.rewind(num_observed)

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        copied = self.copied(tokens, max_depth)
        return copied or self.extended(self.fallback.draft(tokens, max_depth), max_depth)

    def copied(self, tokens: list[int], max_depth: int) -> DraftTree | None:
        """Copies after the sequence `tokens`; None if nothing matches."""
        for place in range(len(self._tokens), len(tokens)):
            self._learn(tokens[place])
        depth = min(self.settings.num_tokens, max_depth)
        if (found := self._copy(depth)) is not None or self.history is None:
            return found
        return self.history.drafted(tokens, depth, self.tree.rows)

    def extended(self, tree: DraftTree, max_depth: int) -> DraftTree:
        """Another drafter's tree after the same sequence, which `copied` has seen, with what
        followed its most probable path before, where the settings want that."""
        if not self.settings.extends:
            return tree
        path = tree.best_path()
        drafted = [tree.tokens[row] for row in path[1:]]
        room = min(self.settings.num_tokens, max_depth - len(drafted), MAX_TREE_ROWS - len(tree))
        if not drafted or room <= 0:
            return tree
        for token in drafted:
            self._learn(token)
        place = next(self._matches(), None)
        found = [] if place is None else self._continuation(place, room)
        for _ in drafted:
            self._unlearn_last()
        return tree.followed_by(path[-1], found) if found else tree

    def _copy(self, depth: int) -> DraftTree | None:
        """Candidates from the latest places where the longest match occurred; None if no match."""
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
        return DraftTree(tokens, parents, NGRAM) if len(tokens) > 1 else None

    def _matches(self) -> Iterator[int]:
        """Places of the tokens after the longest match, latest first, at most `MAX_COPIES`."""
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
        """`depth` tokens from `place` on; a copy that reaches the end of the sequence repeats."""
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
        """Unlearn the last token: the n-grams before it point to where they did."""
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
