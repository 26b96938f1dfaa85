"""Answers of a benchmark, kept turn by turn, so that an interrupted one can be continued."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polybasic.chain.formats.files import whole_file
from polybasic.deploy.bench.systems.system import TimedAnswer
from polybasic.deploy.runtime.request import Statistics
from polybasic.deploy.runtime.rounds.proposals import Proposals


@dataclass(frozen=True)
class JournalEntry:
    """One answer, and the energy of the machine meanwhile where it tells, in joules."""

    answer: TimedAnswer
    joules: float | None = None


Turn = Mapping[str, JournalEntry]
"""The answers of all systems to one prompt, by the system's name."""


class Journal:
    """A file of turns: what was measured first, then a line for each turn.

    A line that a killed process left half written, and all after it, is dropped. Where the file
    was written by another measurement, it begins anew.

    Args:
        path: of the file.
        identity: what must be equal for answers to belong together, as JSON.

    Attributes:
        turns: read and added ones, by (repeat, prompt).
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path, self.turns = path, dict[tuple[int, int], Turn]()
        header = json.dumps(identity, sort_keys=True)
        written = path.read_text("utf-8", errors="replace") if path.exists() else ""
        lines, kept = written.split("\n")[:-1], [header]
        if lines and lines[0] == header:
            for line in lines[1:]:
                try:
                    key, turn = _read(line)
                except (ValueError, TypeError, KeyError):
                    break
                self.turns[key] = turn
                kept.append(line)
        path.parent.mkdir(parents=True, exist_ok=True)
        if (content := "\n".join(kept) + "\n") != written:
            with whole_file(path) as partial:
                partial.write_text(content, "utf-8")
        self._lines = path.open("a", encoding="utf-8")

    def add(self, repeat: int, prompt: int, turn: Turn) -> None:
        """Keep a turn."""
        self.turns[repeat, prompt] = turn
        answers = {name: asdict(taken) for name, taken in turn.items()}
        line = json.dumps({"repeat": repeat, "prompt": prompt, "answers": answers})
        self._lines.write(line + "\n")
        self._lines.flush()

    def close(self) -> None:
        """Close the file, which stays."""
        self._lines.close()


def _read(line: str) -> tuple[tuple[int, int], Turn]:
    row = json.loads(line)
    turn = {name: _taken(content) for name, content in row["answers"].items()}
    return (row["repeat"], row["prompt"]), turn


def _taken(content: dict[str, Any]) -> JournalEntry:
    answer = dict(content["answer"])
    statistics = answer.pop("statistics")
    if statistics is not None:
        proposals = {
            name: Proposals(**counts) for name, counts in statistics.pop("proposals").items()
        }
        statistics = Statistics(**statistics, proposals=proposals)
    return JournalEntry(TimedAnswer(**answer, statistics=statistics), content["joules"])
