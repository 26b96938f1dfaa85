"""A GGUF file as a checkpoint in the cache folder, made once: as it is stored, or dequantized.

#   O = rows of a tensor, B = bytes of a row
"""

import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import torch

from polybasic.chain.base.caching import CACHE_VARIABLE
from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processor import num_cores
from polybasic.chain.base.progress import tracked
from polybasic.chain.base.readable import readable_bytes
from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES, BlockType
from polybasic.chain.formats.checkpoints.config import decoder_config
from polybasic.chain.formats.files import (
    free_bytes,
    sha256_of_file,
    whole_folder,
    write_json,
)
from polybasic.chain.formats.gguf.architectures import ARCHITECTURES
from polybasic.chain.formats.gguf.header import Header, TensorPlace, part_files, read_header
from polybasic.chain.formats.gguf.reading import config_of, places_of
from polybasic.chain.formats.gguf.tensors import (
    TYPES,
    Type,
    has_one_added,
    heads_interleaved,
    separated,
)
from polybasic.chain.formats.gguf.tokenizer import write_tokenizer
from polybasic.chain.formats.kept import MODELS, file_stamp, kept_folder
from polybasic.chain.formats.origin import GGUF_KEY, ORIGIN_KEY

_VERSION = 2
"""Of what is made of a file; raised where the same file gives another checkpoint."""
_CHUNK = 1 << 20
"""Values that are dequantized at a time."""
_SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}

Done = TypeVar("Done")
_log = logging.getLogger(__name__)


class _NotFinite(Exception):
    """A value is infinite, or no number."""


@dataclass(frozen=True)
class _Conversion:
    """What makes rows of a checkpoint of rows of a file.

    Attributes:
        kind: of the file's rows.
        dtype: of the checkpoint's; None keeps the file's blocks.
        shift: added to all values.
    """

    kind: Type
    dtype: torch.dtype | None
    shift: float = 0.0

    def __call__(self, rows_OB: np.ndarray) -> bytes:
        """The bytes of rows; raises `_NotFinite`."""
        if self.dtype is None:
            _check_finite(rows_OB, BLOCK_TYPES[self.kind.name])
            return rows_OB.tobytes()
        values = torch.from_numpy(_dequantized(rows_OB, self.kind))
        if self.shift:
            values = values + self.shift
        values = values.to(self.dtype)
        if not bool(values.isfinite().all()):
            raise _NotFinite
        return values.view(torch.uint8).numpy().tobytes()


def imported(path: Path, as_stored: bool = False) -> Path:
    """The folder of a checkpoint with a GGUF file's weights, made unless it is there.

    A file whose matrices are in float32 or float16 keeps them so; others are dequantized to
    bfloat16. What was made of a file is found again by the file's place, size and time.

    Args:
        path: of the file, or of the first of several parts.
        as_stored: whether matrices keep their blocks where all of them are in `BLOCK_TYPES`.

    Raises:
        UserError: a file that is not read (see `read_header`, `config_of`, `places_of` and
            `write_tokenizer`), values that are no finite numbers, a full disk, or no folder for it.
    """
    files = part_files(path)
    for file in files:
        if not file.is_file():
            raise UserError("GGUF file not found", f"{file}", "check the path")
    made_of = [_VERSION, [file_stamp(file) for file in files], *["as stored"] * as_stored]
    return kept_folder(
        MODELS, path.stem, made_of, lambda folder: _import(read_header(path), folder, as_stored)
    )


def _import(header: Header, folder: Path, as_stored: bool) -> None:
    begun = time.monotonic()
    content = config_of(header)
    places = places_of(header, content)
    _check_types(header, places)
    dtype = _dtype_of(places)
    dtypes: dict[str, torch.dtype | None] = dict.fromkeys(places, dtype)
    if as_stored and all(place.type.name in BLOCK_TYPES for place in _matrices(places)):
        dtypes = {name: _stored_dtype(place) for name, place in places.items()}
    num_bytes = sum(_num_bytes(place, dtypes[name]) for name, place in places.items())
    if num_bytes > (free := free_bytes(folder)):
        raise UserError(
            "disk full",
            f"{header.path} takes {readable_bytes(num_bytes)} in {folder.parent}, "
            f"{readable_bytes(free)} are free",
            f"free some space, or set {CACHE_VARIABLE} to a folder on another disk",
        )
    with whole_folder(folder) as partial, ThreadPoolExecutor(_num_workers()) as pool:
        ends = write_tokenizer(header, content["vocab_size"], partial)
        digests = [pool.submit(sha256_of_file, file) for file in header.files]
        _write_weights(header, content, places, dtypes, partial / "model.safetensors", pool)
        types = Counter(place.type.name for place in places.values())
        source = {
            "files": {
                file.name: digest.result()
                for file, digest in zip(header.files, digests, strict=True)
            },
            "types": dict(types.most_common()),
        }
        content |= {"dtype": str(dtype).removeprefix("torch."), ORIGIN_KEY: {GGUF_KEY: source}}
        write_json(partial / "config.json", content)
        write_json(partial / "generation_config.json", {"eos_token_id": ends})
        state = header.path.stat()
        for path in partial.iterdir():
            # a run that began with these files goes on with them, made anew
            os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    _log.info("read %s in %.1f s into %s", header.path, time.monotonic() - begun, folder)


def _check_types(header: Header, places: dict[str, TensorPlace]) -> None:
    for kind in {place.type for place in places.values()}:
        size = gguf.GGML_QUANT_SIZES[kind][1]
        try:
            _dequantized(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError as error:
            name = next(name for name, place in places.items() if place.type is kind)
            raise UserError(
                "type of weights that is not read",
                f"{header.path} holds {name} in {kind.name}",
                "name a file in another type",
            ) from error


def _matrices(places: dict[str, TensorPlace]) -> list[TensorPlace]:
    return [place for place in places.values() if len(place.shape) > 1]


def _dtype_of(places: dict[str, TensorPlace]) -> torch.dtype:
    """That all values have exactly, where the file's matrices are of one such type."""
    kinds = {place.type for place in _matrices(places)}
    plain = [dtype for dtype, kind in TYPES.items() if kinds == {kind}]
    return plain[0] if plain else torch.bfloat16


def _write_weights(
    header: Header,
    content: dict[str, Any],
    places: dict[str, TensorPlace],
    dtypes: dict[str, torch.dtype | None],
    path: Path,
    pool: ThreadPoolExecutor,
) -> None:
    """Write a file of safetensors, some blocks of rows at a time."""
    decoder = decoder_config(content, str(header.path))
    architecture = ARCHITECTURES[content["model_type"]]
    entries, end = {}, 0
    for name, place in places.items():
        begin, end = end, end + _num_bytes(place, dtype := dtypes[name])
        shape = list(place.shape) if dtype else [place.num_rows, place.row_bytes]
        entries[name if dtype else f"{name}.{place.type.name}"] = {
            "dtype": _SAFETENSORS_DTYPES[dtype or torch.uint8],
            "shape": shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as written:
        written.write(len(text).to_bytes(8, "little") + text)
        for name, place in tracked(list(places.items()), f"reading {header.path.name}"):
            num_heads = heads_interleaved(name, architecture, decoder)
            shift = -1.0 if has_one_added(name, decoder) else 0.0
            convert = _Conversion(place.type, dtypes[name], shift)
            try:
                for data in _in_order(pool, convert, _blocks_of_rows(place, num_heads)):
                    written.write(data)
            except _NotFinite as error:
                raise UserError(
                    "damaged GGUF file",
                    f"{header.path} (tensor {name} holds what is no finite number)",
                    "fetch it again; of one in several pieces, join them in order",
                ) from error


def _stored_dtype(place: TensorPlace) -> torch.dtype | None:
    """Of a tensor of a checkpoint whose matrices are in blocks; None for these."""
    return None if place.type.name in BLOCK_TYPES else torch.float32


def _num_bytes(place: TensorPlace, dtype: torch.dtype | None) -> int:
    """Of a tensor in the checkpoint, as `_Conversion` makes it."""
    return place.num_bytes if dtype is None else place.num_rows * place.shape[-1] * dtype.itemsize


def _check_finite(rows_OB: np.ndarray, kind: BlockType) -> None:
    """Raise `_NotFinite` if a block's constants are no finite numbers."""
    constants = rows_OB.reshape(-1, kind.num_bytes)[:, kind.constants]
    if not np.isfinite(np.ascontiguousarray(constants).view(np.float16)).all():
        raise _NotFinite


def _blocks_of_rows(place: TensorPlace, num_heads: int | None) -> Iterator[np.ndarray]:
    """A tensor's bytes, uint8 [O', B] with as many rows as are dequantized at a time.

    Args:
        num_heads: of rows that llama.cpp has put into another order; None for the others.
    """
    shape = place.num_rows, place.row_bytes
    if num_heads is not None:
        rows = np.fromfile(place.file, np.uint8, place.num_bytes, offset=place.offset)
        yield separated(torch.from_numpy(rows).view(shape), num_heads).contiguous().numpy()
        return
    step = max(1, _CHUNK // place.shape[-1])
    for begin in range(0, place.num_rows, step):
        count = min(step, place.num_rows - begin)
        offset = place.offset + begin * place.row_bytes
        rows = np.fromfile(place.file, np.uint8, count * place.row_bytes, offset=offset)
        yield rows.reshape(count, place.row_bytes)


def _dequantized(rows_OB: np.ndarray, kind: Type) -> np.ndarray:
    """float32 values of rows, flat."""
    # as one row: it takes sixteen at a time, which are few values where rows are short
    return gguf.quants.dequantize(rows_OB.reshape(1, -1), kind).reshape(-1)


def _in_order(
    pool: ThreadPoolExecutor, call: Callable[[np.ndarray], Done], given: Iterable[np.ndarray]
) -> Iterator[Done]:
    """Results in the order of what is given, little of which is under way at a time."""
    running: deque[Future[Done]] = deque()
    for rows in given:
        running.append(pool.submit(call, rows))
        if len(running) > 2 * _num_workers():
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def _num_workers() -> int:
    return min(8, num_cores())
