"""Shards of answered conversations: each process writes one, and the first merges all of them."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import parse_json, whole_file, write_json
from polybasic.train.answers.accounting import Outcome, counts_of
from polybasic.train.data.chat import Messages

MANIFEST_NAME = "shards.json"
_SHARDS_NAME = "shards"


def write_shard(
    folder: Path, index: int, outcomes: Sequence[Outcome], answered: Mapping[int, Messages]
) -> None:
    """Write what became of a shard's conversations.

    Args:
        folder: of the result.
        index: of the shard.
        outcomes: of its conversations.
        answered: messages by row, of those that were answered.

    Raises:
        UserError: the disk is full or not writable.
    """
    with whole_file(_path(folder, index)) as partial, partial.open("wb") as lines:
        for outcome in outcomes:
            content = {**vars(outcome), "messages": answered.get(outcome.row)}
            lines.write(json.dumps(content, ensure_ascii=False).encode("utf-8") + b"\n")


def read_shards(
    folder: Path, rows: Sequence[Sequence[int]]
) -> tuple[list[Outcome], dict[int, Messages]]:
    """All shards, whose counts go into a manifest.

    Args:
        folder: of the result.
        rows: of the source, by shard.

    Returns:
        Outcomes, and messages by row, of those that were answered.

    Raises:
        UserError: a shard that is missing, damaged or of other conversations.
    """
    outcomes: list[Outcome] = []
    answered: dict[int, Messages] = {}
    manifest = []
    for index, expected in enumerate(rows):
        found = [_parsed(content) for content in _lines(_path(folder, index))]
        if sorted(outcome.row for outcome, _ in found) != list(expected):
            raise UserError(
                "short shard of answers",
                f"{_path(folder, index)} ({len(found):,} of {len(expected):,} conversations)",
                "run again: answers are kept",
            )
        outcomes += [outcome for outcome, _ in found]
        answered |= {outcome.row: messages for outcome, messages in found if messages}
        manifest.append({"shard": index, **counts_of([outcome for outcome, _ in found])})
    write_json(folder / MANIFEST_NAME, {**counts_of(outcomes), "shards": manifest})
    return outcomes, answered


def remove_shards(folder: Path) -> None:
    """Remove the files of merged shards; the manifest stays."""
    shutil.rmtree(folder / _SHARDS_NAME)


def _path(folder: Path, index: int) -> Path:
    return folder / _SHARDS_NAME / f"{index:05d}.jsonl"


def _lines(path: Path) -> list[Any]:
    if not path.is_file():
        raise UserError(
            "shard of answers is missing",
            str(path),
            "let all hosts write to one shared folder, and run again: answers are kept",
        )
    with path.open("rb") as lines:
        return [
            parse_json(line, "shard of answers", str(path), number)
            for number, line in enumerate(lines, start=1)
        ]


def _parsed(content: dict[str, Any]) -> tuple[Outcome, Messages | None]:
    messages = content.pop("messages")
    return Outcome(**content), messages
