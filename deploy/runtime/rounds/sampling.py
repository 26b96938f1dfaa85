"""How tokens are drawn: the random numbers and the three samplers.

Stages use six methods of a sampler: `distributions` turns logits into the distributions that tokens
are drawn from, `draw` draws, `take` selects the rows of a round that verification needs, `join`
combines them into a block's distributions, `verify` cuts a block, and `probabilities` returns how
sure the proposing model was.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from polybasic.chain.formats.plan import Rule
from polybasic.chain.kernels.cpu.library import kernels_for
from polybasic.deploy.runtime.rounds import verification
from polybasic.deploy.runtime.rounds.constraint import Constraint
from polybasic.deploy.runtime.rounds.noise import Noise
from polybasic.deploy.runtime.rounds.warping import (
    Prefixes,
    Sampling,
    Warping,
    process_logits,
    warped,
)

__all__ = [
    "CoupledSampler",
    "GreedyRows",
    "GreedySampler",
    "Joiner",
    "NotFiniteError",
    "Prefixes",
    "Probabilities",
    "RandomSampler",
    "Sampler",
    "Sampling",
    "make_sampler",
    "most_probable",
    "probabilities_of",
    "seeded_generator",
]


class NotFiniteError(ArithmeticError):
    """A model's logits are no numbers, from which nothing can be drawn."""


class Joiner(Protocol):
    """The part of a sampler that joins a stage's rounds into a block."""

    def take(self, rows: Any, chosen: list[int]) -> Any:
        """Only the chosen rows, in the form that `verify` needs; the others can be freed."""

    def join(self, parts: list[Any]) -> Any:
        """Concatenate rows that were taken."""

    def probabilities(self, rows: Any, chosen: list[int], tokens: list[int]) -> list[float]:
        """The proposing model's own probability of each token, given the row it was drawn from.

        The random sampler returns the probabilities that it drew with, the greedy one the softmax
        of its logits in float32.

        Args:
            rows: as `distributions` returned them.
        """


class Sampler(Joiner, Protocol):
    """Draws tokens and cuts blocks, exactly from the distributions that it computes.

    Attributes:
        constraint: of the answer.
    """

    constraint: Constraint | None

    def distributions(self, logits: Tensor, prefixes: Prefixes) -> Any:
        """The distributions to draw tokens from, one for each row of `logits` [R, V].

        Args:
            prefixes: the tokens before each row's draw.
        """

    def draw(self, rows: Any, row: int) -> int:
        """A token from one row; each row is drawn from at most once."""

    def verify(self, tokens: list[int], proposed: Any, own: Any) -> tuple[int, int]:
        """Cut a block: how many of `tokens` are kept, and the token that follows them.

        Args:
            proposed: the K rows that the tokens were drawn from, joined.
            own: the verifier's K + 1 rows, as `distributions` returned them.
        """


@dataclass(frozen=True)
class GreedyRows:
    """The most probable token of each row.

    Attributes:
        probabilities: gives those of tokens in rows, by the softmax of the logits after the
            penalties, or warped and with noise; None after `take`.

    Raises:
        NotFiniteError: a row has none, which -1 stands for.
    """

    tokens: list[int]
    probabilities: Callable[[list[int], list[int]], list[float]] | None = None

    def __post_init__(self) -> None:
        if -1 in self.tokens:
            raise NotFiniteError


class _Processing:
    """What all samplers do with logits first.

    Args:
        num_prompt_tokens: leading tokens of every prefix that are not output.
        constraint: of the answer.
    """

    def __init__(
        self, sampling: Sampling, num_prompt_tokens: int, constraint: Constraint | None = None
    ) -> None:
        self.sampling, self.num_prompt_tokens = sampling, num_prompt_tokens
        self.constraint = constraint

    def _processed(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        if self.constraint is not None:
            logits = self.constraint.restrict(logits, prefixes)
        return process_logits(logits, self.sampling, prefixes, self.num_prompt_tokens)


class GreedySampler(_Processing):
    """Temperature 0: a distribution is its most probable token; see the base for its arguments.

    Only bias and penalties matter of the sampling, since truncation keeps the argmax.
    """

    def scores(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        """Of [R, V], of which each draw is the largest of its row."""
        return self._processed(logits, prefixes)

    def distributions(self, logits: Tensor, prefixes: Prefixes) -> GreedyRows:
        logits = self._processed(logits, prefixes)
        return GreedyRows(most_probable(logits), partial(probabilities_of, logits))

    @property
    def reads_prefixes(self) -> bool:
        """Whether draws depend on the tokens before them in another way than by the logits."""
        return self.sampling.has_penalties or self.constraint is not None

    def draw(self, rows: GreedyRows, row: int) -> int:
        return rows.tokens[row]

    def take(self, rows: GreedyRows, chosen: list[int]) -> GreedyRows:
        return GreedyRows([rows.tokens[row] for row in chosen])

    def join(self, parts: list[GreedyRows]) -> GreedyRows:
        return GreedyRows([token for rows in parts for token in rows.tokens])

    def verify(self, tokens: list[int], proposed: GreedyRows, own: GreedyRows) -> tuple[int, int]:
        num_kept = 0
        while num_kept < len(tokens) and self._keeps(tokens[num_kept], own, num_kept):
            num_kept += 1
        return num_kept, own.tokens[num_kept]

    def _keeps(self, token: int, own: GreedyRows, row: int) -> bool:
        """Whether a proposed token stays in its verifier's row."""
        return token == own.tokens[row]

    def probabilities(self, rows: GreedyRows, chosen: list[int], tokens: list[int]) -> list[float]:
        if not chosen:
            return []
        assert rows.probabilities is not None, "taken rows have no probabilities"
        return rows.probabilities(chosen, tokens)


class CoupledSampler(GreedySampler):
    """Draws the largest of the warped logits with noise added, the same noise for every model.

    Noise is Gumbel's, so each draw follows the model's own distribution, and belongs to a position,
    so that models which agree draw alike. The answer is what the target alone draws, whatever is
    proposed: a proposed token is kept if it is the verifier's own draw. A script of docs/seeds.md
    draws the same from transformers' logits.

    Args:
        sampling: with a temperature above 0.
        num_prompt_tokens: leading tokens of every prefix that are not output.
        noise: of the request.
        constraint: of the answer.
    """

    def __init__(
        self,
        sampling: Sampling,
        num_prompt_tokens: int,
        noise: Noise,
        constraint: Constraint | None = None,
    ) -> None:
        super().__init__(sampling, num_prompt_tokens, constraint)
        self.noise = noise

    def scores(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        return self._noisy(self._processed(logits, prefixes), prefixes.positions)

    def distributions(self, logits: Tensor, prefixes: Prefixes) -> GreedyRows:
        logits = self._processed(logits, prefixes)
        positions = prefixes.positions
        warping = Warping.values_of(self.sampling)
        tokens = self.noise.draw(logits, warping, positions)
        if tokens is not None:
            found = partial(self.noise.probabilities, logits, warping, positions)
            return GreedyRows(tokens, found)
        scores = self._noisy(logits, positions)
        return GreedyRows(most_probable(scores), partial(probabilities_of, scores))

    def _noisy(self, logits: Tensor, positions: list[int]) -> Tensor:
        return self.noise.at(positions).add_(warped(logits, self.sampling))


@dataclass
class Probabilities:
    """Rows [R, V] of float32 probabilities, and the tokens once they have been drawn."""

    values: Any
    drawn: list[int] | None = field(default=None)


class RandomSampler(_Processing):
    """Draws from the softmax of the warped logits, in float32, on the logits' device.

    Args:
        num_prompt_tokens: leading tokens of every prefix that are not output.
        rule: "block" or "token", by which blocks are cut.
        constraint: of the answer.
    """

    def __init__(
        self,
        sampling: Sampling,
        device: torch.device,
        num_prompt_tokens: int,
        rule: Rule = "block",
        constraint: Constraint | None = None,
    ) -> None:
        super().__init__(sampling, num_prompt_tokens, constraint)
        self.rule = rule
        self.generator = seeded_generator(sampling, device)

    def distributions(self, logits: Tensor, prefixes: Prefixes) -> Probabilities:
        processed = self._processed(logits, prefixes)
        return Probabilities(warped(processed, self.sampling).softmax(-1))

    def draw(self, rows: Probabilities, row: int) -> int:
        if rows.drawn is None:
            # All rows at once, so that the host waits for a device once, not for each step.
            rows.drawn = self._categorical(rows.values)
        return rows.drawn[row]

    def take(self, rows: Probabilities, chosen: list[int]) -> Probabilities:
        return Probabilities(rows.values[chosen])

    def join(self, parts: list[Probabilities]) -> Probabilities:
        if len(parts) == 1:
            return parts[0]
        return Probabilities(torch.cat([rows.values for rows in parts]))

    def verify(
        self, tokens: list[int], proposed: Probabilities, own: Probabilities
    ) -> tuple[int, int]:
        p, q = own.values, proposed.values if tokens else own.values[:0]
        num_kept, following = verification.cut(tokens, p, q, self.rule, self._happens)
        return num_kept, self._categorical(following[None])[0]

    def probabilities(
        self, rows: Probabilities, chosen: list[int], tokens: list[int]
    ) -> list[float]:
        return list(rows.values[chosen, tokens].tolist()) if chosen else []

    def _happens(self, probabilities: list[Any]) -> list[bool]:
        """An independent event for each probability."""
        if not probabilities:
            return []
        device = self.generator.device
        uniform = torch.rand(len(probabilities), generator=self.generator, device=device)
        return [u < h for u, h in zip(uniform.tolist(), probabilities, strict=True)]

    def _categorical(self, rows: Any) -> list[int]:
        """One token from each row of probabilities, by inversion.

        Raises:
            NotFiniteError: a row holds NaN.
        """
        cumulative = rows.cumsum(-1)
        uniform = torch.rand(len(rows), 1, generator=self.generator, device=rows.device)
        # Scaled by the last sum instead of 1; a token of probability 0 is never reached.
        drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        tokens: list[int] = drawn.squeeze(1).tolist()
        if rows.shape[1] in tokens:  # rounded up to the last sum, or that is no number
            if not bool((cumulative[:, -1] > 0).all()):
                raise NotFiniteError
            last = (rows > 0).int().cumsum(-1).argmax(-1, keepdim=True)
            tokens = torch.minimum(drawn, last).squeeze(1).tolist()
        return tokens


def seeded_generator(sampling: Sampling, device: torch.device) -> torch.Generator:
    """Random numbers from the given seed, or from a random one."""
    generator = torch.Generator(device)
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    return generator


def probabilities_of(logits: Tensor, rows: list[int], tokens: list[int]) -> list[float]:
    """The probability of each of the tokens, in the softmax of its row of logits [R, V]."""
    if (kernels := kernels_for(logits.device, torch.float32)) is not None:
        return kernels.shares(logits, rows, tokens)
    values = logits[rows].float().softmax(-1)
    return list(values[list(range(len(tokens))), tokens].tolist())


def most_probable(logits: Tensor) -> list[int]:
    """The first of the most probable tokens of each row; -1 where its logit is NaN or infinity."""
    if (kernels := kernels_for(logits.device, torch.float32)) is not None:
        return kernels.most_probable(logits)
    if logits.device.type == "cpu":
        # NumPy's argmax takes a tenth of the time of torch's
        rows = logits.float().numpy()
        tokens = rows.argmax(-1)
        is_finite = np.isfinite(rows[np.arange(len(rows)), tokens])
        return list(np.where(is_finite, tokens, -1).tolist())
    largest, places = logits.max(-1)
    return list(torch.where(largest.isfinite(), places, -1).tolist())


def make_sampler(
    sampling: Sampling,
    device: torch.device,
    num_prompt_tokens: int,
    rule: Rule = "block",
    noise: Noise | None = None,
    constraint: Constraint | None = None,
) -> Sampler:
    """The sampler for these settings.

    Args:
        num_prompt_tokens: leading tokens of every prefix that are not output.
        rule: how tokens are drawn and blocks cut, at temperatures above 0.
        noise: of the request, for the rule "coupled".
        constraint: of the answer.
    """
    if sampling.is_greedy:
        return GreedySampler(sampling, num_prompt_tokens, constraint)
    if rule == "coupled":
        assert noise is not None, "draws are coupled by noise"
        return CoupledSampler(sampling, num_prompt_tokens, noise, constraint)
    return RandomSampler(sampling, device, num_prompt_tokens, rule, constraint)
