"""With common noise a chain's answer is what the target alone draws, for each outcome of the noise.

Exact: noise takes a few values at each position, all outcomes are enumerated, and what the target
draws is computed in rational numbers; see `tests/deploy/tables.py`. Stages and sampler are those
that serve. Equal answers have equal laws. Each negative control breaks one thing and must be seen.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from polybasic.chain.formats.plan import Tree
from polybasic.deploy.runtime.rounds.sampling import CoupledSampler, GreedyRows, Prefixes
from tests.deploy.runtime.rounds.test_enumeration import WARPERS, adaptive, case
from tests.deploy.tables import (
    Case,
    TableNoise,
    Wiring,
    departure,
    output_law,
)

ONE_LEVEL = [case("coupled", num_tokens=5), case("coupled", num_tokens=4, vocab_size=3)]
TWO_LEVELS = [
    case("coupled", length, num_tokens=5, caches=caches)
    for length in (1, 2, 4)
    for caches in (None, (0, 1))
]
THREE_LEVELS = [
    case("coupled", length, 2, num_tokens=4, vocab_size=vocab_size, caches=caches)
    for length, vocab_size in ((1, 2), (3, 3))
    for caches in (None, (0, 1, 2), (0, 0, 1), (0, 1, 1))
]
FOUR_LEVELS = [
    case("coupled", 4, 2, 1, num_tokens=5),
    case("coupled", 3, 2, 1, num_tokens=4, vocab_size=3, caches=(0, 0, 1, 1)),
    case("coupled", 2, 2, 2, num_tokens=4, caches=(0, 1, 1, 2)),
]
STOPPED = [
    case("coupled", 2, num_tokens=5, stop_tokens=frozenset({1})),
    case("coupled", 3, 2, num_tokens=4, vocab_size=3, stop_tokens=frozenset({0, 2})),
    case("coupled", 3, 2, num_tokens=5, stop_tokens=frozenset({1}), seed=1, caches=(0, 0, 1)),
]
ADAPTED = [
    adaptive(case("coupled", 4, num_tokens=5, caches=(0, 1)), 0),
    adaptive(case("coupled", 3, 2, num_tokens=4, vocab_size=3), 0, 1),
]
PROBABLE_TREES = [
    case(
        "coupled", *lengths, num_tokens=4, vocab_size=3,
        tree=Tree(depth=3, top_k=2, rows=6, least_probability=least),
    )
    for lengths, least in (((), 0.3), ((2,), 0.3), ((3, 1), 0.6))
]  # fmt: skip
WARPED = [
    case("coupled", num_tokens=3, vocab_size=3),
    case("coupled", 2, num_tokens=3, vocab_size=3, stop_tokens=frozenset({2}), caches=(0, 1)),
    case("coupled", 2, 1, num_tokens=3, vocab_size=3, caches=(0, 0, 1)),
]


@pytest.mark.parametrize(
    "case",
    [*ONE_LEVEL, *TWO_LEVELS, *THREE_LEVELS, *FOUR_LEVELS, *STOPPED, *ADAPTED, *PROBABLE_TREES],
    ids=str,
)
def test_answers_are_the_targets(case: Case) -> None:
    assert departure(case) is None


@pytest.mark.parametrize("one", WARPED, ids=str)
@pytest.mark.parametrize("warper", WARPERS)
def test_warped_answers_are_the_targets(warper: str, one: Case) -> None:
    assert departure(dataclasses.replace(one, sampling=WARPERS[warper])) is None


def test_the_noise_decides_the_answer_alone() -> None:
    """Other chains over the same target give the same answers, and other noise gives others."""
    law = output_law(case("coupled", num_tokens=4))
    assert len(law) > 8
    assert sum(law.values()) == 1
    for lengths in ((2,), (3, 1), (4, 2, 1)):
        assert output_law(case("coupled", *lengths, num_tokens=4)) == law


# What is wrong is seen


class NoiseOfRounds(TableNoise):
    """Belongs to the pass, not to the position."""

    num_passes = 0

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        self.num_passes += 1
        return super().at([-self.num_passes] * len(positions))


class StalePositions(TableNoise):
    """Counts on from what was drafted, although a part of it was refused."""

    end = 0

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        shift = max(self.end - min(positions), 0)
        self.end = max(positions) + shift + 1
        return super().at([position + shift for position in positions])


class PositionsOfRows(TableNoise):
    """A tree's rows lie behind each other, as if it were a block."""

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        return super().at(range(positions[0], positions[0] + len(positions)))


class PositionsOfParents(TableNoise):
    """Each draw has the noise of the token before it, but for the first."""

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        return super().at([max(position - 1, positions[0]) for position in positions])


class VerifiesUntruncated(CoupledSampler):
    """Blocks are verified with draws from logits without truncation."""

    def distributions(self, logits: Any, prefixes: Prefixes) -> GreedyRows:
        plain = CoupledSampler(dataclasses.replace(self.sampling, top_k=0), 0, self.noise)
        self.untruncated = plain.distributions(logits, prefixes)
        return super().distributions(logits, prefixes)

    def verify(self, tokens: list[int], proposed: Any, own: Any) -> tuple[int, int]:
        return super().verify(tokens, proposed, self.untruncated)


class KeepsOneMore(CoupledSampler):
    """Keeps the first token that is not the verifier's own draw."""

    def verify(self, tokens: list[int], proposed: Any, own: Any) -> tuple[int, int]:
        num_kept, _ = super().verify(tokens, proposed, own)
        num_kept = min(num_kept + 1, len(tokens))
        return num_kept, own.tokens[num_kept]


CHAINS = [
    case("coupled", num_tokens=4, vocab_size=3),
    case("coupled", 2, num_tokens=4, vocab_size=3),
    case("coupled", 2, 2, num_tokens=4, vocab_size=3, caches=(0, 1, 1)),
]


@pytest.mark.parametrize("one", CHAINS, ids=str)
@pytest.mark.parametrize("noise", [NoiseOfRounds, StalePositions, PositionsOfParents])
def test_noise_of_another_position_is_detected(noise: type[TableNoise], one: Case) -> None:
    assert departure(one, Wiring(noise=noise)) is not None


def test_a_tree_that_is_verified_at_another_depth_is_detected() -> None:
    assert departure(CHAINS[0], Wiring(noise=PositionsOfRows)) is not None


def test_models_that_agree_refuse_nothing() -> None:
    """Also below the target, where noise of another position would cost tokens alone."""

    def num_refused(example: Case, noise: type[TableNoise]) -> int:
        refused: list[int] = []

        class Recorded(CoupledSampler):
            def verify(self, tokens: list[int], proposed: Any, own: Any) -> tuple[int, int]:
                num_kept, following = super().verify(tokens, proposed, own)
                refused.append(len(tokens) - num_kept)
                return num_kept, following

        assert departure(example, Wiring(noise=noise, coupled=Recorded)) is None
        return sum(refused)

    for chain in CHAINS[1:]:
        alike = dataclasses.replace(chain, likeness=10**6)
        assert num_refused(alike, TableNoise) == 0
        assert num_refused(alike, PositionsOfRows) > 0


@pytest.mark.parametrize("one", CHAINS[1:], ids=str)
@pytest.mark.parametrize("sampler", [VerifiesUntruncated, KeepsOneMore])
def test_wrong_verification_is_detected(sampler: type[CoupledSampler], one: Case) -> None:
    warped = dataclasses.replace(one, sampling=WARPERS["top_k"])
    assert departure(warped, Wiring(coupled=sampler)) is not None
