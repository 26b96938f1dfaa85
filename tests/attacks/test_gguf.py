"""GGUF files that nobody vouches for: refused in a line, at once, in little memory."""

import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from polybasic.chain.formats.gguf.header import read_header
from polybasic.chain.formats.gguf.importing import imported
from tests.attacks import outcomes

SECONDS = 1.0
MEMORY_BYTES = 64 << 20
"""That reading a header may add; the files here are smaller by far."""
HUGE = 2**63
F32, Q4_K = (int(gguf.GGMLQuantizationType[name]) for name in ("F32", "Q4_K"))


def text(content: bytes | str, length: int | None = None) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(data) if length is None else length) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, length: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, length) + content


def tensor(name: str, shape: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def file(
    keys: list[bytes] = [],  # noqa: B006  never changed
    tensors: list[bytes] = [],  # noqa: B006
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: bytes = bytes(4096),
) -> bytes:
    """The bytes of a file; `counts` are what it says of tensors and keys."""
    counts = counts or (len(tensors), len(keys))
    begin = b"GGUF" + struct.pack("<IQQ", version, *counts)
    return begin + b"".join(keys) + b"".join(tensors) + data


STRING, ARRAY, UINT32, UINT8 = 8, 9, 4, 0
ARCHITECTURE = key("general.architecture", STRING, text("llama"))
HEADERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file"),
    "another format": (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
    "magic alone": (b"GGUF", "damaged GGUF file"),
    "first version": (file(version=1), "GGUF file of another version"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF file of another version"),
    "2^63 tensors": (file(counts=(HUGE, 0)), "damaged GGUF file"),
    "2^63 keys": (file(counts=(0, HUGE)), "damaged GGUF file"),
    "more keys than it holds": (file([ARCHITECTURE], counts=(0, 60_000)), "damaged GGUF file"),
    "a key of 2^63 bytes": (file([text("a", HUGE)]), "cut off"),
    "a text of 2^64 - 1 bytes": (file([key("a", STRING, text("a", 2**64 - 1))]), "cut off"),
    "a list of 2^63 bytes": (file([key("a", ARRAY, array(UINT8, HUGE))]), "cut off"),
    "a list of 2^62 numbers": (file([key("a", ARRAY, array(12, 2**62))]), "cut off"),
    "a list of 2^63 texts": (file([key("a", ARRAY, array(STRING, HUGE))]), "a list of"),
    "a list of 2 million texts": (
        file([key("a", ARRAY, array(STRING, 2_000_000))], data=bytes(1 << 20)),
        "cut off",
    ),
    "lists in lists": (
        file([key("a", ARRAY, array(ARRAY, 1, array(ARRAY, 1, array(ARRAY, 1))))]),
        "a list of type 9",
    ),
    "a key twice": (file([ARCHITECTURE, ARCHITECTURE]), "key 'general.architecture' twice"),
    "an unknown type": (file([key("a", 77, b"")]), "unknown type 77"),
    "no UTF-8": (file([key("a", STRING, text(b"\xff\xfe"))]), "not UTF-8"),
    "control characters": (file([key("\x1b[2J\n", 99, b"")]), "unknown type 99"),
    "an alignment of 0": (
        file([key("general.alignment", UINT32, struct.pack("<I", 0))]),
        "general.alignment 0",
    ),
    "an alignment of a text": (
        file([key("general.alignment", STRING, text("32"))]),
        "general.alignment '32'",
    ),
    "parts that are texts": (
        file([key("split.no", STRING, text("x"))]),
        "malformed GGUF file",
    ),
    "a tensor of 2^63 values": (file(tensors=[tensor("a", (HUGE, 2))]), "cut off"),
    "a tensor of 2^128 values": (file(tensors=[tensor("a", (2**63, 2**63, 4))]), "cut off"),
    "a tensor of no values": (file(tensors=[tensor("a", (4, 0))]), "of shape [0, 4]"),
    "a tensor of 2^31 dimensions": (
        file(tensors=[text("a") + struct.pack("<I", 2**31)]),
        "dimensions",
    ),
    "an offset past the end": (file(tensors=[tensor("a", (4,), F32, HUGE)]), "cut off"),
    "data past the end": (file(tensors=[tensor("a", (4096,), F32, 0)]), "cut off"),
    "half a block": (file(tensors=[tensor("a", (128,), Q4_K)]), "of shape [128] in Q4_K"),
    "an unknown type of weights": (file(tensors=[tensor("a", (4,), 999)]), "unknown type 999"),
    "a tensor twice": (file(tensors=[tensor("a", (4,)), tensor("a", (4,))]), "of one name"),
    "a thousand tensors in the same bytes": (
        file(tensors=[tensor(f"t{number}", (1000,)) for number in range(1000)]),
        "reaches into the one behind it",
    ),
}


def of_reading(path: Path, read: Callable[[Path], object], content: bytes) -> str:
    """The line of the refusal, which came in time and in little memory."""
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.monotonic()
    line = outcomes.of_call(lambda: read(path))
    assert time.monotonic() - begun < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY_BYTES
    assert line is not None
    assert str(path) in line
    return line


@pytest.mark.parametrize(("content", "expected"), HEADERS.values(), ids=HEADERS)
def test_a_malformed_header_is_refused(content: bytes, expected: str, tmp_path: Path) -> None:
    assert expected in of_reading(tmp_path / "model.gguf", read_header, content)


@pytest.mark.parametrize(
    ("keys", "tensors", "expected"),
    [
        ([], [], "general.architecture is missing"),
        ([key("general.architecture", UINT32, struct.pack("<I", 1))], [], "is 1, expected a text"),
        ([key("general.architecture", STRING, text("mamba"))], [], "unsupported architecture"),
        (
            [ARCHITECTURE, key("llama.expert_count", UINT32, struct.pack("<I", 8))],
            [],
            "a mixture of 8 experts",
        ),
        (
            [
                ARCHITECTURE,
                key("llama.embedding_length", UINT32, struct.pack("<I", 2**31)),
                key("llama.attention.head_count", UINT32, struct.pack("<I", 1)),
            ],
            [],
            "missing tensor: token_embd.weight",
        ),
        (
            [
                ARCHITECTURE,
                key("llama.embedding_length", UINT32, struct.pack("<I", 4)),
                key("llama.attention.head_count", ARRAY, array(UINT32, 0)),
            ],
            [],
            "head_count is a list of 0, expected a whole number",
        ),
    ],
)
def test_a_header_of_no_model_is_refused(
    keys: list[bytes], tensors: list[bytes], expected: str, tmp_path: Path
) -> None:
    assert expected in of_reading(tmp_path / "model.gguf", imported, file(keys, tensors))


def test_two_million_keys_and_texts_are_not_read_to_the_end(tmp_path: Path) -> None:
    """Files that are as long as what they say of themselves."""
    texts = key("a", ARRAY, array(STRING, 3_000_000, bytes(24_000_000)))
    assert "a list of 3,000,000 texts" in of_reading(
        tmp_path / "a.gguf", read_header, file([texts])
    )
    keys = b"".join(key(f"{number:06}", 7, b"\0") for number in range(70_000))
    content = file([keys], counts=(0, 70_000))
    assert "70,000 keys" in of_reading(tmp_path / "b.gguf", read_header, content)


def test_a_file_that_was_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """Whatever is left of it: no byte can be missing."""
    path = tmp_path / "whole.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("token_embd.weight", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = path.read_bytes()
    assert read_header(path).tensors
    for end in range(0, len(whole), 7):
        line = of_reading(tmp_path / "cut.gguf", read_header, whole[:end])
        assert line.startswith(("damaged GGUF file", "not a GGUF file")), end
