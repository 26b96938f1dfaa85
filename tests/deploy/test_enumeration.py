"""The stages that serve, run on tables of fractions through every outcome of every draw.

The models are tables of rational probabilities, the caches hold token ids, and the sampler's
random events are enumerated instead of drawn. The joint law of the output must equal the target's
in every entry, exactly.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from polybasic.deploy import verification
from polybasic.deploy.sampling import Probabilities, RandomSampler
from polybasic.deploy.stages import BlockStage, Stage, TreeStage
from polybasic.deploy.tree import DraftTree

PROMPT = [0, 1]


def table(model: str, prefix: tuple[int, ...], vocab_size: int) -> list[Fraction]:
    """A model: for every prefix a distribution, with a zero now and then."""
    digest = hashlib.sha256(repr((model, prefix)).encode()).digest()
    weights = [byte % 5 for byte in digest[:vocab_size]]
    weights[digest[-1] % vocab_size] += 1
    return [Fraction(weight, sum(weights)) for weight in weights]


class TokenCache:
    """Rows are (token, writer); committed up to `length`, provisional behind."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str]] = []
        self.length = 0

    def keep(self, rows: Any) -> None:
        self.rows[self.length :] = [self.rows[self.length + row] for row in rows]
        self.length = len(self.rows)

    def truncate(self, length: int) -> None:
        assert length <= self.length
        self.length = length


class TableVerifier:
    """States are numbers of prefixes; a prefix is read from the cache, not from the stage."""

    def __init__(self, name: str, cache: TokenCache, vocab_size: int) -> None:
        self.name, self.cache, self.vocab_size = name, cache, vocab_size
        self.prefixes: list[tuple[int, ...]] = []

    def read(self, tokens: list[int]) -> torch.Tensor:
        return self._read(tokens, list(range(-1, len(tokens) - 1)))

    def read_tree(self, tree: DraftTree) -> torch.Tensor:
        return self._read(tree.tokens, tree.parents)

    def logits(self, states: torch.Tensor) -> Any:
        rows = [
            table(self.name, self.prefixes[int(state)], self.vocab_size) for state in states[:, 0]
        ]
        return np.array(rows, dtype=object)

    def _read(self, tokens: list[int], parents: list[int]) -> torch.Tensor:
        committed = tuple(token for token, _ in self.cache.rows[: self.cache.length])
        self.cache.rows[self.cache.length :] = [(token, self.name) for token in tokens]
        first = len(self.prefixes)
        for token, parent in zip(tokens, parents, strict=True):
            before = committed if parent < 0 else self.prefixes[first + parent]
            self.prefixes.append((*before, token))
        return torch.arange(first, len(self.prefixes))[:, None]


class TableDrafter:
    """A small tree that depends on the prefix, to exercise branches and misses."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.num_observed = vocab_size, 0

    def observe(self, states: torch.Tensor) -> None:
        self.num_observed += len(states)

    def rewind(self, num_observed: int) -> None:
        assert num_observed <= self.num_observed
        self.num_observed = num_observed

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        assert self.num_observed == len(tokens) - 1
        first = sum(tokens) % self.vocab_size
        second = (first + 1) % self.vocab_size
        drafted, parents = [tokens[-1]], [-1]
        if max_depth >= 1:
            drafted, parents = [*drafted, first, second], [*parents, 0, 0]
        if max_depth >= 2:
            drafted, parents = [*drafted, second, first], [*parents, 2, 1]
        return DraftTree(drafted, parents)


@dataclass
class Outcomes:
    """Replays a run once for every sequence of outcomes of its random events."""

    script: list[tuple[int, int]] = field(default_factory=list)
    position: int = 0
    probability: Fraction = Fraction(1)

    def choose(self, probabilities: list[Fraction]) -> int:
        possible = [index for index, p in enumerate(probabilities) if p > 0]
        if self.position == len(self.script):
            self.script.append((0, len(possible)))
        index = possible[self.script[self.position][0]]
        self.position += 1
        self.probability *= probabilities[index]
        return index

    def runs(self) -> Iterator[None]:
        while True:
            self.position, self.probability = 0, Fraction(1)
            yield
            while self.script and self.script[-1][0] + 1 == self.script[-1][1]:
                self.script.pop()
            if not self.script:
                return
            index, count = self.script.pop()
            self.script.append((index + 1, count))


class EnumeratingSampler(RandomSampler):
    """The sampler that serves, with its two random events enumerated."""

    def __init__(self, outcomes: Outcomes) -> None:
        self.outcomes = outcomes

    def distributions(self, logits: Any) -> Probabilities:
        return Probabilities(logits)

    def draw(self, rows: Probabilities, row: int) -> int:
        return self._categorical(rows.values[row : row + 1])[0]

    def join(self, parts: list[tuple[Probabilities, list[int]]]) -> Probabilities:
        return Probabilities(np.concatenate([rows.values[chosen] for rows, chosen in parts]))

    def _happens(self, probabilities: list[Any]) -> list[bool]:
        return [self.outcomes.choose([1 - Fraction(p), Fraction(p)]) == 1 for p in probabilities]

    def _categorical(self, rows: Any) -> list[int]:
        return [self.outcomes.choose(list(row)) for row in rows]


@dataclass(frozen=True)
class Case:
    """A chain of tables: rules from the target down, one less than there are verifiers."""

    rules: tuple[str, ...]
    flush_length: int
    num_tokens: int
    vocab_size: int = 2
    shares_cache: bool = True
    stop_tokens: frozenset[int] = frozenset()


def build(case: Case, sampler: RandomSampler) -> tuple[Stage, TokenCache]:
    caches = [TokenCache() for _ in range(len(case.rules) + 1)]
    if case.shares_cache:
        caches = [caches[0]] * len(caches)
    verifiers: list[Any] = [
        TableVerifier(f"model {index}", cache, case.vocab_size)
        for index, cache in enumerate(caches)
    ]
    drafter = TableDrafter(case.vocab_size)
    stage: Stage = TreeStage(verifiers[-1], drafter, sampler, case.stop_tokens)
    for verifier, rule in zip(reversed(verifiers[:-1]), reversed(case.rules), strict=True):
        stage = BlockStage(verifier, stage, sampler, case.flush_length, rule, case.stop_tokens)  # type: ignore[arg-type]
    return stage, caches[0]


def output_law(case: Case) -> Counter[tuple[int, ...]]:
    """Joint law of the first `num_tokens` tokens (fewer behind a stop token)."""
    outcomes, law = Outcomes(), Counter[tuple[int, ...]]()
    for _ in outcomes.runs():
        root, cache = build(case, EnumeratingSampler(outcomes))
        root.prefill(PROMPT)
        tokens: list[int] = []
        while len(tokens) < case.num_tokens and not (tokens and tokens[-1] in case.stop_tokens):
            tokens += root.propose(1, case.num_tokens - len(tokens)).tokens
            committed = cache.rows[: cache.length]
            assert [token for token, _ in committed] == (PROMPT + tokens)[:-1]
            assert {writer for _, writer in committed} == {"model 0"}
        law[tuple(tokens)] += outcomes.probability  # type: ignore[assignment]
    return law


def target_law(case: Case) -> Counter[tuple[int, ...]]:
    law: Counter[tuple[int, ...]] = Counter()
    for tokens in itertools.product(range(case.vocab_size), repeat=case.num_tokens):
        ends = [index + 1 for index, token in enumerate(tokens) if token in case.stop_tokens]
        probability = Fraction(1)
        for index, token in enumerate(tokens):
            row = table("model 0", (*PROMPT, *tokens[:index]), case.vocab_size)
            probability *= row[token]
        law[tokens[: ends[0]] if ends else tokens] += probability  # type: ignore[assignment]
    return +law


TWO_LEVELS = [
    Case((rule,), flush_length, 4, shares_cache=shares_cache)
    for rule in ("block", "token")
    for flush_length in (1, 2, 3)
    for shares_cache in (True, False)
]
THREE_LEVELS = [
    Case(rules, flush_length, 3, shares_cache=shares_cache)
    for rules in itertools.product(("block", "token"), repeat=2)
    for flush_length in (1, 2)
    for shares_cache in (True, False)
]
OTHERS = [
    Case((), 1, 4),
    Case(("block",), 2, 3, vocab_size=3),
    Case(("token",), 2, 3, vocab_size=3, shares_cache=False),
    Case(("block",), 2, 4, stop_tokens=frozenset({1})),
    Case(("block", "block"), 2, 3, stop_tokens=frozenset({1}), shares_cache=False),
    Case(("block", "token", "block"), 1, 3),
]


@pytest.mark.parametrize("case", [*TWO_LEVELS, *THREE_LEVELS, *OTHERS], ids=str)
def test_output_law_is_the_targets(case: Case) -> None:
    assert output_law(case) == target_law(case)


def test_block_rule_accepts_more_than_token_rule() -> None:
    def expected_tokens(rule: str) -> Fraction:
        case, outcomes = Case((rule,), 3, 4), Outcomes()
        expected = Fraction(0)
        for _ in outcomes.runs():
            root, _ = build(case, EnumeratingSampler(outcomes))
            root.prefill(PROMPT)
            expected += outcomes.probability * len(root.propose(1, case.num_tokens).tokens)
        return expected

    assert expected_tokens("block") > expected_tokens("token")


def bonus_from_below(p_row: Any, q_row: Any, weight: Any) -> Any:
    return q_row


def residual_without_weight(p_row: Any, q_row: Any, weight: Any) -> Any:
    positive = (p_row - q_row).clip(0)
    return positive / positive.sum() if positive.sum() > 0 else p_row


def target_itself(p_row: Any, q_row: Any, weight: Any) -> Any:
    return p_row


@pytest.mark.parametrize(
    "wrong_residual", [bonus_from_below, residual_without_weight, target_itself]
)
def test_wrong_residuals_are_detected(
    wrong_residual: Callable[[Any, Any, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(("block",), 3, 4, vocab_size=3)
    monkeypatch.setattr(verification, "residual", wrong_residual)
    assert output_law(case) != target_law(case)


def test_wrong_proposal_distribution_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    join = EnumeratingSampler.join

    def flattened(self: Any, parts: Any) -> Probabilities:
        rows = join(self, parts).values
        return Probabilities(rows / 2 + Fraction(1, 2 * rows.shape[1]))

    case = Case(("block",), 2, 3)
    monkeypatch.setattr(EnumeratingSampler, "join", flattened)
    assert output_law(case) != target_law(case)
