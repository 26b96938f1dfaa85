"""How tokens are drawn: the warped distributions, the random numbers, and the two samplers.

Stages know a sampler only by four verbs: `distributions` turns logits into what tokens are drawn
from, `draw` draws, `join` collects rows into a block's distributions, `verify` cuts a block.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from polybasic.chain.errors import UserError
from polybasic.deploy import verification


@dataclass(frozen=True)
class Sampling:
    """What a user may set, with the meaning that transformers gives it.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens; None keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p.
        seed: of the random numbers; None draws one.

    Raises:
        UserError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, is_valid, bound in (
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k is None or self.top_k >= 1, "1 or more"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0, at most 1"),
        ):
            if not is_valid:
                value = getattr(self, name)
                raise UserError("sampling setting out of range", f"{name}={value}", f"use {bound}")


class Sampler(Protocol):
    """Draws tokens and cuts blocks, exactly from the distributions that it makes of logits."""

    def distributions(self, logits: Tensor) -> Any:
        """What tokens are drawn from, one row for each row of `logits` [R, V]."""

    def draw(self, rows: Any, row: int) -> int:
        """A token from one row; each row is drawn from at most once."""

    def join(self, parts: list[tuple[Any, list[int]]]) -> Any:
        """Chosen rows of several distributions, one below the other."""

    def verify(self, tokens: list[int], proposed: Any, own: Any, rule: str) -> tuple[int, int]:
        """Cut a block: how many of `tokens` are kept, and the token that follows them.

        Args:
            proposed: the K rows that the tokens were drawn from.
            own: the verifier's K + 1 rows.
        """


class GreedySampler:
    """Temperature 0: a distribution is its most probable token."""

    def distributions(self, logits: Tensor) -> list[int]:
        return logits.argmax(-1).tolist()

    def draw(self, rows: list[int], row: int) -> int:
        return rows[row]

    def join(self, parts: list[tuple[list[int], list[int]]]) -> list[int]:
        return [rows[row] for rows, chosen in parts for row in chosen]

    def verify(
        self, tokens: list[int], proposed: list[int], own: list[int], rule: str
    ) -> tuple[int, int]:
        num_kept = 0
        while num_kept < len(tokens) and tokens[num_kept] == own[num_kept]:
            num_kept += 1
        return num_kept, own[num_kept]


@dataclass
class Probabilities:
    """Rows [R, V] of float32 probabilities, with the tokens once they were drawn."""

    values: Any
    drawn: list[int] | None = field(default=None)


class RandomSampler:
    """Draws from the softmax of the warped logits, in float32, on the logits' device."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.sampling = sampling
        self.generator = torch.Generator(device)
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed)

    def distributions(self, logits: Tensor) -> Probabilities:
        return Probabilities(warp(logits, self.sampling))

    def draw(self, rows: Probabilities, row: int) -> int:
        if rows.drawn is None:
            # All rows in one go, so that a device is asked once; a walk reads only its own.
            rows.drawn = self._categorical(rows.values)
        return rows.drawn[row]

    def join(self, parts: list[tuple[Probabilities, list[int]]]) -> Probabilities:
        return Probabilities(torch.cat([rows.values[chosen] for rows, chosen in parts]))

    def verify(
        self, tokens: list[int], proposed: Probabilities, own: Probabilities, rule: str
    ) -> tuple[int, int]:
        p, q = own.values, proposed.values if tokens else own.values[:0]
        num_kept, weight = self._cut(tokens, p, q, rule)
        if num_kept == len(tokens):
            following = p[num_kept]
        else:
            following = verification.residual(p[num_kept], q[num_kept], weight)
        return num_kept, self._categorical(following[None])[0]

    def _cut(self, tokens: list[int], p: Any, q: Any, rule: str) -> tuple[int, Any]:
        """Number of kept tokens, and the weight of p in the residual behind them."""
        if rule == "token":
            acceptance = verification.token_acceptance(p, q, tokens)
            for num_kept, probability in enumerate(acceptance):
                if not self._happens([probability])[0]:
                    return num_kept, 1
            return len(tokens), 1
        weights = verification.block_weights(p, q, tokens)
        acceptance = verification.block_acceptance(p, q, weights)
        happened = self._happens(acceptance)
        num_kept = max((i for i, it_did in enumerate(happened, 1) if it_did), default=0)
        return num_kept, weights[num_kept]

    def _happens(self, probabilities: list[Any]) -> list[bool]:
        """An independent event for each probability."""
        if not probabilities:
            return []
        device = self.generator.device
        uniform = torch.rand(len(probabilities), generator=self.generator, device=device)
        return [u < h for u, h in zip(uniform.tolist(), probabilities, strict=True)]

    def _categorical(self, rows: Any) -> list[int]:
        """One token from each row of probabilities, by inversion."""
        cumulative = rows.cumsum(-1)
        uniform = torch.rand(len(rows), 1, generator=self.generator, device=rows.device)
        # The last sum stands for 1, and a token of probability 0 is never reached.
        drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        last = (rows > 0).int().cumsum(-1).argmax(-1, keepdim=True)
        return torch.minimum(drawn, last).squeeze(1).tolist()


def make_sampler(sampling: Sampling, device: torch.device) -> Sampler:
    """The sampler for these settings."""
    return GreedySampler() if sampling.temperature == 0 else RandomSampler(sampling, device)


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [R, V] in float32 after temperature, top-k and top-p, in this order.

    Every model of a chain warps its logits in this one way; what is verified is what was drawn.
    """
    logits = logits.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    probabilities = logits.softmax(-1)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        is_beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        dropped = torch.zeros_like(is_beyond).scatter(-1, order, is_beyond)
        probabilities = probabilities.masked_fill(dropped, 0.0)
        probabilities /= probabilities.sum(-1, keepdim=True)
    return probabilities
