"""Drafts by expanding a model into a tree of its most probable continuations."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import Self

import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Tree, Window
from polybasic.chain.kernels.drafts import Candidates, DraftTree
from polybasic.chain.kernels.executor import DraftRequest, Executor
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.noise import Noise
from polybasic.deploy.runtime.rounds.verifier import PassClock, all_running


class ExpandingDrafter(ABC):
    """Base of drafters that expand a model into a tree: the best `rows - 1` of all candidates, or
    of those that are probable enough.

    The rows that a draft writes stay provisional: the next pass overwrites them.

    Args:
        model: drafts.
        cache: the model's.
        tree: shape of the drafts.
        lag: tokens of the sequence before the first one that the model reads: 1 for a head, whose
            row t holds token t + 1.

    Attributes:
        name: of the model among the chain's members.
        window: the part of a long context that the model sees; None for all.
        noise: that the verifier draws with; None if it draws without, or greedily.

    Raises:
        UserError: a tree wider than the vocabulary.
    """

    def __init__(self, model: Executor, cache: KeyValueCache, tree: Tree, lag: int) -> None:
        self.model, self.cache, self.lag = model, cache, lag
        self.name = ""
        self._begin_request(tree, None, None)

    def drafting(
        self, tree: Tree, window: Window | None = None, noise: Noise | None = None
    ) -> Self:
        """The same model and cache for one request, which counts its own passes."""
        other = copy(self)
        other._begin_request(tree, window, noise)
        return other

    def _begin_request(self, tree: Tree, window: Window | None, noise: Noise | None) -> None:
        num_tokens = self.model.weights.num_draft_tokens
        if tree.top_k > num_tokens:
            raise UserError(
                "draft tree wider than the vocabulary",
                f"top_k {tree.top_k}, {num_tokens} tokens",
                "use a smaller top_k",
            )
        self.tree, self.window, self.noise = tree, window, noise
        self.clock = PassClock(self.model.device)
        self.shortlist, self._has_seen = self.model.shortlist(), False

    @property
    def min_tokens(self) -> int:
        """Tokens that a sequence needs before a draft."""
        return self.lag + 1

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        """See `polybasic.deploy.runtime.drafters.interface.Drafter`."""
        return draft_together([self], [tokens], [max_depth])[0]

    @property
    def kind(self) -> Hashable:
        """Drafters of one kind can draft together, each after its own sequence."""
        return id(self.model), "draft"

    @property
    def max_depth(self) -> int:
        """Of a draft: that of the tree, or what the model can give."""
        return min(self.tree.depth, self.model.max_levels or self.tree.depth)

    def depth_of(self, tokens: list[int], max_depth: int) -> int:
        """Levels of a draft after `tokens`; 0 if there is none."""
        return min(max_depth, self.max_depth) if len(tokens) >= self.min_tokens else 0

    def candidates(self, tokens: list[int], depth: int) -> Candidates:
        """All candidates after the sequence `tokens`, which has at least `min_tokens`.

        Args:
            depth: levels; may exceed those of the tree.
        """
        return _candidates([self], [tokens], [depth], [-math.inf])[0]

    def begin(self, tokens: list[int]) -> int:
        """Prepare for a draft after `tokens`; the number of rows of the cache that stay.

        The last row is always read again: the draft starts from its state.
        """
        self.cache.truncate(min(self.cache.length, len(tokens) - self.lag - 1))
        return self.cache.length

    def see(self, tokens: list[int]) -> None:
        """Tokens of the sequence, which may be drafted from now on."""
        if self.shortlist is not None:
            # those before the rows that stay were seen, but before the first draft
            self.shortlist.add(tokens[self.cache.length :] if self._has_seen else tokens)
            self._has_seen = True

    def read(self, tokens: list[int], end: int) -> Tensor:
        """Read the rows from the cache's length up to `end`; the state [1, D] of the last one."""
        return _read([self], [tokens], [end], [0])[0]

    def copy_from(self, other: Self, num_tokens: int) -> None:
        """Take over what the drafter of another sequence knows of its first tokens.

        A row of a head's cache holds the token after its own, too.
        """
        self.cache.copy_from(other.cache, max(num_tokens - self.lag, 0))

    def fill(self, num_tokens: int) -> None:
        """Hold so many tokens, which nothing has read, see `Slot.fill_unread`."""
        self.cache.fill(num_tokens - self.lag)

    def give_back(self) -> None:
        """Return the memory of rows that are not committed, see `KeyValueCache.give_back`."""
        self.cache.give_back()

    @property
    @abstractmethod
    def num_observed(self) -> int | None:
        """See `polybasic.deploy.runtime.drafters.interface.Drafter`; so are the others."""

    @abstractmethod
    def observe(self, states: Tensor) -> None: ...

    @abstractmethod
    def rewind(self, num_observed: int) -> None: ...

    @abstractmethod
    def features(self, start: int, end: int, rows_ahead: int = 0) -> Tensor | None:
        """Features [R, D] of the rows from `start` up to `end`; None if the model reads none.

        Args:
            rows_ahead: rows after these, see `ModelWeights.rows_ahead`.
        """


def draft_together(
    drafters: Sequence[ExpandingDrafter],
    tokens: Sequence[list[int]],
    max_depths: Sequence[int],
) -> list[DraftTree]:
    """As `draft` of each of several drafters of one kind, after the sequence of each."""
    asked = list(zip(drafters, tokens, max_depths, strict=True))
    depths = [drafter.depth_of(text, most) for drafter, text, most in asked]
    trees = [DraftTree.of_root(text[-1]) for text in tokens]
    places = [place for place, depth in enumerate(depths) if depth > 0]
    if not places:
        return trees
    drafting = [drafters[place] for place in places]
    with all_running([drafter.clock for drafter in drafting], num_passes=0):
        found = _candidates(
            drafting,
            [tokens[place] for place in places],
            [depths[place] for place in places],
            [drafter.tree.least_score for drafter in drafting],
        )
        for drafter, place, candidates in zip(drafting, places, found, strict=True):
            drafter.clock.num_passes += 1 if drafter.model.max_levels else candidates.num_levels
            drafter.clock.num_levels += candidates.num_levels
            tree = drafter.tree
            trees[place] = candidates.keep_best(
                tokens[place][-1], tree.rows, drafter.name, tree.least_score
            )
    return trees


def _candidates(
    drafters: Sequence[ExpandingDrafter],
    tokens: Sequence[list[int]],
    depths: Sequence[int],
    least_scores: Sequence[float],
) -> list[Candidates]:
    """All candidates of each of several drafters of one kind."""
    for drafter, text in zip(drafters, tokens, strict=True):
        drafter.begin(text)
        drafter.see(text)
    ends = [len(text) - drafter.lag for drafter, text in zip(drafters, tokens, strict=True)]
    ahead = [drafters[0].model.weights.rows_ahead(depth) for depth in depths]
    states = _read(drafters, tokens, ends, ahead)
    requests = []
    for drafter, text, depth, state, least_score in zip(
        drafters, tokens, depths, states, least_scores, strict=True
    ):
        start, top_k = drafter.cache.length, drafter.tree.top_k
        end = start + (depth - 1) * top_k
        assert end <= drafter.cache.capacity, f"depth {depth} after {start} rows"
        perturbation = None if drafter.noise is None else drafter.noise.draft(len(text), depth)
        requests.append(
            DraftRequest(
                state,
                drafter.cache.layers,
                start,
                depth,
                top_k,
                drafter.window,
                perturbation,
                least_score,
                drafter.shortlist,
            )
        )
    return drafters[0].model.drafts(requests)


def _read(
    drafters: Sequence[ExpandingDrafter],
    tokens: Sequence[list[int]],
    ends: Sequence[int],
    ahead: Sequence[int],
) -> list[Tensor]:
    """Read the rows of each drafter's cache up to an end, and provisional ones for positions ahead.

    Returns:
        Of each drafter the states [1 + ahead, D] from the last row before its end on.
    """
    model, ids, rows, features = drafters[0].model, [], [], []
    for drafter, text, end, num_ahead in zip(drafters, tokens, ends, ahead, strict=True):
        start = drafter.cache.length
        ids += text[start + drafter.lag : end + drafter.lag]
        ids += model.weights.tokens_ahead(text[end + drafter.lag - 1], num_ahead)
        rows.append(consecutive_rows(start, end - start + num_ahead, drafter.window))
        features.append(drafter.features(start, end, num_ahead))
    states = model.forward(
        torch.tensor(ids, device=model.device),
        [drafter.cache.layers for drafter in drafters],
        rows,
        _joined([part for part in features if part is not None]),
    )
    for drafter, read, num_ahead in zip(drafters, rows, ahead, strict=True):
        drafter.cache.keep(range(read.num_rows - num_ahead))
    parts = [states] if len(rows) == 1 else states.split([read.num_rows for read in rows])
    return [part[-1 - num_ahead :] for part, num_ahead in zip(parts, ahead, strict=True)]


def _joined(parts: list[Tensor]) -> Tensor | None:
    """Rows of all parts; None if there are none."""
    return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None


MakeDrafter = Callable[[Executor, Tree, int], ExpandingDrafter]
"""A model that drafts, the shape of its drafts, and rows of its cache -> its drafter."""
MakeSharingDrafter = Callable[[Executor, Tree, KeyValueCache], ExpandingDrafter]
"""The same of a drafter that has no cache of its own, over that of its verifier."""
