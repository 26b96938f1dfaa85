"""Drafters: what proposes a tree of candidates for the innermost verifier."""

from typing import Protocol

import torch
from torch import Tensor

from polybasic.chain.decoder import attend_causally, attend_to_ancestors
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
        hidden = torch.full((tree.top_k, tree.depth * tree.top_k), float("-inf"))
        self._hidden = hidden.to(head.device, head.dtype)

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
        top_k, device = self.tree.top_k, self.head.device
        features = self._read_observed(tokens_so_far)
        start = self.cache.length
        scores, tokens = self._log_probabilities(features).topk(top_k)
        beam_scores, beam_tokens = scores[0], tokens[0]
        beam_nodes = torch.arange(top_k, device=device)
        # Candidates in the order in which they are numbered, parents before children.
        all_scores, all_tokens = [beam_scores], [beam_tokens]
        all_parents = [torch.full((top_k,), -1, device=device)]
        features = features.expand(top_k, -1)
        among_rows = self._hidden[:, :0]
        num_nodes = top_k
        for level in range(depth - 1):
            among_rows = torch.cat([among_rows, self._hidden[:, :top_k]], 1)
            among_rows[:, -top_k:].fill_diagonal_(0)
            positions = torch.full((top_k,), start + level, device=device)
            attend = attend_to_ancestors(self.head, start, positions, among_rows)
            features = self.head.forward(beam_tokens, features, self.cache.layers[0], attend)
            log_probabilities, tokens = self._log_probabilities(features).topk(top_k)
            scores = (beam_scores[:, None] + log_probabilities).flatten()
            tokens = tokens.flatten()
            all_scores.append(scores)
            all_tokens.append(tokens)
            all_parents.append(beam_nodes.repeat_interleave(top_k))
            beam_scores, chosen = scores.topk(top_k)
            beam_tokens, beam_nodes = tokens[chosen], num_nodes + chosen
            expanded = chosen // top_k
            features, among_rows = features[expanded], among_rows[expanded]
            num_nodes += top_k * top_k
        return self._keep_best(
            tokens_so_far[-1],
            torch.cat(all_scores),
            torch.cat(all_tokens),
            torch.cat(all_parents),
        )

    def _log_probabilities(self, features: Tensor) -> Tensor:
        return self.lm_head(features).log_softmax(-1, dtype=torch.float32)

    def _keep_best(self, root: int, scores: Tensor, tokens: Tensor, parents: Tensor) -> DraftTree:
        # The stable sort puts a parent before a child of equal score.
        best = scores.sort(descending=True, stable=True).indices[: self.tree.rows - 1]
        best = best.sort().values
        table = torch.stack([best, tokens[best], parents[best]]).tolist()
        row_of = {-1: 0} | {node: row for row, node in enumerate(table[0], 1)}
        return DraftTree([root, *table[1]], [-1, *(row_of[parent] for parent in table[2])])


def draft_rows(tree: Tree) -> int:
    """Rows that a draft of this shape writes behind the committed ones of the head's cache."""
    return tree.depth * tree.top_k
