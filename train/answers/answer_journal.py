"""Answers on disk as they come, one JSON line each, so that none is asked for twice."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import disk_errors, parse_json, sha256_of_object, write_json
from polybasic.train.answers.answerer import WrittenTurn

_NAME_DIGITS = 16


class AnswerJournal:
    """A file to which answers are appended; one process at a time has it open.

    Whatever ends that process, at most the line that it was writing is lost: an incomplete last
    line is removed when the file is opened again. The file is named after what decides on the
    answers, which is written beside it, so that answers of different models never mix. Each of
    several processes appends to a file of its own and knows the answers in all of them.

    Args:
        folder: holds the journals of all models and settings; made where it is missing.
        identity: JSON content on which every answer depends, beside its prompt.
        process: number of the process that appends, from 0.

    Attributes:
        path: the file.

    Raises:
        UserError: a damaged line that is not the last one, or a disk that is full or not writable.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], process: int = 0) -> None:
        name = sha256_of_object(dict(identity))[:_NAME_DIGITS]
        self.path = folder / (f"{name}.{process}.jsonl" if process else f"{name}.jsonl")
        with disk_errors(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            if not process:
                write_json(folder / f"{name}.json", dict(identity))
        self._answers, num_whole_bytes = _read(self.path) if self.path.exists() else ({}, 0)
        for path in folder.glob(f"{name}*.jsonl"):
            if path != self.path:
                self._answers |= _read(path)[0]
        with disk_errors(self.path):
            # unbuffered: a line is with the system before its answer counts as kept
            self._file = self.path.open("ab", buffering=0)
            self._file.truncate(num_whole_bytes)

    def __len__(self) -> int:
        return len(self._answers)

    def __enter__(self) -> "AnswerJournal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file, disk_errors(self.path):
            os.fsync(self._file.fileno())

    def get(self, conversation: str, turn: int) -> WrittenTurn | None:
        """The answer of a conversation's turn, None where it is still to be asked for."""
        return self._answers.get((conversation, turn))

    def add(self, conversation: str, turn: int, answer: WrittenTurn) -> None:
        """Append an answer.

        Args:
            conversation: names it among all.
            turn: 0 is its first answer.

        Raises:
            UserError: the disk is full.
        """
        line = {"conversation": conversation, "turn": turn, "answer": answer.text}
        if answer.is_cut:
            line["is_cut"] = True
        rest = json.dumps(line, ensure_ascii=False).encode("utf-8") + b"\n"
        with disk_errors(self.path):
            while rest:
                rest = rest[self._file.write(rest) :]
        self._answers[conversation, turn] = answer


def _read(path: Path) -> tuple[dict[tuple[str, int], WrittenTurn], int]:
    """The answers of a journal, and the bytes of its whole lines."""
    found: dict[tuple[str, int], WrittenTurn] = {}
    num_whole_bytes = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            num_whole_bytes += len(line)
            try:
                content = parse_json(line, "answer", str(path), number)
                answer = WrittenTurn(content["answer"], content.get("is_cut", False))
                found[content["conversation"], content["turn"]] = answer
            except (UserError, LookupError, TypeError, AttributeError) as error:
                raise UserError(
                    "damaged journal of answers",
                    f"{path} line {number}",
                    "remove that line; its answer is then asked for again",
                ) from error
    return found, num_whole_bytes
