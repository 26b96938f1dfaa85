"""Tensors of a checkpoint, one at a time, straight to the device and dtype of their use."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.awq import (
    CODES_PER_WORD,
    PARTS,
    QuantizedWeight,
    group_size_of,
)
from polybasic.chain.formats.checkpoints.block_types import BlockType, typed_name
from polybasic.chain.formats.checkpoints.blocks import BlockWeight
from polybasic.chain.formats.checkpoints.checkpoint import read_tensors, tensor_files
from polybasic.chain.formats.checkpoints.shard import ALL, Partition
from polybasic.chain.kernels.backend import Backend, LayOut
from polybasic.chain.kernels.weights import Embedding, Linear


class StoredTensors:
    """Tensors of one checkpoint by name; a file is mapped only while one of them is read.

    Pages of an open mapping count as resident once they have been read. This way only the converted
    tensors stay resident, plus those that are being converted.

    Args:
        folder: of the checkpoint.
        dtype: of the results.
        device: of the results.

    Raises:
        UserError: no weights, a damaged file, a pickle that holds more than tensors, or a tensor
            in two files.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.folder, self.dtype, self.device = folder, dtype, device
        self._files: dict[str, Path] = {}
        self._blocks: dict[str, BlockType] = {}
        for stored_name, path in tensor_files(folder).items():
            name, blocks = typed_name(stored_name)
            self._files[name] = path
            if blocks is not None:
                self._blocks[name] = blocks

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def has_blocks(self) -> bool:
        """Whether some of them are in the blocks of a GGUF file."""
        return bool(self._blocks)

    def stored(self, name: str) -> Tensor:
        """One tensor as stored: a view of its file's mapping, which it keeps open.

        Of a tensor in blocks it is what these are dequantized to, in the dtype.

        Raises:
            UserError: there is no such tensor.
        """
        (tensor,) = self._stored([name])
        return tensor

    def dense(self, name: str) -> Tensor:
        """One tensor on the device and in the dtype, in memory of its own.

        Raises:
            UserError: there is no such tensor.
        """
        return self.stored(name).to(self.device, self.dtype, copy=True)

    def embedding(self, backend: Backend, name: str) -> Embedding:
        """An embedding, in blocks or not.

        Raises:
            UserError: there is no such tensor.
        """
        if (blocks := self._blocks.get(name)) is None:
            return self.dense(name)
        return backend.embedding(BlockWeight(blocks, *self._read([name])))

    def linear(
        self,
        backend: Backend,
        *names: str,
        lay_out: LayOut | None = None,
        taken: Sequence[Partition] | None = None,
    ) -> Linear:
        """One matrix of several linears of the same input, their outputs concatenated.

        Reads `name.weight` [O, I], in blocks or not, or, if `name.qweight` is stored, AutoAWQ's
        three tensors, and `name.bias` [O] if it is stored.

        Args:
            backend: lays it out.
            lay_out: how, where it is in few bits not yet; default: `backend.dense`.
            taken: which part of each is read; default: all.

        Raises:
            UserError: a tensor is missing or not in AutoAWQ's format.
        """
        taken = taken or [ALL] * len(names)
        bias = None
        if taken[0].has_bias and any(f"{name}.bias" in self for name in names):
            # a copy at once: while a view lives, the file would be mapped twice below
            bias = torch.cat(_outputs(self._read([f"{name}.bias" for name in names]), taken))
            bias = bias.to(self.device, self.dtype)
        if f"{names[0]}.qweight" in self:
            parts = [self._quantized(name, piece) for name, piece in zip(names, taken, strict=True)]
            return backend.int4(QuantizedWeight.stack(parts), bias)
        weights = [f"{name}.weight" for name in names]
        if self._keep_blocks(weights, taken[0].inputs):
            return backend.blocks(self._in_blocks(weights, taken), bias)
        # a backend that lays weights out anew reads them where they are mapped; files whose
        # tensors are joined are not mapped any more by then
        joined = self._concatenated(self._weights(names, taken), backend.keeps_dense)
        return (lay_out or backend.dense)(joined, bias)

    def _keep_blocks(self, names: Sequence[str], inputs: slice | None) -> bool:
        """Whether all of them are in blocks, of which whole ones are taken."""
        sizes = [0 if (kind := self._blocks.get(name)) is None else kind.size for name in names]
        ends = (0, 0) if inputs is None else (inputs.start, inputs.stop)
        return all(size and not any(end % size for end in ends) for size in sizes)

    def _in_blocks(self, names: Sequence[str], taken: Sequence[Partition]) -> list[BlockWeight]:
        """Weights in the order of their names; those of one type in a row become one."""
        stored = zip(names, self._read(names), taken, strict=True)
        return [
            BlockWeight(
                kind, _joined([_rows_of_blocks(rows, kind, piece) for _, rows, piece in group])
            )
            for kind, group in groupby(stored, lambda entry: self._blocks[entry[0]])
        ]

    def _weights(self, names: Sequence[str], taken: Sequence[Partition]) -> list[Tensor]:
        weights = _outputs(self._stored([f"{name}.weight" for name in names]), taken)
        inputs = taken[0].inputs
        return weights if inputs is None else [weight[:, inputs] for weight in weights]

    def _quantized(self, name: str, taken: Partition = ALL) -> QuantizedWeight:
        stored = self._read([f"{name}.{part}" for part in PARTS])
        group_size = group_size_of(stored[0], stored[2], name)
        # inputs of a row, and outputs of a column
        sizes = (1, CODES_PER_WORD), (group_size, CODES_PER_WORD), (group_size, 1)
        qweight, qzeros, scales = (
            _block(part, taken, *size) for part, size in zip(stored, sizes, strict=True)
        )
        return QuantizedWeight.unpack(qweight, qzeros, scales, name=name)

    def _concatenated(self, parts: Sequence[Tensor], is_kept: bool) -> Tensor:
        """Tensors joined along their first dimension; a copy of a single one if it is kept."""
        if len(parts) == 1:
            return parts[0].to(self.device, self.dtype, copy=is_kept)
        num_rows = sum(part.shape[0] for part in parts)
        joined = torch.empty((num_rows, *parts[0].shape[1:]), dtype=self.dtype, device=self.device)
        # torch.cat would need every part in this dtype first, a second copy of all of them
        for part, rows in zip(parts, joined.split([len(part) for part in parts]), strict=True):
            rows.copy_(part)
        return joined

    def _stored(self, names: Sequence[str]) -> list[Tensor]:
        """As `stored`; a file that holds several is mapped once."""
        kinds = map(self._blocks.get, names)
        return [
            tensor if kind is None else BlockWeight(kind, tensor).dequantized(self.dtype)
            for kind, tensor in zip(kinds, self._read(names), strict=True)
        ]

    def _read(self, names: Sequence[str]) -> list[Tensor]:
        keys = {name: f"{name}.{kind.name}" for name, kind in self._blocks.items()}
        for name in names:
            if name not in self:
                raise UserError(
                    "weight missing", f"{name} in {self.folder}", "export the checkpoint again"
                )
        tensors: dict[str, Tensor] = {}
        for path in {self._files[name] for name in names}:
            inside = [keys.get(name, name) for name in names if self._files[name] == path]
            tensors |= read_tensors(path, inside)
        return [tensors[keys.get(name, name)] for name in names]


class GivenTensors(StoredTensors):
    """Tensors in memory, by the names that a checkpoint has for them; none is rounded."""

    def __init__(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype, self.device, self._tensors = dtype, device, tensors
        self._blocks = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def linear(
        self,
        backend: Backend,
        *names: str,
        lay_out: LayOut | None = None,
        taken: Sequence[Partition] | None = None,
    ) -> Linear:
        return super().linear(backend, *names, taken=taken)

    def _read(self, names: Sequence[str]) -> list[Tensor]:
        return [self._tensors[name] for name in names]


def _outputs(stored: Sequence[Tensor], taken: Sequence[Partition]) -> list[Tensor]:
    """The parts of weights [O, I] or biases [O] that are taken of the outputs of each."""
    return [
        tensor if part is None else tensor[part]
        for tensor, piece in zip(stored, taken, strict=True)
        for part in piece.outputs or (None,)
    ]


def _rows_of_blocks(rows_OB: Tensor, blocks: BlockType, taken: Partition) -> Tensor:
    """What is taken of the rows of a tensor in blocks."""
    if taken.inputs is not None:
        ends = _ends(taken.inputs, blocks.size)
        begin, end = (place // blocks.size * blocks.num_bytes for place in ends)
        rows_OB = rows_OB[:, begin:end]
    return _joined(_outputs([rows_OB], [taken]))


def _joined(parts: list[Tensor]) -> Tensor:
    """One after the other; a single one as it is, so that what is mapped is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ends(part: slice, unit: int) -> tuple[int, int]:
    assert part.start % unit == part.stop % unit == 0, f"{part} in units of {unit}"
    return part.start, part.stop


def _block(stored: Tensor, taken: Partition, row_inputs: int, column_outputs: int) -> Tensor:
    """What is taken of a tensor of a 4-bit weight: so many inputs a row and outputs a column."""

    def over(part: slice, size: int) -> slice:
        begin, end = _ends(part, size)
        return slice(begin // size, end // size)

    if taken.inputs is not None:
        stored = stored[over(taken.inputs, row_inputs)]
    if taken.outputs is not None:
        stored = torch.cat([stored[:, over(part, column_outputs)] for part in taken.outputs], 1)
    return stored
