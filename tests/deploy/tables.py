"""Chains of tables, run through every outcome of every draw by the stages that serve.

A model is a table: for each prefix it has probabilities that are fractions, or logits, which the
sampler warps. Caches hold token ids, and the sampler's two random events are enumerated instead
of drawn. Hence the joint law of the output comes out exactly, to be compared with the target's.
"""

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from polybasic.chain.formats.plan import Flush, Tree
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.deploy.rounds.sampling import Prefixes, Probabilities, RandomSampler, Sampling
from polybasic.deploy.rounds.stages import BlockStage, Stage, TreeStage
from polybasic.deploy.rounds.warping import warp

SMALL_TREE = Tree(depth=2, top_k=2, rows=5)
GRID = 24
"""Warped probabilities are rounded to such parts, so that fractions stay short."""

Law = Counter[tuple[int, ...]]
"""Output tokens -> probability, a fraction."""


@dataclass(frozen=True)
class Case:
    """A chain of tables and what is asked of it.

    Attributes:
        flushes: of each verifying model but the innermost, from the target down.
        num_tokens: of the answer, unless a stop token ends it.
        caches: of each verifying model, the number of its cache; None: all share one.
        sampling: how the logits are warped; None: tables hold probabilities.
        seed: of tables and trees.
        likeness: how much of the target's table is in the others'; 0 is nothing.
        tree: depth, children of a row and rows of the drafts, at most.
    """

    flushes: tuple[Flush, ...]
    num_tokens: int
    vocab_size: int = 2
    caches: tuple[int, ...] | None = None
    stop_tokens: frozenset[int] = frozenset()
    sampling: Sampling | None = None
    seed: int = 0
    likeness: int = 0
    tree: Tree = SMALL_TREE
    prompt: tuple[int, ...] = (0, 1)

    def __str__(self) -> str:
        flushes = "-".join(
            f"{flush.rule}{flush.length}{'adaptive' if flush.adaptive else ''}"
            for flush in self.flushes
        )
        caches = "shared" if self.caches is None else "".join(map(str, self.caches))
        stop = f"-stop{''.join(map(str, sorted(self.stop_tokens)))}" if self.stop_tokens else ""
        warped = f"-{self.sampling}" if self.sampling is not None else ""
        size = f"{self.num_tokens}of{self.vocab_size}"
        return f"{flushes or 'alone'}-{size}-{caches}{stop}{warped}"


@functools.cache
def digest(*values: Any) -> bytes:
    """Bytes that are decided by the values and look like chance."""
    return hashlib.sha256(repr(values).encode()).digest()


@functools.cache
def probabilities_of(
    seed: int, likeness: int, vocab_size: int, model: int, prefix: tuple[int, ...]
) -> tuple[Fraction, ...]:
    """A table's row: for every prefix a distribution, with a zero now and then."""
    noise = digest(seed, model, prefix)
    weights = [byte % 5 for byte in noise[:vocab_size]]
    weights[noise[-1] % vocab_size] += 1
    if model > 0 and likeness:
        like = probabilities_of(seed, 0, vocab_size, 0, prefix)
        return tuple(
            (p * likeness + Fraction(weight, sum(weights))) / (likeness + 1)
            for p, weight in zip(like, weights, strict=True)
        )
    return tuple(Fraction(weight, sum(weights)) for weight in weights)


@functools.cache
def logits_of(
    seed: int, likeness: int, vocab_size: int, model: int, prefix: tuple[int, ...]
) -> tuple[float, ...]:
    """A table's row: for every prefix logits between -3 and 3, no two of them the same."""
    noise = digest("logits", seed, model, prefix)
    own = [byte / 51 - 2.5 + 0.01 * token for token, byte in enumerate(noise[:vocab_size])]
    if model > 0 and likeness:
        like = logits_of(seed, 0, vocab_size, 0, prefix)
        return tuple((p * likeness + o) / (likeness + 1) for p, o in zip(like, own, strict=True))
    return tuple(own)


class TokenCache:
    """Rows are (token, writer); committed up to `length`, provisional after."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []
        self.length = 0

    def keep(self, rows: Sequence[int]) -> None:
        assert list(rows) == sorted(set(rows))
        self.rows[self.length :] = [self.rows[self.length + row] for row in rows]
        self.length = len(self.rows)

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length
        self.length = length


class TableVerifier:
    """States are numbers of prefixes; a prefix is read from the cache, not from the stage."""

    def __init__(self, model: int, cache: TokenCache, case: Case) -> None:
        self.name, self.model, self.cache, self.case = f"model {model}", model, cache, case
        self.prefixes: list[tuple[int, ...]] = []

    def read(self, tokens: list[int]) -> torch.Tensor:
        return self._read(tokens, list(range(-1, len(tokens) - 1)))

    def read_tree(self, tree: DraftTree) -> torch.Tensor:
        return self._read(tree.tokens, tree.parents)

    def logits(self, states: torch.Tensor) -> Any:
        return self.rows([self.prefixes[state] for state in states[:, 0].tolist()])

    def rows(self, prefixes: list[tuple[int, ...]]) -> Any:
        return rows_of(self.case, self.model, prefixes)

    def _read(self, tokens: list[int], parents: list[int]) -> torch.Tensor:
        committed = tuple(token for token, _ in self.cache.rows[: self.cache.length])
        self.cache.rows[self.cache.length :] = [(token, self.model) for token in tokens]
        first = len(self.prefixes)
        for token, parent in zip(tokens, parents, strict=True):
            before = committed if parent < 0 else self.prefixes[first + parent]
            self.prefixes.append((*before, token))
        return torch.arange(first, len(self.prefixes))[:, None]


def rows_of(case: Case, model: int, prefixes: list[tuple[int, ...]]) -> Any:
    """What a table has for some prefixes: fractions, or logits where the case warps them."""
    table = probabilities_of if case.sampling is None else logits_of
    rows = [table(case.seed, case.likeness, case.vocab_size, model, prefix) for prefix in prefixes]
    return np.array(rows, dtype=object) if case.sampling is None else torch.tensor(rows)


class TableDrafter:
    """Trees of every shape within the case's bounds, decided by the prefix."""

    clock = None

    def __init__(self, case: Case) -> None:
        self.case, self.tree, self.num_observed = case, case.tree, 0

    def observe(self, states: torch.Tensor) -> None:
        self.num_observed += len(states)

    def rewind(self, num_observed: int) -> None:
        assert 0 <= num_observed <= self.num_observed
        self.num_observed = num_observed

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        assert self.num_observed == len(tokens) - 1
        drafted, parents, depths = [tokens[-1]], [-1], [0]
        for byte in digest("tree", self.case.seed, tuple(tokens))[: self.tree.rows - 1]:
            parent, first = byte % len(drafted), byte // 16
            siblings = {
                token for token, above in zip(drafted, parents, strict=True) if above == parent
            }
            free = [token for token in range(self.case.vocab_size) if token not in siblings]
            if (
                depths[parent] < min(max_depth, self.tree.depth)
                and len(siblings) < self.tree.top_k
                and free
            ):
                drafted.append(free[first % len(free)])
                parents.append(parent)
                depths.append(depths[parent] + 1)
        return DraftTree(drafted, parents)


@dataclass
class Outcomes:
    """Replays a run once for every sequence of outcomes of its random events."""

    script: list[tuple[int, int]] = field(default_factory=list)
    position: int = 0
    probability: Fraction = Fraction(1)

    def choose(self, probabilities: Sequence[Fraction]) -> int:
        assert sum(probabilities) == 1
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

    def __init__(self, outcomes: Outcomes, case: Case) -> None:
        self.outcomes, self.num_prompt_tokens = outcomes, len(case.prompt)
        self.is_warping = case.sampling is not None
        if case.sampling is not None:
            self.sampling = case.sampling

    def distributions(self, logits: Any, prefixes: Prefixes) -> Probabilities:
        assert len(logits) == len(prefixes.suffixes)
        if not self.is_warping:
            return Probabilities(logits)
        return Probabilities(rational(super().distributions(logits, prefixes).values))

    def draw(self, rows: Probabilities, row: int) -> int:
        return self._categorical(rows.values[row : row + 1])[0]

    def join(self, parts: list[Probabilities]) -> Probabilities:
        return Probabilities(np.concatenate([rows.values for rows in parts]))

    def _happens(self, probabilities: list[Any]) -> list[bool]:
        return [self.outcomes.choose([1 - Fraction(p), Fraction(p)]) == 1 for p in probabilities]

    def _categorical(self, rows: Any) -> list[int]:
        return [self.outcomes.choose(list(row)) for row in rows]


def rational(probabilities: torch.Tensor) -> Any:
    """Fractions that sum to 1 in each row; what is possible stays so, and nothing else."""
    rows = []
    for row in probabilities.tolist():
        weights = [max(1, round(GRID * value)) if value > 0 else 0 for value in row]
        rows.append([Fraction(weight, sum(weights)) for weight in weights])
    return np.array(rows, dtype=object)


@dataclass(frozen=True)
class Wiring:
    """What a chain is built from; negative controls exchange a part."""

    sampler: Callable[..., EnumeratingSampler] = EnumeratingSampler
    target: Callable[..., TableVerifier] = TableVerifier
    tree_stage: Callable[..., TreeStage] = TreeStage


def build(case: Case, sampler: Any, wiring: Wiring = Wiring()) -> tuple[Stage, TokenCache]:
    """The outermost stage of a case, and the target's cache."""
    numbers = case.caches or (0,) * (len(case.flushes) + 1)
    caches = [TokenCache() for _ in numbers]
    verifiers: list[Any] = [
        (TableVerifier if model else wiring.target)(model, caches[number], case)
        for model, number in enumerate(numbers)
    ]
    stage: Stage = wiring.tree_stage(verifiers[-1], TableDrafter(case), sampler, case.stop_tokens)
    for verifier, flush in zip(reversed(verifiers[:-1]), reversed(case.flushes), strict=True):
        stage = BlockStage(verifier, stage, sampler, flush, case.stop_tokens)
    return stage, caches[numbers[0]]


def generate(case: Case, sampler: Any, wiring: Wiring = Wiring()) -> list[int]:
    """One answer, as the engine asks for it; the target's cache must hold the target's rows."""
    root, cache = build(case, sampler, wiring)
    root.prefill(list(case.prompt))
    tokens: list[int] = []
    while len(tokens) < case.num_tokens and not (tokens and tokens[-1] in case.stop_tokens):
        block = root.propose(1, case.num_tokens - len(tokens))
        assert block.tokens
        tokens += block.tokens
        committed = cache.rows[: cache.length]
        assert [token for token, _ in committed] == [*case.prompt, *tokens][:-1]
        assert {writer for _, writer in committed} <= {0}
    assert len(tokens) <= case.num_tokens
    return tokens


class TooManyOutcomes(Exception):
    """A case that would take too long."""


def output_law(case: Case, wiring: Wiring = Wiring(), max_num_outcomes: int = 20_000) -> Law:
    """Joint law of the answer.

    Raises:
        TooManyOutcomes: more than `max_num_outcomes`.
    """
    outcomes, law = Outcomes(), Law()
    for num_outcomes, _ in enumerate(outcomes.runs()):
        if num_outcomes == max_num_outcomes:
            raise TooManyOutcomes
        tokens = generate(case, wiring.sampler(outcomes, case), wiring)
        law[tuple(tokens)] += outcomes.probability  # type: ignore[assignment]
    return law


def target_law(case: Case) -> Law:
    """The same, of the target alone: the product of its rows, each computed from its prefix."""
    law = Law()
    prefixes: list[tuple[tuple[int, ...], Fraction]] = [((), Fraction(1))]
    while prefixes:
        tokens, probability = prefixes.pop()
        if len(tokens) == case.num_tokens or (tokens and tokens[-1] in case.stop_tokens):
            law[tokens] = probability  # type: ignore[assignment]
            continue
        row = target_row(case, (*case.prompt, *tokens))
        prefixes += [((*tokens, token), probability * p) for token, p in enumerate(row) if p > 0]
    return law


def target_row(case: Case, prefix: tuple[int, ...]) -> list[Fraction]:
    """The distribution of the token after a prefix."""
    rows = rows_of(case, 0, [prefix])
    if case.sampling is not None:
        before = Prefixes(list(prefix), [[]])
        rows = rational(warp(rows, case.sampling, before, len(case.prompt)))
    return list(rows[0])
