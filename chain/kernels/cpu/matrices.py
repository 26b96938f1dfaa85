"""Weights in the layout of the native kernels: sixteen outputs side by side.

#   O = out features, B = blocks of 16 outputs, I = in features, G = groups of inputs
"""

import ctypes

import torch
from torch import Tensor

from polybasic.chain.formats.awq import QuantizedWeight
from polybasic.chain.formats.block_types import BLOCK
from polybasic.chain.formats.blocks import BlockWeight
from polybasic.chain.kernels.cpu.library import ELEMENTS, Kernels, address

LANES = 16
_INT4 = 2
_BLOCKS = {4: 3, 8: 4}
"""By bits of a code."""


class MatrixStruct(ctypes.Structure):
    """`Matrix` of source/matrix.h."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("group_size", ctypes.c_int32),
        ("zero", ctypes.c_int32),
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class NativeLinear:
    """A product that the native kernels compute: x [R, I] -> [R, O], in the dtype of x.

    The product is batch-invariant: a row's result has the same bits however many rows there are.

    Args:
        tensors: weights, and scales and offsets of codes, as source/matrix.h lays them out.
        bias: [O] or None.
    """

    def __init__(
        self,
        kernels: Kernels,
        weight_format: int,
        shape: tuple[int, int],
        tensors: tuple[Tensor, ...],
        bias: Tensor | None,
        group_size: int = 0,
        zero: int = 0,
    ) -> None:
        self.kernels, self.shape = kernels, shape
        self.tensors = tensors
        self._bias = None if bias is None else _padded(bias.float(), 0).contiguous()
        addresses = [address(tensor, tensor.dtype) for tensor in tensors]
        pointers = [*addresses, *[None] * (3 - len(tensors))]
        bias_pointer = None if self._bias is None else address(self._bias, torch.float32)
        self.struct = MatrixStruct(weight_format, *shape, group_size, zero, *pointers, bias_pointer)

    def __call__(self, x_RI: Tensor) -> Tensor:
        x_RI = x_RI.contiguous()
        rows, (out_size, in_size) = len(x_RI), self.shape
        assert x_RI.shape == (rows, in_size), f"{tuple(x_RI.shape)} for {in_size} inputs"
        out = torch.empty(rows, out_size, dtype=x_RI.dtype)
        memory = torch.empty(rows * in_size * 9 // 8 + 2 * LANES)
        self.kernels.library.polybasic_product(
            ctypes.byref(self.struct),
            ELEMENTS[x_RI.dtype],
            address(x_RI, x_RI.dtype),
            address(out, x_RI.dtype),
            rows,
            address(memory, torch.float32),
            torch.get_num_threads(),
        )
        return out


class NativeEmbedding:
    """The rows of a weight in blocks, in the layout of its product."""

    def __init__(self, linear: NativeLinear, weight: BlockWeight, dtype: torch.dtype) -> None:
        self.linear, self.dtype, self.device = linear, dtype, torch.device("cpu")
        self._type = weight.type

    def rows(self, token_ids: Tensor) -> Tensor:
        """int64 [R] -> [R, D] in the dtype."""
        blocks, lanes = token_ids // LANES, token_ids % LANES
        codes, scales, *offsets = (tensor[blocks, :, lanes] for tensor in self.linear.tensors)
        if self._type.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=2)
        weight = BlockWeight(self._type, codes.flatten(1), scales, offsets[0] if offsets else None)
        return weight.dequantized(self.dtype)


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
    """Lay out a 4-bit weight, whose groups hold a multiple of 16 inputs."""
    assert weight.codes.dtype == weight.zeros.dtype == torch.uint8
    out_size, in_size = weight.codes.shape
    tensors = (
        _four_bits(weight.codes),
        _side_by_side(weight.scales.float()),
        _side_by_side(weight.zeros),
    )
    return NativeLinear(kernels, _INT4, (out_size, in_size), tensors, bias, weight.group_size)


def blocks(kernels: Kernels, weight: BlockWeight, bias: Tensor | None) -> NativeLinear:
    """Lay out a weight in GGML's blocks."""
    out_size, in_size = weight.codes.shape
    bits = weight.type.bits
    codes = (
        _four_bits(weight.codes) if bits == 4 else _side_by_side(weight.codes.unflatten(1, (-1, 4)))
    )
    tensors = [codes, _side_by_side(weight.scales)]
    if weight.offsets is not None:
        tensors.append(_side_by_side(weight.offsets))
    return NativeLinear(
        kernels, _BLOCKS[bits], (out_size, in_size), tuple(tensors), bias, BLOCK, weight.type.zero
    )


def _four_bits(codes: Tensor) -> Tensor:
    """Codes uint8 [O, I] as [B, I / 8, 16, 4]."""
    # [B, 16, I / 8, low or high half, 4]
    codes = _padded(codes, 0).unflatten(0, (-1, LANES)).unflatten(2, (-1, 2, 4))
    return (codes[:, :, :, 0] | (codes[:, :, :, 1] << 4)).transpose(1, 2).contiguous()


def _side_by_side(tensor: Tensor) -> Tensor:
    """[O, N, ...] as [B, N, 16, ...]."""
    return _padded(tensor, 0).unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()


def _padded(tensor: Tensor, value: float) -> Tensor:
    """`tensor` with its first dimension padded to a multiple of 16."""
    missing = -len(tensor) % LANES
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)])
