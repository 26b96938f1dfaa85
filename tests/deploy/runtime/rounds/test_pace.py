"""Blocks of prompts follow the time that passes take."""

import pytest
import torch

from polybasic.deploy.runtime.rounds.pace import PromptPace

CPU = torch.device("cpu")


def paced(num_running: int, seconds_a_row: float, is_batch_invariant: bool = True) -> PromptPace:
    pace = PromptPace(CPU, is_batch_invariant)
    pace.num_running, pace.num_reading = num_running, 1
    for _ in range(40):
        pace.took(0, 0.05)
        pace.took(100, 0.05 + 100 * seconds_a_row)
    return pace


@pytest.mark.parametrize(
    ("num_running", "seconds_a_row", "rows"),
    [(2, 1e-5, 256), (2, 1e-3, 100), (2, 1e-2, 10), (2, 0.1, 4), (1, 1e-3, 256), (1, 1e-2, 100)],
)
def test_a_block_adds_a_tenth_of_a_second_where_others_wait(
    num_running: int, seconds_a_row: float, rows: int
) -> None:
    assert paced(num_running, seconds_a_row).rows == pytest.approx(rows, abs=1)


def test_prompts_that_are_read_together_share_the_block() -> None:
    pace = paced(4, 1e-3)
    pace.num_reading = 3
    assert (pace.room, pace.rows) == (pytest.approx(100, abs=1), pytest.approx(33, abs=1))
    pace.num_reading = 90
    assert pace.rows == 4


def test_alone_blocks_do_not_depend_on_time_where_they_round() -> None:
    assert paced(1, 1e-2, is_batch_invariant=False).rows == 256
    assert paced(2, 1e-2, is_batch_invariant=False).rows == pytest.approx(10, abs=1)


def test_passes_of_a_gpu_are_not_timed() -> None:
    pace = PromptPace(torch.device("cuda"))
    pace.num_running = 2
    pace.took(2048, 100.0)
    assert pace.rows == 2048


def test_one_slow_pass_is_forgotten() -> None:
    pace = paced(2, 1e-4)
    pace.took(256, 3.0)
    assert pace.rows < 100
    for _ in range(30):
        pace.took(pace.rows, 0.05 + pace.rows * 1e-4)
    assert pace.rows == 256
