"""From logits to the distribution of a token: biases, penalties, temperature and truncation.

Every model of a chain processes its logits in this way, given the tokens before them, so that what
is verified is what was drawn. The order is that of transformers 5.23, `_get_logits_processor` in
generation/utils.py, and of vLLM's sampler where transformers has no such setting:

1. logit bias (transformers' `sequence_bias` of single tokens),
2. repetition penalty (Keskar et al., "CTRL", 2019), over prompt and output,
3. frequency and presence penalty (OpenAI, vLLM), over the output only; no stop token before
   `min_tokens`,
4. temperature, 5. top-k, 6. top-p, 7. min-p.

At temperature 0 the argmax is taken after step 3; the later steps would not change it.
"""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.settings import MAX_TEMPERATURE, MIN_TEMPERATURE
from polybasic.chain.kernels.torch.host_operations import HostOperations
from polybasic.chain.kernels.torch.operations import Operations

_HOST = HostOperations()
_MIN_TOP_P = 1e-30
"""Well within float32, in which shares of probability are compared."""


@dataclass(frozen=True)
class Sampling:
    """A user's sampling settings; by default, plain greedy decoding.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens and those tied with the last; None and 0 keep all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p.
        min_p: keep tokens of at least min_p times the probability of the most probable one.
        repetition_penalty: logits of tokens in prompt and output are divided by it if positive,
            else multiplied; 1 is off.
        presence_penalty: subtracted from the logit of each token in the output.
        frequency_penalty: subtracted once for each time that the token is in the output.
        logit_bias: token id -> number added to its logit.
        seed: of the random numbers; None picks one at random.
        choice: which of several independent answers for one seed.
        min_tokens: of the output, before which none of `held_back` is drawn.
        held_back: token ids, those that end an answer.

    Raises:
        UserError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    choice: int = 0
    min_tokens: int = 0
    held_back: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        # Upper and lower bounds keep float32 logits finite after every step, and shares positive.
        for name, is_valid, bound in (
            (
                "temperature",
                self.temperature == 0
                or _lies_within(self.temperature, MIN_TEMPERATURE, MAX_TEMPERATURE),
                f"0 for greedy, or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
            ),
            (
                "top_k",
                self.top_k is None or (_is_whole(self.top_k) and self.top_k < 1 << 31),
                "1 or more, or 0 for all",
            ),
            (
                "top_p",
                self.top_p is None or _lies_within(self.top_p, _MIN_TOP_P, 1),
                f"{_MIN_TOP_P} to 1",
            ),
            ("min_p", self.min_p is None or _lies_within(self.min_p, 0, 1), "0 to 1"),
            (
                "repetition_penalty",
                _lies_within(self.repetition_penalty, 0.01, 100),
                "0.01 to 100; 1 is off",
            ),
            ("presence_penalty", _lies_within(self.presence_penalty, -2, 2), "-2 to 2"),
            ("frequency_penalty", _lies_within(self.frequency_penalty, -2, 2), "-2 to 2"),
            (
                "seed",
                self.seed is None or (_is_whole(self.seed) and self.seed < 1 << 64),
                "a whole number from 0 to 2**64 - 1",
            ),
            (
                "choice",
                _is_whole(self.choice) and self.choice < 1 << 32,
                "a whole number from 0 to 2**32 - 1",
            ),
            ("min_tokens", _is_whole(self.min_tokens), "0 or more"),
        ):
            if not is_valid:
                raise _out_of_range(f"{name}={getattr(self, name)}", f"use {bound}")
        if not isinstance(self.logit_bias, Mapping):
            raise _out_of_range(f"logit_bias={self.logit_bias!r}", "map token ids to numbers")
        for token, bias in self.logit_bias.items():
            if not _is_whole(token):
                raise _out_of_range(f"logit_bias of {token!r}", "name tokens by id, from 0")
            if not _lies_within(bias, -100, 100):
                raise _out_of_range(f"logit_bias of token {token} = {bias}", "use -100 to 100")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether anything changes logits before the temperature does."""
        return bool(self.in_effect.keys() - {"temperature", "top_k", "top_p", "min_p"})

    def seeded(self) -> "Sampling":
        """With a random seed where none is given."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(64))

    @property
    def in_effect(self) -> dict[str, Any]:
        """The settings that change the distribution of draws, by name; none for plain greedy."""
        values: dict[str, Any] = {
            "repetition_penalty": self.repetition_penalty if self.repetition_penalty != 1 else None,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "min_tokens": self.min_tokens if self.held_back else 0,
        }
        if not self.is_greedy:
            values |= {
                "temperature": self.temperature,
                "top_k": self.top_k,
                "top_p": self.top_p if self.top_p != 1 else None,
                "min_p": self.min_p,
            }
        return {name: value for name, value in values.items() if value}

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that the logit bias and the tokens held back are of a vocabulary.

        Raises:
            UserError: one is not.
        """
        for where, tokens in (("logit_bias", self.logit_bias), ("stop token", self.held_back)):
            for token in tokens:
                if token >= vocab_size:
                    raise UserError(
                        "token outside of the vocabulary",
                        f"{where} of id {token} of {vocab_size}",
                        "name ids of the chain's tokenizer",
                    )


@dataclass(frozen=True)
class Prefixes:
    """The tokens before each row's draw.

    Attributes:
        sequence: shared by all rows: prompt and answer so far.
        suffixes: for each row, the tokens after the sequence; may be empty.
    """

    sequence: list[int]
    suffixes: list[list[int]]

    @property
    def positions(self) -> list[int]:
        """Of the tokens that are drawn."""
        return [len(self.sequence) + len(suffix) for suffix in self.suffixes]


def process_logits(
    logits: Tensor, sampling: Sampling, prefixes: Prefixes, num_prompt_tokens: int
) -> Tensor:
    """Logits [R, V] after bias and penalties: in float32, or unchanged if none is set.

    Args:
        prefixes: one suffix for each row.
        num_prompt_tokens: leading tokens of the sequence that are not output.
    """
    if sampling.logit_bias:
        tokens = torch.tensor(list(sampling.logit_bias), device=logits.device)
        biases = torch.tensor(list(sampling.logit_bias.values()), device=logits.device)
        logits = logits.float().index_add(-1, tokens, biases.float().expand(len(logits), -1))
    if sampling.repetition_penalty != 1:
        tokens, counts = _count(prefixes, 0, logits.device)
        own, penalty = logits.float()[:, tokens], sampling.repetition_penalty
        penalised = torch.where(own > 0, own / penalty, own * penalty)
        penalised = torch.where(counts > 0, penalised, own)
        logits = logits.float().index_copy(-1, tokens, penalised)
    if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
        tokens, counts = _count(prefixes, num_prompt_tokens, logits.device)
        penalties = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        logits = logits.float().index_add(-1, tokens, penalties, alpha=-1)
    if sampling.min_tokens and sampling.held_back:
        num_output = len(prefixes.sequence) - num_prompt_tokens
        is_early = [num_output + len(suffix) < sampling.min_tokens for suffix in prefixes.suffixes]
        if any(is_early):
            early = torch.tensor(is_early, device=logits.device)[:, None]
            held = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
            held[list(sampling.held_back)] = True
            logits = logits.float().masked_fill(early & held, float("-inf"))
    return logits


@dataclass(frozen=True)
class Warping:
    """Which steps after the penalties are on: the part of them that a captured round depends on.

    Rounds of equal warpings differ only in the values that `values_of` returns.

    Attributes:
        max_top_k: the most tokens that top-k keeps, a power of two; None if it is off.
        has_top_p: whether top-p is on.
        has_min_p: whether min-p is on.
    """

    NUM_VALUES: ClassVar = 4

    max_top_k: int | None = None
    has_top_p: bool = False
    has_min_p: bool = False

    @classmethod
    def of(cls, sampling: Sampling) -> "Warping":
        """The warping of settings with a temperature above 0."""
        assert not sampling.is_greedy, "greedy draws are the argmax"
        return cls(
            1 << (sampling.top_k - 1).bit_length() if sampling.top_k else None,
            sampling.top_p is not None and sampling.top_p < 1,
            bool(sampling.min_p),
        )

    @staticmethod
    def values_of(sampling: Sampling) -> list[float]:
        """Temperature, top-k, top-p and min-p; 0 for those that are not set."""
        values = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        return [float(value or 0) for value in values]

    def probabilities(
        self, logits: Tensor, values: Tensor, operations: Operations = _HOST
    ) -> Tensor:
        """Probabilities [R, V] in float32; arguments as for `truncated`."""
        return self.truncated(logits, values, operations).softmax(-1)

    def truncated(self, logits: Tensor, values: Tensor, operations: Operations = _HOST) -> Tensor:
        """Logits [R, V] in float32 after the temperature, minus infinity where tokens are dropped.

        A row does not depend on the others.

        Args:
            logits: [R, V], after bias and penalties.
            values: float32 [NUM_VALUES] on the same device, as `values_of` orders them; or
                [R, NUM_VALUES], those of each row, with the host's operations alone.
            operations: of the executor that computed the logits; the default ones are the host's,
                which no graph captures.
        """
        temperature, top_k, top_p, min_p = values[..., None].unbind(-2)
        logits = logits.float() / temperature
        # at twice as many tokens as there are, top-k drops none
        if self.max_top_k is not None and self.max_top_k // 2 < logits.shape[1]:
            best = logits.topk(min(self.max_top_k, logits.shape[1])).values
            last = (top_k.long() - 1).clamp(max=best.shape[1] - 1)
            logits = _without(logits, logits < best.gather(1, last.expand(len(best), 1)))
        if self.has_top_p or self.has_min_p:
            found = logits.softmax(-1)
            if self.has_top_p:
                logits = operations.without_tail(logits, found, top_p)
            if self.has_min_p:
                logits = _without(logits, found < min_p * found.amax(-1, keepdim=True))
        return logits


def warp(logits: Tensor, sampling: Sampling, prefixes: Prefixes, num_prompt_tokens: int) -> Tensor:
    """Probabilities [R, V] in float32 after all steps, in the order above; temperature > 0."""
    return truncate(logits, sampling, prefixes, num_prompt_tokens).softmax(-1)


def truncate(
    logits: Tensor, sampling: Sampling, prefixes: Prefixes, num_prompt_tokens: int
) -> Tensor:
    """The logarithms of what `warp` returns, up to one constant a row."""
    return warped(process_logits(logits, sampling, prefixes, num_prompt_tokens), sampling)


def warped(logits: Tensor, sampling: Sampling) -> Tensor:
    """The same of logits after bias and penalties."""
    values = torch.tensor(Warping.values_of(sampling), device=logits.device)
    return Warping.of(sampling).truncated(logits, values)


def _without(logits: Tensor, dropped: Tensor) -> Tensor:
    return logits.masked_fill(dropped, float("-inf"))


def _count(prefixes: Prefixes, begin: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [T] that occur before any row, and their counts [R, T] before each, in float32.

    Args:
        begin: leading tokens of the sequence that are not counted.
    """
    sequence, suffixes = prefixes.sequence[begin:], prefixes.suffixes
    own = [token for suffix in suffixes for token in suffix]
    found = torch.tensor([*sequence, *own], dtype=torch.long)
    tokens, columns = found.unique(return_inverse=True)
    shared = columns[: len(sequence)].bincount(minlength=len(tokens)).float()
    counts = shared.repeat(len(suffixes), 1)
    if own:
        rows = [row for row, suffix in enumerate(suffixes) for _ in suffix]
        cells = torch.tensor(rows), columns[len(sequence) :]
        counts.index_put_(cells, torch.ones(len(own)), accumulate=True)
    return tokens.to(device), counts.to(device)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _lies_within(value: Any, low: float, high: float) -> bool:
    """Whether it is a finite number between the bounds, inclusive."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and low <= value <= high


def _out_of_range(where: str, do: str) -> UserError:
    return UserError("sampling setting out of range", where, do)
