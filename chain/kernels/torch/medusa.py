"""Drafts of Medusa's heads (Cai et al., arXiv 2401.10774) and of Hydra's (arXiv 2402.05109).

Head i, from 0, gives the token i + 2 places after the state's, which is i + 1 places below the root
of the draft. There is no attention, hence no cache.

#   R = rows, D = hidden size, S = sequences, L = levels, K = candidates of a level, V = tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from polybasic.chain.kernels.drafts import Candidates
from polybasic.chain.kernels.executor import DraftRequest, Layers
from polybasic.chain.kernels.rows import Rows
from polybasic.chain.kernels.torch.executor import REFERENCE, TorchExecutor
from polybasic.chain.kernels.torch.rows import DeviceRows
from polybasic.chain.kernels.weights import Linear, ModelWeights, embed

Places = NDArray[np.int64]


@dataclass(frozen=True)
class TokenHead:
    """What leads to the token of one place.

    Attributes:
        blocks: residual blocks x + silu(W x + b), one after the other: D -> D.
        lm_head: D -> V.
        joined: of a Hydra head: the first block, which reads the state and the embeddings of the
            path, and beside its outputs those that stand for x: (place + 2) * D -> 2D.
    """

    blocks: tuple[Linear, ...]
    lm_head: Linear
    joined: Linear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [R, V] of rows [R, D]; of a Hydra head, of rows [R, (place + 2) * D]."""
        if self.joined is not None:
            inner, kept = self.joined(x).chunk(2, -1)
            x = kept + F.silu(inner)
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.lm_head(x)


@dataclass(frozen=True)
class MedusaWeights(ModelWeights):
    """Several small heads in the place of layers.

    Attributes:
        heads: by place below the root.
    """

    heads: tuple[TokenHead, ...] = ()

    @property
    def is_head(self) -> bool:
        """Always."""
        return True

    @property
    def max_levels(self) -> int:
        """As many as there are heads."""
        return len(self.heads)


class _Draft:
    """A draft that grows level by level, on the host: see `Executor.drafts`.

    `expand` would give the same candidates. Here a level's best tokens are found once for all rows
    that have the same logits, and drafts of several sequences run each head once: on a CPU `expand`
    takes 1.2 to 2 times as long for four sequences, and 0.9 to 1.3 times for one.
    """

    def __init__(self, request: DraftRequest) -> None:
        self._request, self._top_k = request, request.top_k
        self._scores: list[NDArray[np.float32]] = []
        self._tokens: list[Places] = []
        self._beams: list[Places] = []

    @property
    def grows(self) -> bool:
        """Whether a level is to follow."""
        if len(self._scores) == self._request.depth:
            return False
        return not self._scores or bool((self._scores[-1] >= self._request.least_score).any())

    def add(self, scores: NDArray[np.float32], tokens: Places) -> None:
        """The next level: log-probabilities and tokens [K, K] below each of the beam, or [1, K]
        below all of it, as below the root."""
        if self._scores:
            above = self._scores[-1][self._beams[-1]]
            scores = above[:, None] + scores
            tokens = np.broadcast_to(tokens, scores.shape)
        self._scores.append(scores.reshape(-1))
        self._tokens.append(tokens.reshape(-1))
        self._beams.append(np.argsort(-self._scores[-1], kind="stable")[: self._top_k])

    def beam(self) -> tuple[Places, Places]:
        """Tokens [K] of the best candidates of the last level, and their parents' rows in it."""
        places = self._beams[-1]
        return self._tokens[-1][places], places // self._top_k

    def candidates(self, device: torch.device) -> Candidates:
        """All levels."""
        beams = np.array(self._beams[:-1], np.int64).reshape(-1, self._top_k)
        numbers = np.concatenate(self._tokens), np.concatenate(self._scores), beams
        tokens, scores, places = (torch.from_numpy(each).to(device) for each in numbers)
        return Candidates(self._top_k, tokens, scores, places)


class MedusaExecutor(TorchExecutor):
    """Runs Medusa's heads; a state is what the verifier left for the token before the root.

    Products are those of the backend that laid the heads out; rounds run through the host.
    """

    weights: MedusaWeights

    def __init__(self, weights: MedusaWeights) -> None:
        super().__init__(weights)

    def forward(
        self,
        token_ids: Tensor,
        caches: Sequence[Layers],
        rows: Sequence[Rows | DeviceRows],
        features: Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> Tensor:
        """States: the features [R, D]; of a Hydra head [R, 2D], with embeddings of the tokens."""
        assert features is not None, "of a verifier"
        return self._states(token_ids, features)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [R, V] of the first place below the root."""
        return self.weights.heads[0](states)

    def drafts(self, requests: Sequence[DraftRequest]) -> list[Candidates]:
        states = torch.cat([request.state for request in requests])
        depth = max(request.depth for request in requests)
        positions_SLV = torch.stack([head(states) for head in self.weights.heads[:depth]], 1)
        found = []
        for positions, request in zip(positions_SLV, requests, strict=True):
            draft, levels = _Draft(request), slice(request.depth)
            for best in zip(*self._best(request, positions[levels], levels), strict=True):
                if draft.grows:
                    draft.add(*(each[None] for each in best))
            found.append(draft.candidates(self.device))
        return found

    def _states(self, token_ids: Tensor, above: Tensor) -> Tensor:
        """What heads read below tokens [R], given the states above them."""
        return above

    def _best(
        self, request: DraftRequest, logits: Tensor, levels: slice
    ) -> tuple[NDArray[np.float32], Places]:
        """Scores and tokens [R, K] below rows of logits [R, V].

        Args:
            levels: of each row, or the one of all.
        """
        token_ids, top_k = self.weights.draft_token_ids, request.top_k
        if request.perturbation is not None:
            added = request.perturbation.added[levels]
            added = added if token_ids is None else added[:, token_ids]
            logits = logits.float() * request.perturbation.scale + added
        scores, tokens = REFERENCE.continuations(logits, top_k, None, token_ids)
        return (
            scores.view(-1, top_k).cpu().numpy(),
            tokens.view(-1, top_k).cpu().numpy(),
        )


class HydraExecutor(MedusaExecutor):
    """Runs Hydra's heads, which also read the embeddings of the path from the root on.

    A state [(place + 2) * D] is the verifier's and these embeddings, side by side.
    """

    def drafts(self, requests: Sequence[DraftRequest]) -> list[Candidates]:
        drafts, states = (
            [_Draft(request) for request in requests],
            [request.state for request in requests],
        )
        for level, head in enumerate(self.weights.heads):
            growing = [place for place, draft in enumerate(drafts) if draft.grows]
            if not growing:
                break
            for place in growing if level > 0 else ():
                tokens, parents = map(torch.from_numpy, drafts[place].beam())
                above = states[place][parents.to(self.device)]
                states[place] = self._states(tokens.to(self.device), above)
            logits = head(torch.cat([states[place] for place in growing]))
            parts = logits.split([len(states[place]) for place in growing])
            for place, own in zip(growing, parts, strict=True):
                drafts[place].add(*self._best(requests[place], own, slice(level, level + 1)))
        return [draft.candidates(self.device) for draft in drafts]

    def _states(self, token_ids: Tensor, above: Tensor) -> Tensor:
        return torch.cat([above, embed(self.weights.embedding, token_ids)], -1)
