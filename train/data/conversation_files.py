"""Rows of files of conversations, plain or compressed, each with the line that it starts on."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

import pyarrow

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import check_content, json_errors, parse_json

FILE_NAME = re.compile(r"\.jsonl?(\.gz|\.zst)?$")

_READ_SIZE = 1 << 20
_LINE_CHARACTERS = 1 << 26
"""A conversation of ten million words; a longer line is none, and would fill the memory."""
_LIST_CHARACTERS = 1 << 32
"""A JSON list is held in memory whole, JSON lines are not."""
_EXPANSION = 200
"""Bytes that one compressed byte may become: twenty times what text gives. Files that are made to
fill a memory go into the tens of thousands."""
_ALWAYS_EXPANDED = 1 << 26
"""Bytes that a compressed file may become however small it is."""


def check_file(path: Path) -> None:
    """Refuse what is no conversation file.

    Raises:
        UserError: `path` is no file, or its name ends otherwise than `FILE_NAME`.
    """
    if not path.exists():
        raise UserError("conversation file not found", str(path), "check data.conversations")
    if not path.is_file() or not FILE_NAME.search(path.name):
        raise UserError(
            "not a conversation file",
            str(path),
            "give a .json or .jsonl file, which may be compressed to .gz or .zst",
        )


def read_file(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield (row, "FILE line N") for each row of a JSON list or of JSON lines.

    Raises:
        UserError: missing, empty, corrupt, or not JSON (with the line).
    """
    check_file(path)
    try:
        with _open_text(path) as text:
            is_list = _first_character(text, path) == "["
        with _open_text(path) as text:
            yield from _list_rows(text, path) if is_list else _lines(text, path)
    except UnicodeDecodeError as error:
        raise UserError(
            "conversation file is not UTF-8 text", f"{path} ({error.reason})", "convert it"
        ) from error
    except OSError as error:
        what = "corrupt compressed file" if _is_compressed(path) else "unreadable file"
        raise UserError(what, f"{path} ({error})", "fetch it again") from error


class _Bounded(io.RawIOBase):
    """The content of a file, decompressed as it is read, and cut short where it expands too far.

    Arrow's streams end with an OSError where a file ends within a compressed frame.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._stream = path, pyarrow.input_stream(str(path))
        self._num_left = max(_ALWAYS_EXPANDED, _EXPANSION * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._stream.read(len(buffer))
        self._num_left -= len(content)
        if self._num_left < 0:
            raise UserError(
                "compressed file expands too far",
                f"{self._path} (more than {_EXPANSION} times its size)",
                "unpack it first, if that is what it is meant to hold",
            )
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._stream.close()
        super().close()


def _is_compressed(path: Path) -> bool:
    return path.suffix in (".gz", ".zst")


def _open_text(path: Path) -> IO[str]:
    return io.TextIOWrapper(io.BufferedReader(_Bounded(path), _READ_SIZE), encoding="utf-8-sig")


def _first_character(text: IO[str], path: Path) -> str:
    """The first one that is not blank."""
    while part := text.read(4096):
        if part := part.lstrip():
            return part[0]
    raise UserError("empty conversation file", str(path), "give one with content")


def _lines(text: IO[str], path: Path) -> Iterator[tuple[Any, str]]:
    number = 0
    while line := text.readline(_LINE_CHARACTERS + 1):
        number += 1
        where = f"{path} line {number}"
        if len(line) > _LINE_CHARACTERS:
            raise UserError(
                "line too long",
                f"{where} (more than {_LINE_CHARACTERS:,} characters)",
                "write one conversation a line",
            )
        if not line.strip():
            continue
        yield parse_json(line, "conversation", str(path), number), where


def _list_rows(text: IO[str], path: Path) -> Iterator[tuple[Any, str]]:
    """Decode a JSON list element by element, so that each row knows its line."""
    content = _whole_text(text, path)
    decode = json.JSONDecoder().raw_decode
    line, counted = 1, 0
    position = _skip_blank(content, content.index("[") + 1)
    closed = content[position : position + 1] == "]"
    while not closed:
        line += content.count("\n", counted, position)
        counted = position
        where = f"{path} line {line}"
        with json_errors("conversation", str(path)):
            row, position = decode(content, position)
        check_content(row, "conversation", where)
        yield row, where
        position = _skip_blank(content, position)
        mark = content[position : position + 1]
        closed = mark == "]"
        if not closed:
            if mark != ",":
                _misplaced("Expecting ',' or ']'", content, position, path)
            position = _skip_blank(content, position + 1)
    if content[position + 1 :].strip():
        _misplaced("Extra data after the list", content, position + 1, path)


def _whole_text(text: IO[str], path: Path) -> str:
    parts, num_left = [], _LIST_CHARACTERS
    # in parts: one read sets aside as much memory as it may return
    while part := text.read(_READ_SIZE):
        parts.append(part)
        num_left -= len(part)
        if num_left < 0:
            raise UserError(
                "JSON list too long",
                f"{path} (more than {_LIST_CHARACTERS:,} characters)",
                "write it as JSON lines",
            )
    return "".join(parts)


def _misplaced(message: str, content: str, position: int, path: Path) -> NoReturn:
    with json_errors("conversation file", str(path)):
        raise json.JSONDecodeError(message, content, position)
    raise AssertionError


def _skip_blank(content: str, position: int) -> int:
    while content[position : position + 1].isspace():
        position += 1
    return position
