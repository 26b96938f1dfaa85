"""Tensors of a checkpoint, one at a time, straight to the device and dtype of their use."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from polybasic.chain.errors import UserError
from polybasic.chain.formats.awq import QuantizedWeight
from polybasic.chain.formats.checkpoint import read_tensors, tensor_files
from polybasic.chain.kernels.backend import Backend
from polybasic.chain.kernels.weights import Linear


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
        self._files = tensor_files(folder)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def stored(self, name: str) -> Tensor:
        """One tensor as stored: a view of its file's mapping, which it keeps open.

        Raises:
            UserError: there is no such tensor.
        """
        (tensor,) = self._read([name])
        return tensor

    def dense(self, name: str) -> Tensor:
        """One tensor on the device and in the dtype, in memory of its own.

        Raises:
            UserError: there is no such tensor.
        """
        return self.stored(name).to(self.device, self.dtype, copy=True)

    def linear(self, backend: Backend, *names: str, drafts: bool = False) -> Linear:
        """One matrix of several linears of the same input, their outputs concatenated.

        Reads `name.weight` [O, I] or, if `name.qweight` is stored, AutoAWQ's three tensors, and
        `name.bias` [O] if it is stored.

        Args:
            backend: lays it out.
            drafts: whether the matrix only drafts; see `Backend.draft`.

        Raises:
            UserError: a tensor is missing or not in AutoAWQ's format.
        """
        biases = [f"{name}.bias" for name in names]
        has_bias = any(bias in self for bias in biases)
        bias = torch.cat([self.dense(bias) for bias in biases]) if has_bias else None
        if f"{names[0]}.qweight" in self:
            weight = QuantizedWeight.stack([self._quantized(name) for name in names])
            return backend.int4(weight, bias)
        # a backend that lays weights out anew reads them where they are mapped
        joined = self._concatenated([f"{name}.weight" for name in names], backend.keeps_dense)
        return backend.draft(joined, bias) if drafts else backend.dense(joined, bias)

    def _quantized(self, name: str) -> QuantizedWeight:
        parts = (f"{name}.{part}" for part in ("qweight", "qzeros", "scales"))
        return QuantizedWeight.unpack(*self._read(list(parts)), name=name)

    def _concatenated(self, names: Sequence[str], is_kept: bool) -> Tensor:
        """Tensors joined along their first dimension; a copy of a single one if it is kept."""
        parts = self._read(names)
        if len(parts) == 1:
            return parts[0].to(self.device, self.dtype, copy=is_kept)
        num_rows = sum(part.shape[0] for part in parts)
        joined = torch.empty((num_rows, *parts[0].shape[1:]), dtype=self.dtype, device=self.device)
        # torch.cat would need every part in this dtype first, a second copy of all of them
        for part, rows in zip(parts, joined.split([len(part) for part in parts]), strict=True):
            rows.copy_(part)
        return joined

    def _read(self, names: Sequence[str]) -> list[Tensor]:
        for name in names:
            if name not in self:
                raise UserError(
                    "weight missing", f"{name} in {self.folder}", "export the checkpoint again"
                )
        tensors: dict[str, Tensor] = {}
        for path in {self._files[name] for name in names}:
            tensors |= read_tensors(path, [name for name in names if self._files[name] == path])
        return [tensors[name] for name in names]


class GivenTensors(StoredTensors):
    """Tensors in memory, by the names that a checkpoint has for them; none is rounded."""

    def __init__(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype, self.device, self._tensors = dtype, device, tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def linear(self, backend: Backend, *names: str, drafts: bool = False) -> Linear:
        return super().linear(backend, *names)

    def _read(self, names: Sequence[str]) -> list[Tensor]:
        return [self._tensors[name] for name in names]
