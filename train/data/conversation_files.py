"""Rows of ShareGPT files, plain or compressed, each with the line that it starts on."""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import zstandard

from polybasic.chain.errors import UserError

FILE_NAME = re.compile(r"\.jsonl?(\.gz|\.zst)?$")


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
            start = text.readline()
            while start and not start.strip():
                start = text.readline()
            text.seek(0)
            if not start:
                raise UserError("empty conversation file", str(path), "give one with content")
            yield from _list_rows(text, path) if start.lstrip()[0] == "[" else _lines(text, path)
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, EOFError) as error:
        raise UserError("corrupt compressed file", f"{path} ({error})", "fetch it again") from error
    except UnicodeDecodeError as error:
        raise UserError(
            "conversation file is not UTF-8 text", f"{path} ({error.reason})", "convert it"
        ) from error


def _open_text(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")
    if path.suffix == ".zst":
        with path.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as plain:
            content = plain.read()
        if not content and path.stat().st_size == 0:
            raise UserError("empty conversation file", str(path), "give one with content")
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")


def _lines(text: IO[str], path: Path) -> Iterator[tuple[Any, str]]:
    for number, line in enumerate(text, start=1):
        if line.strip():
            where = f"{path} line {number}"
            try:
                yield json.loads(line), where
            except json.JSONDecodeError as error:
                raise _not_json(where, error) from error


def _list_rows(text: IO[str], path: Path) -> Iterator[tuple[Any, str]]:
    """Decode a JSON list element by element, so that each row knows its line."""
    content = text.read()
    decode = json.JSONDecoder().raw_decode
    line, counted = 1, 0
    position = _skip_blank(content, content.index("[") + 1)
    closed = content[position : position + 1] == "]"
    while not closed:
        line += content.count("\n", counted, position)
        counted = position
        where = f"{path} line {line}"
        try:
            row, position = decode(content, position)
        except json.JSONDecodeError as error:
            raise _not_json(f"{path} line {error.lineno}", error) from error
        yield row, where
        position = _skip_blank(content, position)
        mark = content[position : position + 1]
        closed = mark == "]"
        if not closed:
            if mark != ",":
                raise _misplaced("Expecting ',' or ']'", content, position, path)
            position = _skip_blank(content, position + 1)
    if content[position + 1 :].strip():
        raise _misplaced("Extra data after the list", content, position + 1, path)


def _misplaced(message: str, content: str, position: int, path: Path) -> UserError:
    found = json.JSONDecodeError(message, content, position)
    return _not_json(f"{path} line {found.lineno}", found)


def _skip_blank(content: str, position: int) -> int:
    while content[position : position + 1].isspace():
        position += 1
    return position


def _not_json(where: str, error: json.JSONDecodeError) -> UserError:
    return UserError("not JSON", f"{where} ({error.msg})", "repair the line or remove it")
