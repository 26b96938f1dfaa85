"""Fixtures of rounds that are counted."""

import pytest

from polybasic.deploy.runtime.rounds.stages import HostStage, Stage


@pytest.fixture
def answers_begin_with_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few tokens that are counted, none is drawn by a pass over the prompt alone."""
    monkeypatch.setattr(HostStage, "start", Stage.start)
