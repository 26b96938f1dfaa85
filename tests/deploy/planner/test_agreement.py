"""What planning reads off traces: which tokens are kept, and which are candidates."""

import numpy as np
import pytest

from polybasic.chain.kernels.drafts import ABSENT
from polybasic.deploy.planner.measuring.agreement import (
    acceptance_between,
    acceptance_by_bin,
    candidates_by_depth,
)
from polybasic.deploy.planner.measuring.measurements import AcceptanceTrace
from tests.deploy.planner.machines import make_measurements


def test_acceptance_by_bin() -> None:
    measured = make_measurements(0, {"a": 1.0, "b": 1.0}, {"b": 0.8}, num_traces=40)
    share = acceptance_between(measured, "a", "b")
    assert share == pytest.approx(0.8, abs=0.03)
    acceptance = acceptance_by_bin(measured, "a", "b")
    # Right ones have probability 0.97, wrong ones 0.4: bins 7 and 1; the others were never seen.
    num_wrong = (1 - share) * measured.num_tokens
    assert acceptance[1] == pytest.approx(share / (num_wrong + 1))
    assert acceptance[7] > 0.99
    assert [acceptance[index] for index in (0, 2, 3, 4, 5, 6)] == pytest.approx([share] * 6)


def test_acceptance_by_bin_at_a_temperature() -> None:
    """Two tokens, p = (0.5, 0.5) and q = (0.9, 0.1) everywhere: of the first 5/9 are kept."""
    chance = np.random.default_rng(0)
    is_first, draws_first = chance.random(4000) < 0.5, chance.random(4000) < 0.9
    q = np.where(is_first, 0.9, 0.1)
    measured = make_measurements(0, {"a": 1.0, "b": 1.0}, {"b": 0.8}, temperature=1.0)
    trace = AcceptanceTrace(
        "task",
        {"a": np.full(4000, 0.5), "b": q},
        {"a": np.full(4000, 0.5), "b": q},
        {"a": np.full(4000, 0.5), "b": np.where(draws_first, 0.9, 0.1)},
        {},
        None,
    )
    measured.traces[:] = [trace]
    acceptance = acceptance_by_bin(measured, "a", "b")
    assert acceptance[6] == pytest.approx(5 / 9, abs=0.03)
    assert acceptance[0] == pytest.approx(1.0, abs=0.1)
    assert acceptance_between(measured, "a", "b") == pytest.approx(0.6, abs=0.02)


def test_candidates_by_depth() -> None:
    ranks = np.full((4, 2, 2), ABSENT)
    ranks[0, :, 0], ranks[0, 1, 1] = 1, 3
    ranks[1, :, 0], ranks[3, :, 0] = 2, 1
    measured = make_measurements(0, {"a": 1.0}, {}, num_traces=1)
    measured.traces[0].ranks["draft", "a"] = {2: ranks}
    # One token: at 0, 1 and 3 of 4. Two tokens: at 0 of 3, as nothing follows the last.
    assert candidates_by_depth(measured, "draft", "a", 2) == [3 / 4, 1 / 3]
