"""Chains of tables, run through every outcome of every draw by the stages that serve.

A model is a table: for each prefix it has probabilities that are fractions, or logits, which the
sampler warps. Caches hold token ids, and what is random is enumerated instead of drawn: the two
random events of the samplers by block and by token, or the noise of each position, which takes a
few values with probabilities that are fractions. Hence the joint law of the output comes out
exactly, to be compared with the target's; and with noise each single answer, too.
"""

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from polybasic.chain.formats.plan import Flush, Rule, Tree
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.chain.kernels.executor import Perturbation
from polybasic.chain.kernels.torch.operations import Operations
from polybasic.deploy.runtime.rounds.passes import alone
from polybasic.deploy.runtime.rounds.sampling import (
    CoupledSampler,
    Prefixes,
    Probabilities,
    RandomSampler,
    Sampling,
)
from polybasic.deploy.runtime.rounds.stages import BlockStage, Stage, TreeStage
from polybasic.deploy.runtime.rounds.warping import warp
from tests.deploy.outcomes import Enumerated, Outcomes
from tests.deploy.runtime.drafters.expanding import expanded

SMALL_TREE = Tree(depth=2, top_k=2, rows=5)
GRID = 24
"""Warped probabilities are rounded to such parts, so that fractions stay short."""

WAITS = (
    (Fraction(1, 2), (1009, 9001, 4001)),
    (Fraction(1, 3), (8009, 1013, 5003)),
    (Fraction(1, 6), (3001, 4003, 503)),
)
"""The noise of a position: its probability, and how long each token waits; large primes, so that
no two tokens of any table arrive at the same time."""

Law = Counter[tuple[int, ...]]
"""Output tokens -> probability, a fraction."""


@dataclass(frozen=True)
class Case:
    """A chain of tables and what is asked of it.

    Attributes:
        flushes: of each verifying model but the innermost, from the target down.
        rule: by which tokens are drawn and blocks cut.
        num_tokens: of the answer, unless a stop token ends it.
        caches: of each verifying model, the number of its cache; None: all share one.
        sampling: how the logits are warped; None: tables hold probabilities.
        seed: of tables and trees.
        likeness: how much of the target's table is in the others'; 0 is nothing.
        tree: depth, children of a row and rows of the drafts, at most. With a least probability,
            drafts are of a table of the drafter's own, which sees the noise; else of any shape.
    """

    flushes: tuple[Flush, ...]
    num_tokens: int
    rule: Rule = "block"
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
            f"{flush.length}{'adaptive' if flush.adaptive else ''}" for flush in self.flushes
        )
        caches = "shared" if self.caches is None else "".join(map(str, self.caches))
        stop = f"-stop{''.join(map(str, sorted(self.stop_tokens)))}" if self.stop_tokens else ""
        warped = f"-{self.sampling}" if self.sampling is not None else ""
        size = f"{self.num_tokens}of{self.vocab_size}"
        return f"{self.rule}-{flushes or 'alone'}-{size}-{caches}{stop}{warped}"


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

    pace = SimpleNamespace(rows=2)

    def __init__(self, model: int, cache: TokenCache, case: Case) -> None:
        self.name, self.model, self.cache, self.case = f"model {model}", model, cache, case
        self.prefixes: list[tuple[int, ...]] = []

    def see(self, token_ids: Sequence[int]) -> None:
        """All tokens have logits."""

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
    """What a table has for some prefixes: fractions, or logits where they are warped or coupled."""
    table = probabilities_of if case.sampling is None else logits_of
    rows = [table(case.seed, case.likeness, case.vocab_size, model, prefix) for prefix in prefixes]
    if case.sampling is not None:
        return torch.tensor(rows)
    if case.rule == "coupled":
        return torch.tensor(np.array(rows, dtype=float)).log()
    return np.array(rows, dtype=object)


class TableDrafter:
    """Trees of every shape within the case's bounds, decided by the prefix; or those of a table's
    candidates that are probable enough."""

    clock = None

    def __init__(self, case: Case, noise: Any = None) -> None:
        self.case, self.tree, self.noise, self.num_observed = case, case.tree, noise, 0

    def observe(self, states: torch.Tensor) -> None:
        self.num_observed += len(states)

    def rewind(self, num_observed: int) -> None:
        assert 0 <= num_observed <= self.num_observed
        self.num_observed = num_observed

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        assert self.num_observed == len(tokens) - 1
        if self.tree.least_probability:
            return self._probable(tokens, min(max_depth, self.tree.depth))
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

    def _probable(self, tokens: list[int], depth: int) -> DraftTree:
        noise = ()
        if self.noise is not None and depth:
            positions = range(len(tokens), len(tokens) + depth)
            noise = tuple(map(tuple, self.noise.at(positions).tolist()))
        case = self.case
        table = case.seed, case.likeness, case.vocab_size, len(case.flushes) + 1
        return probable_tree(table, case.tree, tuple(tokens), depth, noise)


@functools.cache
def probable_tree(
    table: tuple[int, int, int, int],
    tree: Tree,
    tokens: tuple[int, ...],
    depth: int,
    noise: tuple[tuple[float, ...], ...],
) -> DraftTree:
    """The expansion that serves, over a table of the drafter's own.

    Args:
        table: what `logits_of` takes before the prefix.
        noise: of each level; none if the verifier draws without.
    """
    if not depth:
        return DraftTree.of_root(tokens[-1])
    prefixes = [tokens]

    def forward(drafted: torch.Tensor, parents: torch.Tensor, rows: Any) -> torch.Tensor:
        first = len(prefixes)
        above = [prefixes[int(parent)] for parent in parents[:, 0]]
        prefixes.extend((*prefix, int(token)) for prefix, token in zip(above, drafted, strict=True))
        return torch.arange(first, len(prefixes))[:, None]

    def logits(states: torch.Tensor, level: int) -> torch.Tensor:
        rows = [prefixes[int(state)] for state in states[:, 0]]
        return torch.tensor([logits_of(*table, row) for row in rows])

    candidates = expanded(
        forward,
        logits,
        Operations(),
        torch.zeros(1, 1, dtype=torch.int64),
        torch.tensor(0),
        depth,
        min(tree.top_k, table[2]),
        perturbation=Perturbation(1.0, torch.tensor(noise)) if noise else None,
        least_score=tree.least_score,
    )
    return candidates.keep_best(tokens[-1], tree.rows, least_score=tree.least_score)


class EnumeratingSampler(Enumerated, RandomSampler):
    """The sampler that serves, with its two random events enumerated."""

    def __init__(self, outcomes: Outcomes, case: Case) -> None:
        self.outcomes, self.num_prompt_tokens, self.rule = outcomes, len(case.prompt), case.rule
        self.is_warping, self.constraint = case.sampling is not None, None
        if case.sampling is not None:
            self.sampling = case.sampling

    def distributions(self, logits: Any, prefixes: Prefixes) -> Probabilities:
        assert len(logits) == len(prefixes.suffixes)
        if not self.is_warping:
            return Probabilities(logits)
        return Probabilities(rational(super().distributions(logits, prefixes).values))

    def join(self, parts: list[Probabilities]) -> Probabilities:
        return Probabilities(np.concatenate([rows.values for rows in parts]))


class TableNoise:
    """Noise of positions that takes the values of `WAITS`, one of them in each outcome.

    A token of probability p that waits for w arrives at w / p, and the first one is drawn. With
    -log w as its noise, that is the token whose log p + noise is largest.
    """

    def __init__(self, outcomes: Outcomes, case: Case) -> None:
        self.outcomes, self.case = outcomes, case
        self._chosen: dict[int, int] = {}

    def waits(self, position: int) -> tuple[int, ...]:
        """Of each token."""
        if position not in self._chosen:
            self._chosen[position] = self.outcomes.choose([share for share, _ in WAITS])
        return WAITS[self._chosen[position]][1][: self.case.vocab_size]

    def first(self, row: Sequence[Fraction], position: int) -> int:
        """The token that is drawn from a distribution; of equals, the one of the least id."""
        waits = self.waits(position)
        arrivals = [(waits[token] / p, token) for token, p in enumerate(row) if p > 0]
        return min(arrivals)[1]

    def draw(self, *_: object) -> None:
        """Native kernels do not know it."""

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        """See `polybasic.deploy.runtime.rounds.noise.Noise`."""
        return -torch.tensor(
            [self.waits(position) for position in positions], dtype=torch.float64
        ).log()


def rational(probabilities: torch.Tensor) -> Any:
    """Fractions that sum to 1 in each row; what is possible stays so, and nothing else."""
    rows = []
    for row in probabilities.tolist():
        weights = [max(1, round(GRID * value)) if value > 0 else 0 for value in row]
        rows.append([Fraction(weight, sum(weights)) for weight in weights])
    return np.array(rows, dtype=object)


@dataclass(frozen=True)
class Wiring:
    """What a chain is built from, and how it begins; negative controls exchange a part."""

    sampler: Callable[..., EnumeratingSampler] = EnumeratingSampler
    coupled: Callable[..., CoupledSampler] = CoupledSampler
    noise: Callable[..., TableNoise] = TableNoise
    target: Callable[..., TableVerifier] = TableVerifier
    tree_stage: Callable[..., TreeStage] = TreeStage
    starts: bool = False


def build(case: Case, sampler: Any, wiring: Wiring = Wiring()) -> tuple[Stage, TokenCache]:
    """The outermost stage of a case, and the target's cache."""
    numbers = case.caches or (0,) * (len(case.flushes) + 1)
    caches = [TokenCache() for _ in numbers]
    verifiers: list[Any] = [
        (TableVerifier if model else wiring.target)(model, caches[number], case)
        for model, number in enumerate(numbers)
    ]
    drafter = TableDrafter(case, getattr(sampler, "noise", None))
    stage: Stage = wiring.tree_stage(verifiers[-1], drafter, sampler, case.stop_tokens)
    for verifier, flush in zip(reversed(verifiers[:-1]), reversed(case.flushes), strict=True):
        stage = BlockStage(verifier, stage, sampler, flush, case.stop_tokens)
    return stage, caches[numbers[0]]


def generate(case: Case, sampler: Any, wiring: Wiring = Wiring()) -> list[int]:
    """One answer, as the engine asks for it; the target's cache must hold the target's rows."""
    root, cache = build(case, sampler, wiring)
    first = alone((root.start if wiring.starts else root.prefill)(list(case.prompt)))
    tokens: list[int] = first.tokens if first else []
    while not has_ended(case, tokens):
        block = alone(root.propose(1, case.num_tokens - len(tokens)))
        assert block.tokens
        tokens += block.tokens
        committed = cache.rows[: cache.length]
        assert [token for token, _ in committed] == [*case.prompt, *tokens][:-1]
        assert {writer for _, writer in committed} <= {0}
    assert len(tokens) <= case.num_tokens
    return tokens


class TooManyOutcomes(Exception):
    """A case that would take too long."""


def runs(
    case: Case, wiring: Wiring = Wiring(), max_num_outcomes: int = 20_000
) -> Iterator[tuple[list[int], TableNoise]]:
    """The answer of each outcome, and the noise of the positions in it.

    Raises:
        TooManyOutcomes: more than `max_num_outcomes`.
    """
    outcomes, settings = Outcomes(), case.sampling or Sampling(1.0)
    for num_outcomes, _ in enumerate(outcomes.runs()):
        if num_outcomes == max_num_outcomes:
            raise TooManyOutcomes
        noise, sampler = wiring.noise(outcomes, case), wiring.sampler(outcomes, case)
        if case.rule == "coupled":
            # the very sampler that serves
            sampler = wiring.coupled(settings, len(case.prompt), noise)
        yield generate(case, sampler, wiring), noise


def output_law(case: Case, wiring: Wiring = Wiring(), max_num_outcomes: int = 20_000) -> Law:
    """Joint law of the answer; raises as `runs` does."""
    law = Law()
    for tokens, noise in runs(case, wiring, max_num_outcomes):
        law[tuple(tokens)] += noise.outcomes.probability  # type: ignore[assignment]
    return law


def target_law(case: Case) -> Law:
    """The same, of the target alone: the product of its rows, each computed from its prefix."""
    law = Law()
    prefixes: list[tuple[tuple[int, ...], Fraction]] = [((), Fraction(1))]
    while prefixes:
        tokens, probability = prefixes.pop()
        if has_ended(case, tokens):
            law[tokens] = probability  # type: ignore[assignment]
            continue
        row = target_row(case, (*case.prompt, *tokens))
        prefixes += [((*tokens, token), probability * p) for token, p in enumerate(row) if p > 0]
    return law


def departure(
    case: Case, wiring: Wiring = Wiring(), max_num_outcomes: int = 20_000
) -> tuple[list[int], list[int]] | None:
    """An answer, and what the target alone draws with the same noise, where these differ.

    Returns:
        None if they are equal in each outcome.

    Raises:
        TooManyOutcomes: as `runs` does.
    """
    for tokens, noise in runs(case, wiring, max_num_outcomes):
        expected = target_answer(case, noise)
        if tokens != expected:
            return tokens, expected
    return None


def target_answer(case: Case, noise: TableNoise) -> list[int]:
    """What the target alone draws with this noise, in rational numbers."""
    tokens: tuple[int, ...] = ()
    while not has_ended(case, tokens):
        prefix = (*case.prompt, *tokens)
        tokens += (noise.first(target_row(case, prefix), len(prefix)),)
    return list(tokens)


def has_ended(case: Case, tokens: Sequence[int]) -> bool:
    return len(tokens) == case.num_tokens or bool(tokens and tokens[-1] in case.stop_tokens)


def target_row(case: Case, prefix: tuple[int, ...]) -> list[Fraction]:
    """The distribution of the token after a prefix."""
    if case.sampling is None:
        return list(probabilities_of(case.seed, case.likeness, case.vocab_size, 0, prefix))
    before = Prefixes(list(prefix), [[]])
    warped = warp(rows_of(case, 0, [prefix]), case.sampling, before, len(case.prompt))
    if case.rule == "coupled":
        return [Fraction(p) for p in warped[0].tolist()]
    return list(rational(warped)[0])
