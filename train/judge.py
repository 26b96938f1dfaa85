"""The classifier of AutoJudge: which tokens matter, from hidden states (Garipov et al., 2025).

A logistic regression with a squared penalty. How strong the penalty is, and how well the classifier
tells tokens that matter from others, is found on questions that it was not fitted to.

#   N = judged tokens, F = features of each: hidden states of the target and of the proposing member
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from scipy.optimize import minimize
from scipy.special import expit
from scipy.stats import rankdata

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import whole_file

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Of the weights of standardised features, for each token."""
NUM_FOLDS = 5
MIN_TOKENS = 10
"""Of either kind."""
LEAST_DEVIATION = 1e-6
"""Of a feature that all tokens share."""


@dataclass(frozen=True)
class Judging:
    """A fitted classifier, and what it found of tokens of questions that it was not fitted to.

    Attributes:
        weight: [F], for features as they are.
        bias: added to their product.
        penalty: of the weights, among `PENALTIES`.
        importance: [N], the probability that a token matters, by a classifier of other questions.
        matters: [N], whether it does.
    """

    weight: Array
    bias: float
    penalty: float
    importance: Array
    matters: Flags

    @property
    def area(self) -> float:
        """How often a token that matters is found more important than one that does not, 0.5 by
        chance: the area under the receiver operating characteristic."""
        ranks, num = rankdata(self.importance), int(self.matters.sum())
        above = ranks[self.matters].sum() - num * (num + 1) / 2
        return float(above / (num * (len(ranks) - num)))

    def threshold(self, recall: float) -> float:
        """The largest below which at most a share of `1 - recall` of the tokens that matter lie."""
        important = np.sort(self.importance[self.matters])
        return float(important[int((1 - recall) * len(important))])

    def spared(self, threshold: float) -> float:
        """Share of the tokens that do not matter which lie below a threshold."""
        return float((self.importance[~self.matters] < threshold).mean())


def fit_judge(features: Array, matters: Flags, questions: NDArray[np.int64]) -> Judging:
    """Fit a classifier.

    Args:
        features: [N, F].
        matters: [N], whether the answer comes to something else where the token is kept.
        questions: [N], the question that each is of.

    Raises:
        UserError: too few tokens of a kind, or of too few questions.
    """
    num, names = int(matters.sum()), np.unique(questions)
    if min(num, len(matters) - num) < MIN_TOKENS or len(names) < NUM_FOLDS:
        raise UserError(
            "too few tokens to train a judge on",
            f"{num} that matter and {len(matters) - num} that do not, of {len(names)} questions",
            f"give more questions or time: {MIN_TOKENS} of each are the least",
        )
    # the order of questions in a file is no chance: every fifth one
    folds = np.searchsorted(names, questions) % NUM_FOLDS
    found = {penalty: _held_out(features, matters, folds, penalty) for penalty in PENALTIES}
    penalty = min(PENALTIES, key=lambda each: _loss(found[each], matters))
    weight, bias = _fitted(features, matters, penalty)
    return Judging(weight, bias, penalty, found[penalty], matters)


def write_judge(path: Path, judging: Judging) -> None:
    """Write a classifier as `polybasic.deploy.runtime.rounds.judging` reads it.

    Raises:
        UserError: the disk is full or not writable.
    """
    tensors = {
        "weight": torch.from_numpy(judging.weight).float(),
        "bias": torch.tensor([judging.bias]),
    }
    with whole_file(path) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})


def _held_out(features: Array, matters: Flags, folds: NDArray[np.int64], penalty: float) -> Array:
    """[N], the probability that each token matters, by a classifier of the other folds."""
    importance = np.empty(len(matters))
    for fold in range(NUM_FOLDS):
        inside = folds == fold
        weight, bias = _fitted(features[~inside], matters[~inside], penalty)
        importance[inside] = expit(features[inside] @ weight + bias)
    return importance


def _fitted(features: Array, matters: Flags, penalty: float) -> tuple[Array, float]:
    """Weights and bias of least mean loss, for features as they are."""
    mean, deviation = features.mean(0), np.maximum(features.std(0), LEAST_DEVIATION)
    rows, signs = (features - mean) / deviation, np.where(matters, 1.0, -1.0)

    def loss(given: Array) -> tuple[float, Array]:
        weight, margin = given[:-1], signs * (rows @ given[:-1] + given[-1])
        slope = -signs * expit(-margin) / len(rows)
        value = np.logaddexp(0, -margin).mean() + 0.5 * penalty * weight @ weight
        return float(value), np.append(rows.T @ slope + penalty * weight, slope.sum())

    best = minimize(loss, np.zeros(rows.shape[1] + 1), jac=True, method="L-BFGS-B").x
    weight = best[:-1] / deviation
    return weight, float(best[-1] - weight @ mean)


def _loss(importance: Array, matters: Flags) -> float:
    right = np.where(matters, importance, 1 - importance)
    return float(-np.log(np.maximum(right, 1e-12)).mean())
