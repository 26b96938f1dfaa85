import pytest

from polybasic.chain.base.errors import UserError
from polybasic.quantize.calibration import calibration_samples

ROWS = [list(range(100 * row, 100 * row + length)) for row, length in enumerate([3, 10, 0, 5, 7])]


def test_samples_have_one_length_and_are_reproducible():
    samples = calibration_samples(ROWS, 4, 5, seed=1)
    assert [len(sample) for sample in samples] == [5] * 4
    assert samples == calibration_samples(ROWS, 4, 5, seed=1)
    assert samples != calibration_samples(ROWS, 4, 5, seed=2)


def test_every_row_counts_before_any_is_read_further():
    # the first 5 of each row are 3 + 5 + 5 + 5 = 18 tokens, exactly these are taken
    samples = calibration_samples(ROWS, 3, 6, seed=0)
    first = {token for row in ROWS for token in row[:6]}
    assert {token for sample in samples for token in sample} <= first
    taken = [token for sample in calibration_samples(ROWS, 5, 5, seed=0) for token in sample]
    assert sorted(taken) == sorted(token for row in ROWS for token in row)


def test_one_long_row_is_enough():
    samples = calibration_samples([list(range(12))], 3, 4, seed=0)
    assert samples == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_too_little_data_is_refused():
    with pytest.raises(
        UserError, match=r"25 tokens in 5 conversations, 30 needed \(5 samples of 6\)"
    ):
        calibration_samples(ROWS, 5, 6, seed=0)
