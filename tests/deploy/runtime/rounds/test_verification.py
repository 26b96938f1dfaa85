"""Hand-worked values of both rules, with fractions."""

from fractions import Fraction
from typing import Any

import numpy as np
import torch

from polybasic.deploy.runtime.rounds.verification import (
    block_acceptance,
    block_weights,
    residual,
    token_acceptance,
)


def rows(*values: list[str]) -> Any:
    return np.array([[Fraction(value) for value in row] for row in values], dtype=object)


P = rows(["1/4", "3/4"], ["1/2", "1/2"], ["1/3", "2/3"])
Q = rows(["1/2", "1/2"], ["3/4", "1/4"])


def test_token_rule() -> None:
    assert token_acceptance(P, Q, [0, 1]) == [Fraction(1, 2), 1]
    assert token_acceptance(P, Q, [1, 0]) == [1, Fraction(2, 3)]
    assert token_acceptance(P, Q, []) == []


def test_block_rule() -> None:
    # w_1 = (1/4)/(1/2) = 1/2, w_2 = min(1/2 * (1/2)/(1/4), 1) = 1
    weights = block_weights(P, Q, [0, 1])
    assert weights == [1, Fraction(1, 2), 1]
    # s_1 = max(1/4 - 3/4, 0) + max(1/4 - 1/4, 0) = 0, so a cut after the first token is never
    # taken there; h_2 = w_2 = 1 keeps the whole block
    assert block_acceptance(P, Q, weights) == [0, 1]
    # w_1 = 1, w_2 = (1/2)/(3/4) = 2/3; s_1 = max(1/2 - 3/4, 0) + max(1/2 - 1/4, 0) = 1/4
    weights = block_weights(P, Q, [1, 0])
    assert weights == [1, 1, Fraction(2, 3)]
    assert block_acceptance(P, Q, weights) == [1, Fraction(2, 3)]


def test_residual() -> None:
    assert list(residual(P[1], Q[1], 1)) == [0, 1]
    p, q = rows(["1/2", "1/4", "1/4"])[0], rows(["1/8", "1/2", "3/8"])[0]
    assert list(residual(p, q, Fraction(1, 2))) == [1, 0, 0]
    p, q = rows(["1/2", "1/2", "0"])[0], rows(["1/4", "1/8", "5/8"])[0]
    assert list(residual(p, q, 1)) == [Fraction(2, 5), Fraction(3, 5), 0]
    assert residual(torch.ones(2) / 2, torch.ones(2) / 2, 1).tolist() == [0.5, 0.5]


def test_tensors_and_fractions_agree() -> None:
    tensors = [torch.tensor(values.astype(float)) for values in (P, Q)]
    for tokens in ([0, 1], [1, 0], [0, 0], [1, 1]):
        exact = block_acceptance(P, Q, block_weights(P, Q, tokens))
        found = block_acceptance(*tensors, block_weights(*tensors, tokens))
        assert np.allclose([float(value) for value in exact], found)
