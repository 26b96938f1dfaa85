"""What a GGUF file says of a model, and where its tensors lie. No torch in here.

Nobody vouches for such a file: each number in it is compared with what it can be before anything
is read by it. The format is that of `docs/gguf.md` in ggml-org/ggml.
"""

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.gguf.finding import PART, SUFFIX

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 16
"""Of keys, and of tensors: the largest models have some thousands."""
_MAX_TEXTS = 1 << 21
"""In all lists of a file: the largest vocabularies have 260,000 tokens and 450,000 merges."""
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Codes of `struct` by GGUF's number of a type."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies.

    Attributes:
        type: of its values.
        shape: rows first, as PyTorch has it.
        file: that holds it.
        offset: of its first byte in the file.
    """

    type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def num_rows(self) -> int:
        """Rows, which are stored one after the other."""
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return self.num_rows * self.row_bytes


@dataclass(frozen=True)
class Header:
    """What a file says, or several that are one model.

    Attributes:
        files: in order.
        metadata: by key, of the first file; lists of numbers are arrays.
        tensors: by llama.cpp's names.
    """

    files: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]

    @property
    def path(self) -> Path:
        """The first file, for errors."""
        return self.files[0]

    def text(self, key: str, default: str | None = None) -> str:
        """A text.

        Raises:
            UserError: there is none and no default, or something else; as the methods below.
        """
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            self.refuse(key, "a text")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A number that is whole, or the one that a list holds for each layer."""
        value = self.metadata.get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if type(value) is not int:
            self.refuse(key, "a whole number, the same for all layers")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number; of one that is stored in float32, the shortest that is rounded to it."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.metadata.get(key, default)
        if type(value) is not bool:
            self.refuse(key, "true or false")
        return value

    def texts(self, key: str) -> Sequence[str]:
        """A list of texts."""
        value = self.metadata.get(key)
        if not isinstance(value, list):
            self.refuse(key, "a list of texts")
        return value

    def numbers(self, key: str, count: int) -> np.ndarray:
        """A list of so many numbers."""
        value = self.metadata.get(key)
        if not isinstance(value, np.ndarray) or len(value) != count:
            self.refuse(key, f"a list of {count:,} numbers")
        return value

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raise the error of a value that is not what it should be."""
        value = self.metadata.get(key)
        found = f"a list of {len(value):,}" if isinstance(value, list | np.ndarray) else repr(value)
        raise UserError(
            "malformed GGUF file",
            f"{self.path} {key} is {'missing' if value is None else found[:80]}, expected "
            f"{expected}",
            "fetch or convert it again",
        )


def part_files(path: Path) -> tuple[Path, ...]:
    """The files that a model is split into, by the name of the first; else the file alone.

    Raises:
        UserError: the name of another part, or one that is missing.
    """
    named = PART.fullmatch(path.name)
    if named is None:
        return (path,)
    count = int(named["count"])
    if int(named["number"]) != 1:
        first = f"{named['stem']}-00001-of-{named['count']}{SUFFIX}"
        raise UserError("not the first part of a model", f"{path}", f"name {first}")
    files = [
        path.with_name(f"{named['stem']}-{number:05}-of-{named['count']}{SUFFIX}")
        for number in range(1, min(count, _MAX_ENTRIES) + 1)
    ]
    for file in files:
        if not file.is_file():
            raise UserError("a part of the model is missing", f"{file}", "fetch all parts")
    return tuple(files)


def read_header(path: Path) -> Header:
    """Read what a GGUF file says, and of a model in several files what all of them say.

    Args:
        path: of the file, or of the first of several: NAME-00001-of-00003.gguf.

    Raises:
        UserError: no such file, no GGUF file of a version that is read, one that is damaged or cut
            off, or parts that are missing or in another order.
    """
    parts = [_read_file(file) for file in part_files(path)]
    tensors: dict[str, TensorPlace] = {}
    for number, part in enumerate(parts):
        place, count = part.integer("split.no", 0), max(1, part.integer("split.count", 1))
        if (place, count) != (number, len(parts)):
            raise UserError(
                "parts of a model in another order or number",
                f"{part.path} is part {place + 1} of {count} by its own word",
                "fetch all parts and keep their names",
            )
        if twice := tensors.keys() & part.tensors.keys():
            raise _damaged(part.path, f"tensor {min(twice)} in two parts")
        tensors |= part.tensors
    first = parts[0]
    if (expected := first.integer("split.tensors.count", len(tensors))) != len(tensors):
        raise _damaged(first.path, f"{len(tensors)} tensors in all parts, it says {expected}")
    return Header(tuple(part.path for part in parts), first.metadata, tensors)


def _read_file(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < len(_MAGIC) or file.read(len(_MAGIC)) != _MAGIC:
                raise UserError(
                    "not a GGUF file",
                    f"{path} ({size:,} bytes, it does not begin with GGUF)",
                    "name a model in GGUF; of one in several pieces, join them in order",
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Cursor(path, content).read()
    except OSError as error:
        raise UserError(
            "GGUF file cannot be read", f"{path} ({error.strerror})", "check the path"
        ) from error


class _Cursor:
    """Reads a file's header from its begin to its end."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._size = len(content)
        self._at = len(_MAGIC)
        self._num_texts = 0

    def read(self) -> Header:
        version = self._number("I")
        if version not in _VERSIONS:
            raise UserError(
                "GGUF file of another version",
                f"{self._path} (version {version}; {' and '.join(map(str, _VERSIONS))} are read, "
                "in little-endian order)",
                "convert it again",
            )
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        for what, number in (("tensors", num_tensors), ("keys", num_keys)):
            if number > _MAX_ENTRIES:
                raise self._damaged(f"{number:,} {what}")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text()
            if key in metadata:
                raise self._damaged(f"key {key!r:.80} twice")
            metadata[key] = self._value(self._number("I"), key)
        alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise self._damaged(f"general.alignment {alignment!r:.80}")
        found = dict(self._tensor_entry() for _ in range(num_tensors))
        if len(found) < num_tensors:
            raise self._damaged("two tensors of one name")
        begin = -(-self._at // alignment) * alignment
        places = {
            name: TensorPlace(kind, shape, self._path, begin + offset)
            for name, (kind, shape, offset) in found.items()
        }
        self._check_places(places)
        return Header((self._path,), metadata, places)

    def _check_places(self, places: dict[str, TensorPlace]) -> None:
        """Refuse tensors that overlap, which would unpack a small file into any number of them."""
        in_order = sorted(places.items(), key=lambda item: item[1].offset)
        for (name, place), (_, following) in pairwise(in_order):
            if place.offset + place.num_bytes > following.offset:
                raise self._damaged(f"tensor {name} reaches into the one behind it")
        for name, place in in_order[-1:]:
            if place.offset + place.num_bytes > self._size:
                raise self._damaged(
                    f"cut off: tensor {name} ends at byte {place.offset + place.num_bytes:,} of "
                    f"{self._size:,}"
                )

    def _tensor_entry(
        self,
    ) -> tuple[str, tuple[gguf.GGMLQuantizationType, tuple[int, ...], int]]:
        name, num_dimensions = self._text(), self._number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name!r:.80} of {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        code, offset = self._number("I"), self._number("Q")
        try:
            kind = gguf.GGMLQuantizationType(code)
        except ValueError:
            raise self._damaged(f"tensor {name!r:.80} of unknown type {code}") from None
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or shape[-1] % block:
            raise self._damaged(f"tensor {name!r:.80} of shape {list(shape)} in {kind.name}")
        return name, (kind, shape, offset)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _NUMBERS:
            raise self._damaged(f"key {key!r:.80} of unknown type {kind}")
        value = self._number(_NUMBERS[kind])
        return float(str(np.float32(value))) if _NUMBERS[kind] == "f" else value

    def _array(self, key: str) -> Any:
        kind, length = self._number("I"), self._number("Q")
        if kind == _STRING:
            self._num_texts += length
            if self._num_texts > _MAX_TEXTS:
                raise self._damaged(f"key {key!r:.80} is a list of {length:,} texts")
            return [self._text() for _ in range(length)]
        if kind not in _NUMBERS:
            raise self._damaged(f"key {key!r:.80} is a list of type {kind}")
        dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
        data = self._take(length * dtype.itemsize)
        return np.frombuffer(data, dtype)

    def _text(self) -> str:
        data = self._take(self._number("Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged(f"a text that is not UTF-8, {data!r:.40}") from None

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _take(self, num_bytes: int) -> bytes:
        begin, end = self._at, self._at + num_bytes
        if end > self._size:
            raise self._damaged(f"cut off: {num_bytes:,} bytes at byte {begin:,} of {self._size:,}")
        self._at = end
        return self._content[begin:end]

    def _damaged(self, reason: str) -> UserError:
        return _damaged(self._path, reason)


def _damaged(path: Path, reason: str) -> UserError:
    return UserError("damaged GGUF file", f"{path} ({reason})", "fetch it again")
