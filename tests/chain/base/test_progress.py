"""What is seen of long work: lines often enough where there is no terminal, else a bar."""

import itertools
import re

import pytest

from polybasic.chain.base.progress import LINE_SECONDS, ProgressReport, waiting


class Clock:
    """Seconds that pass when they are told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def lines_of(
    capsys: pytest.CaptureFixture[str], seconds: list[float], done: int = 0
) -> list[tuple[float, str]]:
    """Run steps of these seconds; the lines, each with the second at which it came."""
    clock, lines = Clock(), []
    with ProgressReport("head", done + len(seconds), done, clock=clock) as progress:
        for each in seconds:
            clock.now += each
            progress.step("loss 1.250")
            lines += [(clock.now - 100, line) for line in capsys.readouterr().err.splitlines()]
    assert not "".join(capsys.readouterr())
    return lines


@pytest.mark.parametrize("seconds", [0.01, 1.0, 7.0, 29.0, 30.0])
def test_a_line_comes_at_least_every_half_minute(
    capsys: pytest.CaptureFixture[str], seconds: float
) -> None:
    num_steps = 3 + int(200 / seconds)
    lines = lines_of(capsys, [seconds] * num_steps)
    moments = [0.0, *(moment for moment, _ in lines)]
    waits = [after - before for before, after in itertools.pairwise(moments)]
    assert max(waits) <= LINE_SECONDS
    assert moments[-1] == pytest.approx(seconds * num_steps)
    assert len(lines) < 25  # not one a step, unless steps are long


def test_a_line_has_step_numbers_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for _, line in lines_of(capsys, [10.0] * 9, done=1000)]
    assert lines[0] == "head: 1,001 of 1,009  loss 1.250  0:01:20 left"
    assert lines[-1] == "head: 1,009 of 1,009  loss 1.250  0:00:00 left"


def test_a_rate_counts_from_the_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with ProgressReport("head", 2, clock=clock) as progress:
        clock.now += 4
        assert progress.per_second(10) == 2.5


def test_a_terminal_has_a_bar_and_the_lines_that_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressReport("head", 2) as progress:
        progress.step("loss 1.250")
        progress.say("step 1: 3.10 tokens a round")
        progress.step("loss 1.125")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "━" in shown
    assert "2/2" in shown
    assert "step 1: 3.10 tokens a round" in shown
    assert "loss 1.125" in shown
    assert "2 of 2" not in shown


def test_a_bar_that_ends_early_is_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressReport("groups", 6) as progress:
        progress.step()
        progress.end_here()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert shown.rstrip().endswith("1/1 0:00:00")


def test_a_spinner_is_shown_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with waiting("simulating rounds"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with waiting("simulating rounds"):
        pass
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "simulating rounds 0:00:00" in shown
