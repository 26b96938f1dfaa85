"""Corrections of a block's logits by drafted tokens: DSpark's Markov heads, Domino's GRU.

Each is computed row by row along a path, as specforge 0.2.0 does (specforge/modeling/draft:
dspark.py and domino.py).

#   L = levels, K = rows of a level, D = hidden size, V = vocabulary, V' = tokens to draft
#   A = rank of bigrams, G = size of a GRU's state, F = what is read of a token
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.kernels.torch.positions import Correction
from polybasic.chain.kernels.weights import Embedding, Linear, embed


class Corrector(Protocol):
    """Weights that correct the logits of any block."""

    def read(self, token_ids: Tensor) -> Tensor:
        """What corrections read of tokens [K], [K, F]."""

    def after(self, anchor: Tensor, hidden_LD: Tensor) -> Correction:
        """The correction of one block.

        Args:
            anchor: [1, F], what `read` returns of the token before the block's first level.
            hidden_LD: what the head says of each level, as its output projection reads it.
        """


@dataclass(frozen=True)
class MarkovWeights:
    """A table of bigrams of low rank.

    Attributes:
        before: [V, A], of the token before.
        out: A -> V', what is added to the logits.
        gate: D + A -> A, of a gated head.
        joint: 2A + D -> 3A, of a recurrent head.
    """

    before: Tensor
    out: Linear
    gate: Linear | None = None
    joint: Linear | None = None

    def read(self, token_ids: Tensor) -> Tensor:
        """See `Corrector.read`; F = A."""
        return F.embedding(token_ids, self.before)

    def after(self, anchor: Tensor, hidden_LD: Tensor) -> Correction:
        """See `Corrector.after`."""
        return _Markov(self, anchor, hidden_LD)


class _Markov:
    """States hold what is read of the token before; a recurrent head's also its own state."""

    def __init__(self, weights: MarkovWeights, anchor: Tensor, hidden_LD: Tensor) -> None:
        self._weights, self._anchor, self._hidden = weights, anchor, hidden_LD
        self._level = 0

    def begin(self) -> Tensor:
        if self._weights.joint is None:
            return self._anchor
        return torch.cat([torch.zeros_like(self._anchor), self._anchor], -1)

    def step(self, token_ids: Tensor, states: Tensor) -> Tensor:
        read = self._weights.read(token_ids)
        if self._weights.joint is not None:
            gate, candidate, _ = self._joint(states)
            own = states[:, : gate.shape[1]]
            read = torch.cat([gate * own + (1 - gate) * candidate, read], -1)
        self._level += 1
        return read

    def logits(self, position: Tensor, states: Tensor) -> Tensor:
        weights, latent = self._weights, states
        if weights.gate is not None:
            latent = weights.gate(torch.cat([self._row(states), states], -1)).sigmoid() * states
        if weights.joint is not None:
            latent = self._joint(states)[2]
        return position + weights.out(latent)

    def _joint(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gate, candidate and output of the level's rows, each [K, A]."""
        assert self._weights.joint is not None
        raw = self._weights.joint(torch.cat([states, self._row(states)], -1))
        gate, candidate, output = raw.chunk(3, -1)
        return gate.sigmoid(), candidate.tanh(), output.tanh()

    def _row(self, states: Tensor) -> Tensor:
        """What the head says of the level, [K, D]."""
        return self._hidden[self._level].expand(len(states), -1)


@dataclass(frozen=True)
class DominoWeights:
    """A GRU over the tokens before, and a small network over its state.

    Attributes:
        embedding: the verifier's.
        inputs, recurrent: D -> 3G and G -> 3G: reset, update and candidate of the GRU, in
            PyTorch's order.
        inner: D + G -> the network's width.
        outer: from there -> V', what is added to the logits.
        num_plain: levels, the first ones, that are not corrected.
    """

    embedding: Embedding
    inputs: Linear
    recurrent: Linear
    state_size: int
    inner: Linear
    outer: Linear
    num_plain: int

    def read(self, token_ids: Tensor) -> Tensor:
        """See `Corrector.read`; F = 3G."""
        return self.inputs(embed(self.embedding, token_ids))

    def after(self, anchor: Tensor, hidden_LD: Tensor) -> Correction:
        """See `Corrector.after`."""
        return _Domino(self, anchor, hidden_LD)


class _Domino:
    """States are the GRU's after the tokens so far, the anchor first."""

    def __init__(self, weights: DominoWeights, anchor: Tensor, hidden_LD: Tensor) -> None:
        self._weights, self._anchor, self._hidden = weights, anchor, hidden_LD
        self._level = 0

    def begin(self) -> Tensor:
        return self._turned(self._anchor, self._anchor.new_zeros(1, self._weights.state_size))

    def step(self, token_ids: Tensor, states: Tensor) -> Tensor:
        self._level += 1
        return self._turned(self._weights.read(token_ids), states)

    def logits(self, position: Tensor, states: Tensor) -> Tensor:
        if self._level < self._weights.num_plain:
            return position.expand(len(states), -1)
        row = self._hidden[self._level].expand(len(states), -1)
        inner = F.silu(self._weights.inner(torch.cat([row, states], -1)))
        return position + self._weights.outer(inner)

    def _turned(self, read: Tensor, states: Tensor) -> Tensor:
        """The GRU's states after tokens."""
        reset, update, candidate = read.chunk(3, -1)
        own_reset, own_update, own_candidate = self._weights.recurrent(states).chunk(3, -1)
        reset, update = (reset + own_reset).sigmoid(), (update + own_update).sigmoid()
        new = (candidate + reset * own_candidate).tanh()
        return (1 - update) * new + update * states
