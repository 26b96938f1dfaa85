"""Drafters: what proposes a tree of candidates for the innermost verifier."""

from typing import Protocol

import torch
from torch import Tensor

from polybasic.chain.decoder import Attend, attend_causally
from polybasic.chain.eagle import EagleHead
from polybasic.chain.linear import Linear
from polybasic.chain.manifest import Tree
from polybasic.deploy.cache import KeyValueCache
from polybasic.deploy.tree import DraftTree
from polybasic.deploy.verifier import PassClock


class Drafter(Protocol):
    """Proposes candidates; deterministic given the prefix, so that a walk needs no rejection."""

    def observe(self, states: Tensor) -> None:
        """Append the verifier's states [R, D] of the next R tokens of the sequence."""

    def rewind(self, num_observed: int) -> None:
        """Forget all but the first `num_observed` states; the tokens behind them may change."""

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        """Candidates behind the sequence `tokens`, at most `max_depth` deep.

        All tokens but the last, which becomes the root, were observed.
        """


class NoDrafter:
    """Proposes nothing: the verifier runs alone, a token a pass."""

    def observe(self, states: Tensor) -> None:
        """Nothing to learn from."""

    def rewind(self, num_observed: int) -> None:
        """Nothing to forget."""

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        return DraftTree.of_root(tokens[-1])


class EagleDrafter:
    """EAGLE-2's dynamic tree: expand the most probable candidates, then keep the best of all.

    At each depth the `top_k` candidates with the highest cumulative log-probability are expanded
    by `top_k` tokens each; in the end the best `rows - 1` of all candidates are kept. A child
    never scores above its parent, so they form a tree.

    Args:
        head: the draft head.
        lm_head: the target's output projection.
        tree: shape of the tree.
        capacity: rows of the head's cache, the tree's included.
    """

    def __init__(self, head: EagleHead, lm_head: Linear, tree: Tree, capacity: int) -> None:
        self.head, self.lm_head, self.tree = head, lm_head, tree
        self.cache = KeyValueCache(head.config, 1, capacity, head.dtype, head.device)
        self.clock = PassClock(head.device)
        # Features by position, so that any row of the cache can be read again.
        self._features = torch.zeros(
            capacity, head.config.hidden_size, dtype=head.dtype, device=head.device
        )
        self._num_observed = 0
        groups = head.config.query_groups
        self._mask = _Mask(tree, groups, capacity, head.dtype, head.device)

    def observe(self, states: Tensor) -> None:
        end = self._num_observed + len(states)
        self._features[self._num_observed : end] = states
        self._num_observed = end

    def rewind(self, num_observed: int) -> None:
        assert num_observed <= self._num_observed
        self._num_observed = num_observed
        # Row t also holds token t + 1, so the last row is read again.
        self.cache.truncate(min(self.cache.length, max(num_observed - 1, 0)))

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        assert self._num_observed == len(tokens) - 1
        depth = min(max_depth, self.tree.depth)
        if depth == 0 or self._num_observed == 0:
            return DraftTree.of_root(tokens[-1])
        with self.clock.running(num_passes=depth):
            return self._expand(tokens, depth)

    def _read_observed(self, tokens: list[int]) -> Tensor:
        """Read the states not yet read; the guessed feature [1, D] behind the last of them."""
        start, end = self.cache.length, self._num_observed
        features = self.head.forward(
            torch.tensor(tokens[start + 1 : end + 1], device=self.head.device),
            self._features[start:end],
            self.cache.layers[0],
            attend_causally(self.head, start, end - start),
        )
        self.cache.keep(range(end - start))
        return features[-1:]

    def _expand(self, tokens_so_far: list[int], depth: int) -> DraftTree:
        top_k = self.tree.top_k
        features = self._read_observed(tokens_so_far)
        start = self.cache.length
        log_probabilities, tokens = self._log_probabilities(features).topk(top_k)
        beam_scores, beam_tokens = log_probabilities[0], tokens[0]
        # Candidates of each level, flat; those of a level hang below that level's beam, whose
        # members are numbered as candidates of the level above.
        level_scores, level_tokens, beams = [beam_scores], [beam_tokens], []
        beam = torch.arange(top_k, device=self.head.device)
        features = features.expand(top_k, -1)
        mask = self._mask.begin(start)
        for level in range(depth - 1):
            attend = Attend(
                start + level * top_k,
                self.head.rotary.between(start + level, start + level + 1),
                mask.of_level(level),
            )
            features = self.head.forward(beam_tokens, features, self.cache.layers[0], attend)
            log_probabilities, tokens = self._log_probabilities(features).topk(top_k)
            scores = (beam_scores[:, None] + log_probabilities).flatten()
            tokens = tokens.flatten()
            level_scores.append(scores)
            level_tokens.append(tokens)
            beams.append(beam)
            beam_scores, beam = scores.topk(top_k)
            beam_tokens, parents = tokens[beam], beam // top_k
            features = features[parents]
            mask.select(parents)
        return self._keep_best(tokens_so_far[-1], level_scores, level_tokens, beams)

    def _log_probabilities(self, features: Tensor) -> Tensor:
        return self.lm_head(features).log_softmax(-1, dtype=torch.float32)

    def _keep_best(
        self, root: int, scores: list[Tensor], tokens: list[Tensor], beams: list[Tensor]
    ) -> DraftTree:
        """The best `rows - 1` candidates of all levels."""
        top_k = self.tree.top_k
        # The stable sort puts a parent before a child of equal score.
        best = torch.cat(scores).sort(descending=True, stable=True).indices
        best = best[: self.tree.rows - 1].sort().values
        chosen, chosen_tokens = torch.stack([best, torch.cat(tokens)[best]]).tolist()
        beam_members = torch.stack(beams).tolist() if beams else []
        row_of, parents = {-1: 0}, [-1]
        for row, candidate in enumerate(chosen, 1):
            row_of[candidate] = row
            parents.append(row_of[_parent_candidate(candidate, top_k, beam_members)])
        return DraftTree([root, *chosen_tokens], parents)


class _Mask:
    """Which rows the candidates of a draft see: what was read before, their ancestors, themselves.

    One row for each beam member and query head, one column for each row of the head's cache.
    """

    def __init__(
        self,
        tree: Tree,
        query_groups: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.top_k, self.query_groups = tree.top_k, query_groups
        self._num_columns = draft_rows(tree)
        shape = (tree.top_k, query_groups, capacity)
        self._buffer = torch.zeros(shape, dtype=dtype, device=device)
        itself = torch.full((tree.top_k, tree.top_k), float("-inf")).fill_diagonal_(0)
        self._itself = itself[:, None].expand(-1, query_groups, -1).to(device, dtype)
        self._start = 0

    def begin(self, start: int) -> "_Mask":
        """A draft behind `start` rows, all of which are seen."""
        self._buffer[..., self._start : self._start + self._num_columns] = 0
        self._start = start
        return self

    def of_level(self, level: int) -> Tensor:
        """Mask [top_k * query groups, start + (level + 1) * top_k] of a level's beam."""
        first = self._start + level * self.top_k
        self._buffer[..., first : first + self.top_k] = self._itself
        return self._buffer[..., : first + self.top_k].flatten(0, 1)

    def select(self, parents: Tensor) -> None:
        """The next beam: each member sees what its parent saw."""
        columns = slice(self._start, self._start + self._num_columns)
        self._buffer[..., columns] = self._buffer[parents, :, columns]


def _parent_candidate(candidate: int, top_k: int, beam_members: list[list[int]]) -> int:
    """Number of the candidate that this one hangs below; -1 is the root.

    The first level has `top_k` candidates, every other one `top_k` for each member of its beam.
    """
    if candidate < top_k:
        return -1
    level, place = divmod(candidate - top_k, top_k * top_k)
    above = 0 if level == 0 else top_k + (level - 1) * top_k * top_k
    return above + beam_members[level][place // top_k]


def draft_rows(tree: Tree) -> int:
    """Rows that a draft of this shape writes behind the committed ones of the head's cache."""
    return tree.depth * tree.top_k
