"""The classifier of AutoJudge, on features whose law is known."""

from pathlib import Path

import numpy as np
import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.deploy.runtime.rounds.judging import read_classifier
from polybasic.train.judge import Judging, fit_judge, write_judge

NUM_TOKENS, NUM_FEATURES = 600, 40
QUESTIONS = np.arange(NUM_TOKENS) // 10


def fitted(is_told: bool) -> tuple[Judging, np.ndarray]:
    """Two features tell whether a token matters, up to noise, or none does."""
    numbers = np.random.default_rng(5)
    features = numbers.normal(size=(NUM_TOKENS, NUM_FEATURES)) * 3 + 7
    margin = features[:, 3] - features[:, 8] + numbers.normal(size=NUM_TOKENS) + 2
    matters = margin > 0
    if not is_told:
        numbers.shuffle(matters)
    return fit_judge(features, matters, QUESTIONS), features


def test_features_that_tell_are_found_and_others_are_not() -> None:
    told, features = fitted(is_told=True)
    assert told.area > 0.95
    largest = np.argsort(-np.abs(told.weight))[:2]
    assert set(largest.tolist()) == {3, 8}
    assert told.weight[3] > 0 > told.weight[8]
    right = (features @ told.weight + told.bias > 0) == told.matters
    assert right.mean() > 0.9
    # what nothing tells is found on questions that were not fitted to
    assert 0.4 < fitted(is_told=False)[0].area < 0.6


def test_thresholds_are_by_the_tokens_that_matter() -> None:
    judging, _ = fitted(is_told=True)
    for recall in (1.0, 0.95, 0.5):
        threshold = judging.threshold(recall)
        replaced = (judging.importance[judging.matters] >= threshold).mean()
        assert recall <= replaced < recall + 0.01
    assert judging.spared(judging.threshold(0.5)) > judging.spared(judging.threshold(0.95)) > 0.5


def test_the_area_counts_pairs() -> None:
    importance, matters = np.array([0.1, 0.4, 0.4, 0.9]), np.array([False, True, False, True])
    judging = Judging(np.zeros(1), 0.0, 1.0, importance, matters)
    assert judging.area == (1 + 0.5 + 2) / 4


def test_too_few_tokens_are_told() -> None:
    features, matters = np.zeros((60, 2)), np.arange(60) < 9
    with pytest.raises(UserError, match="9 that matter and 51 that do not, of 6 questions"):
        fit_judge(features, matters, QUESTIONS[:60])
    with pytest.raises(UserError, match="of 3 questions"):
        fit_judge(features, np.arange(60) < 30, QUESTIONS[:60] % 3)


def test_what_is_written_is_what_the_runtime_reads(tmp_path: Path) -> None:
    judging, features = fitted(is_told=True)
    write_judge(path := tmp_path / "judge.safetensors", judging)
    read = read_classifier(path)
    for row in features[:5]:
        expected = 1 / (1 + np.exp(-(row @ judging.weight + judging.bias)))
        found = read.importance(torch.from_numpy(row).float())
        assert found == pytest.approx(expected, abs=1e-5)
