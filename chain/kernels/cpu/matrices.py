"""Weights in the layout of the native kernels: sixteen outputs side by side.

#   O = out features, B = blocks of 16 outputs, I = in features, G = groups of inputs
#   L = words that have an output's codes of a group
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from polybasic.chain.formats.awq import QuantizedWeight
from polybasic.chain.formats.block_types import GROUP
from polybasic.chain.formats.blocks import BlockWeight
from polybasic.chain.kernels.cpu.library import ELEMENTS, Kernels, address

LANES = 16
_INT4 = 2
_BLOCKS = {4: 3, 5: 4, 6: 5, 8: 6}
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
        ("factors", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rest", ctypes.c_void_p),
    )


class NativeLinear:
    """A product that the native kernels compute: x [R, I] -> [R, O], in the dtype of x.

    The product is batch-invariant: a row's result has the same bits however many rows there are.

    Args:
        shape: O of these tensors, and I.
        tensors: weights, and scales, offsets and factors of codes, as source/matrix.h lays them
            out.
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
        self.own_tensors = [*tensors, *[None] * (4 - len(tensors))]
        self._bias = None if bias is None else _padded(bias.float(), 0).contiguous()
        addresses = [None if one is None else address(one, one.dtype) for one in self.own_tensors]
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
        own = [tensor for tensor in self.own_tensors if tensor is not None]
        return own if self.rest is None else own + self.rest.tensors

    def __call__(self, x_RI: Tensor) -> Tensor:
        x_RI = x_RI.contiguous()
        rows, (out_size, in_size) = len(x_RI), self.shape
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
            torch.get_num_threads(),
        )
        return out


class NativeEmbedding:
    """The rows of a weight in blocks, in the layout of its product."""

    def __init__(self, linear: NativeLinear, weight: BlockWeight, dtype: torch.dtype) -> None:
        self.linear, self.dtype, self.device = linear, dtype, torch.device("cpu")
        self._type = weight.type
        self._of_lanes = [  # [B, 16, ...]
            None if one is None else one.movedim(3 if one.dim() > 3 else 2, 1)
            for one in linear.own_tensors
        ]

    def rows(self, token_ids: Tensor) -> Tensor:
        """int64 [R] -> [R, D] in the dtype."""
        words, scales, offsets, factors = (
            None if one is None else one[token_ids // LANES, token_ids % LANES]
            for one in self._of_lanes
        )
        assert words is not None
        assert scales is not None
        codes = _codes(words, self._type.bits)
        return BlockWeight(self._type, codes, scales, offsets, factors).dequantized(self.dtype)


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
    tensors = (
        _side_by_side(_words(weight.codes, 4)),
        _side_by_side(weight.scales.float()),
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
    sizes = [len(weight.codes) for weight in weights]
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    laid_out = None
    for weight, own_bias in zip(reversed(weights), reversed(biases), strict=True):
        assert laid_out is None or len(weight.codes) % LANES == 0, f"{sizes} outputs"
        kind = weight.type
        constants = (weight.scales, weight.offsets, weight.factors)
        tensors = [
            None if tensor is None else _side_by_side(tensor)
            for tensor in (_words(weight.codes, kind.bits), *constants)
        ]
        shape = len(weight.codes), weight.codes.shape[1]
        laid_out = NativeLinear(
            kernels, _BLOCKS[kind.bits], shape, tensors, own_bias, GROUP, kind.zero, laid_out
        )
    assert laid_out is not None
    return laid_out


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes [O, I] as bytes [O, G, L, 4] of words, in the order that source/matrix.h says."""
    groups_OGi = codes.unflatten(1, (-1, GROUP))
    if bits == 8:
        return groups_OGi.unflatten(2, (-1, 4))
    low_OGw24 = (groups_OGi & 15).unflatten(2, (4, 2, 4))
    words = low_OGw24[..., 0, :] | low_OGw24[..., 1, :] << 4
    if bits == 4:
        return words
    # those of a word lie above one another
    above_OGhk4 = (groups_OGi >> 4).unflatten(2, (bits - 4, -1, 4))
    high = sum(above_OGhk4[..., k, :] << k * (bits - 4) for k in range(above_OGhk4.shape[3]))
    return torch.cat([words, high], dim=2)


def _codes(words_OGL4: Tensor, bits: int) -> Tensor:
    """The inverse of `_words`."""
    if bits == 8:
        return words_OGL4.flatten(1)
    low = torch.stack([words_OGL4[:, :, :4] & 15, words_OGL4[:, :, :4] >> 4], dim=3).flatten(2)
    if bits == 4:
        return low.flatten(1)
    above, step = words_OGL4[:, :, 4:], bits - 4
    high = torch.stack([above >> shift & (1 << step) - 1 for shift in range(0, 8, step)], dim=3)
    return (low | high.flatten(2) << 4).flatten(1)


def _side_by_side(tensor: Tensor) -> Tensor:
    """[O, N] as [B, N, 16], [O, N, 2] as [B, N, 2, 16], [O, N, L, 4] as [B, N, L, 16, 4]."""
    lanes = _padded(tensor, 0).unflatten(0, (-1, LANES))
    return lanes.movedim(1, 3 if tensor.dim() > 2 else 2).contiguous()


def _padded(tensor: Tensor, value: float) -> Tensor:
    """`tensor` with its first dimension padded to a multiple of 16."""
    missing = -len(tensor) % LANES
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)])
