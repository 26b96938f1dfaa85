"""Trees of heads that give several positions at once: beams follow joint probabilities."""

import itertools

import torch
from torch import Tensor

from polybasic.chain.kernels.executor import Perturbation
from polybasic.chain.kernels.torch.operations import Operations
from polybasic.chain.kernels.torch.positions import Correction, expand_positions

L, V, ROOT = 3, 5, 99
PREFIX = torch.tensor(0)


class Bigrams:
    """A correction that adds a row of a table by the token before."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def begin(self) -> Tensor:
        return torch.zeros(1, V)

    def step(self, token_ids: Tensor, states: Tensor) -> Tensor:
        return self.table[token_ids]

    def logits(self, position: Tensor, states: Tensor) -> Tensor:
        return position + states


def all_paths(positions: Tensor, table: Tensor | None) -> dict[tuple[int, ...], float]:
    """The log-probability of every path, by going through all of them."""
    found = {}
    for depth in range(1, L + 1):
        for path in itertools.product(range(V), repeat=depth):
            score = 0.0
            for level, token in enumerate(path):
                logits = positions[level]
                if table is not None and level > 0:
                    logits = logits + table[path[level - 1]]
                score += float(logits.log_softmax(-1)[token])
            found[path] = score
    return found


def check(correction: Correction | None, table: Tensor | None) -> None:
    positions = torch.randn(L, V, generator=torch.Generator().manual_seed(3))
    candidates = expand_positions(positions, Operations(), PREFIX, V, correction)
    tree = candidates.keep_best(ROOT, 12)
    expected = sorted(all_paths(positions, table).items(), key=lambda entry: -entry[1])[:11]
    assert {tuple(path) for path in tree.paths()[1:]} == {path for path, _ in expected}


def test_without_a_correction_the_best_paths_are_products() -> None:
    check(None, None)


def test_a_correction_changes_which_paths_are_best() -> None:
    table = 3 * torch.randn(V, V, generator=torch.Generator().manual_seed(4))
    check(Bigrams(table), table)


def test_noise_and_a_draft_vocabulary_reach_every_level() -> None:
    positions, token_ids = torch.zeros(L, V), torch.tensor([3, 10, 11, 20, 30])
    added = torch.zeros(L, 40)
    added[0, 10], added[1, 30], added[2, 3] = 5.0, 5.0, 5.0
    candidates = expand_positions(
        positions, Operations(), PREFIX, 1, None, token_ids, Perturbation(1.0, added)
    )
    assert candidates.keep_best(ROOT, 4).tokens == [ROOT, 10, 30, 3]
