"""Tensor headers of weight files, and what a config says that they must hold. No torch in here.

Shape legend: V vocabulary, D tokens that a head can draft, H hidden size.
"""

from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.block_types import typed_name
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors, weight_files
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig, HeadConfig, Shape
from polybasic.chain.formats.checkpoints.kinds import Kind, is_head
from polybasic.chain.formats.checkpoints.names import (
    DRAFT_TABLES,
    LM_HEAD,
    T5_BIAS,
    T5_ENCODER,
    encoder_linears,
    encoder_norms,
    has_lm_head,
    layer_norms,
    linear_shapes,
    model_names,
    required_biases,
)
from polybasic.chain.formats.files import parse_json
from polybasic.chain.formats.head_kinds.kind import HeadKind
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS

_MAX_HEADER_BYTES = 100_000_000
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I32": "int32", "I64": "int64"}


@dataclass(frozen=True)
class TensorHeader:
    """What a file says about one tensor; of one in blocks its dtype is the type of these."""

    dtype: str
    shape: Shape
    num_bytes: int


def tensor_headers(folder: Path) -> dict[str, TensorHeader]:
    """Headers of all tensors of a checkpoint; safetensors are not read beyond their header.

    Raises:
        UserError: no weights, or a damaged file.
    """
    headers: dict[str, TensorHeader] = {}
    files = weight_files(folder)
    if files[0].suffix != ".safetensors":
        return {
            name: TensorHeader(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), size)
            for name, tensor in load_tensors(folder).items()
            for size in [tensor.numel() * tensor.element_size()]
        }
    for path in files:
        headers.update(_safetensors_headers(path))
    return headers


def main_dtype(headers: dict[str, TensorHeader]) -> str:
    """The dtype that most of the bytes have."""
    num_bytes: dict[str, int] = {}
    for header in headers.values():
        num_bytes[header.dtype] = num_bytes.get(header.dtype, 0) + header.num_bytes
    return max(num_bytes, key=lambda dtype: num_bytes[dtype])


def num_parameters(headers: dict[str, TensorHeader]) -> int:
    """How many weights a checkpoint has; eight to a packed int32.

    Quantization scales and the tables of a draft vocabulary are none.
    """
    total = 0
    for name, header in headers.items():
        if name.endswith(".qweight"):
            total += 8 * prod(header.shape)
        elif not name.endswith((".qzeros", ".scales")) and name not in DRAFT_TABLES:
            total += prod(header.shape)
    return total


def check_shapes(
    kind: Kind, folder: Path, config: DecoderConfig, group_size: int | None = None
) -> None:
    """Compare every tensor that the runtime reads with what `config` implies.

    Args:
        kind: which layout of names; a head's config is a `HeadConfig`.
        folder: the checkpoint.
        config: of the same folder.
        group_size: rows of one 4-bit scale; only for kind "awq".

    Raises:
        UserError: a tensor is missing or has another shape (both shapes are named).
    """
    headers = tensor_headers(folder)
    assert (kind == "awq") == (group_size is not None), "4-bit checkpoints have a group size"
    for name, expected in expected_shapes(kind, config, group_size, headers.keys()):
        if name not in headers:
            raise UserError(
                "missing tensor", f"{name} in {folder}", "fetch or write the checkpoint again"
            )
        if (found := headers[name].shape) != expected:
            raise UserError(
                "tensor shape mismatch",
                f"{name} in {folder} is {list(found)}, by its config.json {list(expected)}",
                "weights and config are of two models: fetch both again",
            )


def expected_shapes(
    kind: Kind, config: DecoderConfig, group_size: int | None, stored: Set[str]
) -> Iterator[tuple[str, Shape]]:
    """Name and shape of every tensor that the runtime reads of a checkpoint.

    Args:
        kind, config, group_size: as `check_shapes`.
        stored: names that the checkpoint has; they decide on biases that may be left out, and on
            the tables of a draft vocabulary that is a whole one.
    """
    if is_head(kind):
        assert isinstance(config, HeadConfig), "a head's config says what it can draft"
        head = HEAD_KINDS[kind]
        if head.layer is not None and head.has_embedding:
            yield "embed_tokens.weight", (config.vocab_size, config.hidden_size)
        yield from _head_shapes(head, config, stored)
        for number, layer in enumerate(head.layers(config)):
            yield from _layer_shapes(head.like(number), config, f"{layer}.", None, (), stored)
        return
    V, H = config.vocab_size, config.hidden_size
    names = model_names(config)
    yield names.embedding, (V, H)
    yield names.norm, (H,)
    if has_lm_head(config, stored):
        yield LM_HEAD, (V, H)
    required = required_biases(config)
    for index in range(config.num_layers):
        prefix = f"{names.layer.format(index)}."
        yield from _layer_shapes(kind, config, prefix, group_size, required, stored)
    yield from encoder_shapes(config)


def encoder_shapes(config: DecoderConfig) -> Iterator[tuple[str, Shape]]:
    """As `expected_shapes`, of an encoder and of the relative distances of both; none without."""
    encoder = config.encoder
    if encoder is None:
        return
    yield T5_ENCODER.norm, (config.hidden_size,)
    for names in (T5_ENCODER, model_names(config)):
        first = names.layer.format(0)
        yield T5_BIAS.format(first), (encoder.num_buckets, config.num_heads)
    parts = dict(encoder_norms(config).values())
    for linears in encoder_linears(config).values():
        parts |= linears
    for index in range(encoder.num_layers):
        for name, shape in parts.items():
            yield f"{T5_ENCODER.layer.format(index)}.{name}.weight", shape


def _head_shapes(
    kind: HeadKind, config: HeadConfig, stored: Set[str]
) -> Iterator[tuple[str, Shape]]:
    """All of a head but its layers and its copy of the embedding."""
    V, D = config.vocab_size, config.num_draft_tokens
    for name, shape in kind.tensors(config).items():
        yield name, shape
        bias = f"{name.removesuffix('weight')}bias"
        if len(shape) == 2 and bias in stored:
            yield bias, shape[:1]
    if D < V or stored & {*DRAFT_TABLES}:
        yield from zip(DRAFT_TABLES, ((D,), (V,)), strict=True)


def _layer_shapes(
    kind: Kind,
    config: DecoderConfig,
    prefix: str,
    group_size: int | None,
    required_biases: Collection[str],
    stored: Set[str],
) -> Iterator[tuple[str, Shape]]:
    for name, shape in layer_norms(config, kind).values():
        yield f"{prefix}{name}.weight", shape
    for name, shape in linear_shapes(config, kind).items():
        has_bias = name in required_biases or f"{prefix}{name}.bias" in stored
        yield from _linear_shapes(f"{prefix}{name}", shape, group_size, has_bias)


def _linear_shapes(
    name: str, shape: Shape, group_size: int | None, has_bias: bool
) -> Iterator[tuple[str, Shape]]:
    """Tensors of one linear, in 4 bits with so many rows a scale, dense for None."""
    out_size, in_size = shape
    if group_size is None:
        yield f"{name}.weight", shape
    else:
        yield f"{name}.qweight", (in_size, out_size // 8)
        yield f"{name}.qzeros", (in_size // group_size, out_size // 8)
        yield f"{name}.scales", (in_size // group_size, out_size)
    if has_bias:
        yield f"{name}.bias", (out_size,)


def _safetensors_headers(path: Path) -> dict[str, TensorHeader]:
    """Read the JSON header: 8 bytes of length (little endian), then the JSON itself."""
    file_bytes = path.stat().st_size
    with path.open("rb") as content:
        header_bytes = int.from_bytes(content.read(8), "little")
        if file_bytes < 8 or header_bytes > min(file_bytes - 8, _MAX_HEADER_BYTES):
            raise _damaged(path, "no safetensors header")
        entries = parse_json(content.read(header_bytes), "safetensors header", str(path))
        try:
            entries.pop("__metadata__", None)
            headers = dict(_header(name, entry) for name, entry in entries.items())
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise _damaged(path, "malformed safetensors header") from error
    if 8 + header_bytes + end != file_bytes:
        expected = 8 + header_bytes + end
        raise _damaged(path, f"{file_bytes} bytes, its header says {expected}")
    return headers


def _header(stored_name: str, entry: Mapping[str, Any]) -> tuple[str, TensorHeader]:
    """A tensor's name and header, from its entry in a file of safetensors."""
    begin, end = entry["data_offsets"]
    name, blocks = typed_name(stored_name)
    dtype, shape = _DTYPES.get(entry["dtype"], entry["dtype"]), tuple(map(int, entry["shape"]))
    if blocks is not None:
        num_rows, row_bytes = shape
        dtype, shape = blocks.name, (num_rows, row_bytes // blocks.num_bytes * blocks.size)
    return name, TensorHeader(dtype, shape, end - begin)


def _damaged(path: Path, reason: str) -> UserError:
    return UserError("damaged weight file", f"{path} ({reason})", "fetch or write it again")
