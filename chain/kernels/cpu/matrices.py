"""Weights in the layout of the native kernels: sixteen outputs side by side.

#   O = out features, B = blocks of 16 outputs, I = in features, G = groups of inputs
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.awq import QuantizedWeight
from polybasic.chain.formats.checkpoints.block_types import GROUP
from polybasic.chain.formats.checkpoints.blocks import BlockWeight
from polybasic.chain.kernels.cpu.library import ELEMENTS, Kernels, address

LANES = 16
_INT4 = 2
_BLOCKS = {4: 3, 5: 4, 6: 5, 8: 6}
"""By bits of a code."""


class MatrixStruct(ctypes.Structure):
    """`Matrix` of source/products/matrix.h."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("group_size", ctypes.c_int32),
        ("zero", ctypes.c_int32),
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rest", ctypes.c_void_p),
    )


class NativeLinear:
    """A product that the native kernels compute: x [R, I] -> [R, O], in the dtype of x.

    The product is batch-invariant: a row's result has the same bits however many rows there are.

    Args:
        shape: O of these tensors, and I.
        tensors: weights, and scales, offsets and factors of codes, as source/products/matrix.h lays
            them out.
        bias: [O] or None.
        rest: further outputs of the same inputs, in other blocks.
    """

    def __init__(
        self,
        kernels: Kernels,
        weight_format: int,
        shape: tuple[int, int],
        tensors: Sequence[Tensor | None],
        bias: Tensor | None,
        group_size: int = 0,
        zero: int = 0,
        rest: "NativeLinear | None" = None,
    ) -> None:
        own, in_size = shape
        self.kernels, self.rest = kernels, rest
        self.shape: tuple[int, int] = (own if rest is None else own + rest.shape[0], in_size)
        self._tensors = [*tensors, *[None] * (4 - len(tensors))]
        self._bias = None if bias is None else _padded(bias.float(), 0).contiguous()
        addresses = [
            None if tensor is None else address(tensor, tensor.dtype) for tensor in self._tensors
        ]
        self.struct: MatrixStruct = MatrixStruct(
            weight_format,
            *self.shape,
            group_size,
            zero,
            *addresses,
            None if self._bias is None else address(self._bias, torch.float32),
            None if rest is None else ctypes.addressof(rest.struct),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All that a product reads, but for the bias."""
        own = [tensor for tensor in self._tensors if tensor is not None]
        return own if self.rest is None else own + self.rest.tensors

    @property
    def num_bytes(self) -> int:
        """Of these tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def __call__(self, x_RI: Tensor, lists: np.ndarray | None = None) -> Tensor:
        """The product.

        Args:
            lists: uint64 [R], where each row's `Shortlist.units` lie: outputs that a row's does not
                have are minus infinity. None computes all.
        """
        x_RI = x_RI.contiguous()
        rows, (out_size, in_size) = x_RI.shape[0], self.shape
        assert x_RI.shape == (rows, in_size), f"{tuple(x_RI.shape)} for {in_size} inputs"
        out = torch.empty(rows, out_size, dtype=x_RI.dtype)
        memory = torch.empty(rows * in_size * 19 // 16 + 3 * LANES)
        self.kernels.library.polybasic_product(
            ctypes.byref(self.struct),
            ELEMENTS[x_RI.dtype],
            address(x_RI, x_RI.dtype),
            address(out, x_RI.dtype),
            rows,
            address(memory, torch.float32),
            None if lists is None else lists.ctypes.data,
            torch.get_num_threads(),
        )
        return out


class NativeEmbedding:
    """The rows of a weight in blocks, in the layout of its product."""

    def __init__(self, linear: NativeLinear, dtype: torch.dtype) -> None:
        self.linear, self.dtype, self.device = linear, dtype, torch.device("cpu")

    def rows(self, token_ids: Tensor) -> Tensor:
        """int64 [R] -> [R, D] in the dtype."""
        token_ids = token_ids.contiguous()
        rows_RD = torch.empty(len(token_ids), self.linear.shape[1])
        self.linear.kernels.library.polybasic_decode_rows(
            ctypes.byref(self.linear.struct),
            address(token_ids, torch.int64),
            len(token_ids),
            address(rows_RD, torch.float32),
        )
        return rows_RD.to(self.dtype)


def dense(kernels: Kernels, weight: Tensor, bias: Tensor | None) -> NativeLinear:
    """Lay out `weight` [O, I], float32 or bfloat16; I is a multiple of 16."""
    out_size, in_size = weight.shape
    blocks_B16I = _padded(weight, 0).unflatten(0, (-1, LANES))
    if weight.dtype == torch.float32:
        laid_out = blocks_B16I.transpose(1, 2)
    else:
        laid_out = blocks_B16I.unflatten(2, (-1, 2)).transpose(1, 2)
    # a copy even if the order happens to be the same: the given tensor is not kept
    laid_out = laid_out.clone(memory_format=torch.contiguous_format)
    return NativeLinear(kernels, ELEMENTS[weight.dtype], (out_size, in_size), (laid_out,), bias)


def int4(kernels: Kernels, weight: QuantizedWeight, bias: Tensor | None) -> NativeLinear:
    """Lay out a 4-bit weight."""
    assert weight.codes.dtype == weight.zeros.dtype == torch.uint8
    out_size, in_size = weight.codes.shape
    # [B, 16, I / 8, low or high half, 4]
    codes = _padded(weight.codes, 0).unflatten(0, (-1, LANES)).unflatten(2, (-1, 2, 4))
    tensors = (
        (codes[:, :, :, 0] | (codes[:, :, :, 1] << 4)).transpose(1, 2).contiguous(),
        _side_by_side(weight.scales.half()),
        _side_by_side(weight.zeros),
    )
    return NativeLinear(kernels, _INT4, (out_size, in_size), tensors, bias, weight.group_size)


def blocks(
    kernels: Kernels, weights: Sequence[BlockWeight], bias: Tensor | None = None
) -> NativeLinear:
    """Lay out weights in GGML's blocks, the outputs of one after those of the other.

    Args:
        weights: all but the last have a multiple of 16 outputs.
    """
    biases = [None] * len(weights)
    if bias is not None:
        biases = list(bias.split([weight.shape[0] for weight in weights]))
    laid_out = None
    for weight, own_bias in zip(reversed(weights), reversed(biases), strict=True):
        assert laid_out is None or weight.shape[0] % LANES == 0, f"{weight.shape[0]} outputs"
        laid_out = _blocks(kernels, weight, own_bias, laid_out)
    assert laid_out is not None
    return laid_out


def _blocks(
    kernels: Kernels, weight: BlockWeight, bias: Tensor | None, rest: NativeLinear | None
) -> NativeLinear:
    kind, (out_size, in_size) = weight.type, weight.shape
    num_blocks, num_groups = -(-out_size // LANES), in_size // GROUP
    scales = torch.empty(num_blocks, in_size // kind.size, LANES, dtype=torch.float16)
    factors = torch.empty(num_blocks, num_groups, 2, LANES, dtype=torch.int8)
    tensors = (
        torch.empty(num_blocks, num_groups, kind.bits, LANES, 4, dtype=torch.uint8),
        scales,
        torch.empty_like(scales) if kind.has_offsets else None,
        factors if kind.factor_bytes else None,
    )
    shape, laid_out = (out_size, in_size), _BLOCKS[kind.bits]
    product = NativeLinear(kernels, laid_out, shape, tensors, bias, GROUP, kind.zero, rest)
    rows_OB = weight.rows.contiguous()
    kernels.library.polybasic_lay_out_blocks(
        ctypes.byref(product.struct),
        address(rows_OB, torch.uint8),
        rows_OB.shape[1],
        torch.get_num_threads(),
    )
    return product


def _side_by_side(tensor: Tensor) -> Tensor:
    """[O, G] as [B, G, 16]."""
    return _padded(tensor, 0).unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()


def _padded(tensor: Tensor, value: float) -> Tensor:
    """`tensor` with its first dimension padded to a multiple of 16."""
    missing = -len(tensor) % LANES
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)])
