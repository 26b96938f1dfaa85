"""Answers that are kept turn by turn."""

from pathlib import Path

import pytest

from polybasic.deploy.bench.journal import Journal, JournalEntry
from polybasic.deploy.bench.systems.system import TimedAnswer
from polybasic.deploy.runtime.request import Statistics
from polybasic.deploy.runtime.rounds.proposals import Proposals

IDENTITY = {"chain": "a", "prompts": [1, 2]}
OWN = TimedAnswer(
    [5, 6, 7],
    0.25,
    1,
    0.1,
    Statistics(
        num_prompt_tokens=4,
        num_tokens=3,
        seconds=0.25,
        prefill_seconds=0.1,
        forward_passes={"target": 2, "draft": 3},
        seconds_by_member={"target": 0.1, "draft": 0.05},
        accepted_lengths={"target": [1, 2]},
        stopped_by="length",
        seed=3,
        proposals={"draft": Proposals(2, 7, [1])},
    ),
)
TURN = {
    "target": JournalEntry(OWN, 1.5),
    "hf_generate": JournalEntry(TimedAnswer([5], 1.0, 1, 1.0)),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "report" / "answers.jsonl"
    journal = Journal(path, IDENTITY)
    journal.add(0, 0, TURN)
    journal.add(0, 1, TURN)
    journal.close()
    return path


def test_turns_are_there_again(path: Path) -> None:
    assert Journal(path, IDENTITY).turns == {(0, 0): TURN, (0, 1): TURN}


def test_another_benchmark_begins_anew(path: Path) -> None:
    assert Journal(path, IDENTITY | {"chain": "b"}).turns == {}
    assert Journal(path, IDENTITY).turns == {}


@pytest.mark.parametrize("num_bytes", [1, 30])
def test_a_torn_line_is_dropped_and_written_again(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])
    journal = Journal(path, IDENTITY)
    assert journal.turns == {(0, 0): TURN}
    journal.add(0, 1, TURN)
    journal.close()
    assert Journal(path, IDENTITY).turns == {(0, 0): TURN, (0, 1): TURN}


def test_what_follows_a_damaged_line_is_dropped(path: Path) -> None:
    header, first, second, end = path.read_text().split("\n")
    path.write_text("\n".join([header, first.replace('"num_first": 1', "?"), second, end]))
    assert Journal(path, IDENTITY).turns == {}
    assert path.read_text() == header + "\n"
