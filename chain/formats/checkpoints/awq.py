"""AutoAWQ's GEMM format: 4-bit codes in groups of input features, eight to an int32 word.

#   I = in features, O = out features, G = groups of one input row (I / group size)

Source: AutoAWQ 0.2.9, awq/modules/linear/gemm.py and awq/utils/packing_utils.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.readable import alternatives
from polybasic.chain.formats.checkpoints.quantization import BITS, GROUP_SIZE, GROUP_SIZES

PARTS = ("qweight", "qzeros", "scales")
"""A linear's tensors."""
CODES_PER_WORD = 8
NIBBLE_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of word c, counted from the low end, holds output column 8 c + NIBBLE_COLUMNS[i]."""
# PyTorch's int4 kernel for the CPU computes (code - 8) * scale + offset (aten/native/cpu/int4mm)
_CPU_KERNEL_ZERO = 8
_CPU_KERNEL_OUT_MULTIPLE = 16
_SCALE_DTYPES = (torch.float16, torch.bfloat16)  # AutoAWQ writes the first, gptqmodel the second


@dataclass(frozen=True)
class QuantizedWeight:
    """One linear's weight; weight[o, i] = (codes[o, i] - zeros[o, g]) * scales[o, g].

    codes uint8 [O, I] and zeros uint8 [O, G], both 0 to 15; scales float16 or bfloat16 [O, G].
    """

    codes: Tensor
    zeros: Tensor
    scales: Tensor

    @property
    def group_size(self) -> int:
        """Input features that share a zero and a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    @classmethod
    def unpack(
        cls, qweight: Tensor, qzeros: Tensor, scales: Tensor, *, name: str = "linear"
    ) -> "QuantizedWeight":
        """Read the three tensors of a linear.

        Args:
            qweight: int32 [I, O / 8].
            qzeros: int32 [G, O / 8].
            scales: float16 or bfloat16 [G, O].
            name: the linear's name, for errors.

        Raises:
            UserError: a dtype or shape that is not this format's.
        """
        _require_dtype(f"{name}.qweight", qweight, (torch.int32,))
        _require_dtype(f"{name}.qzeros", qzeros, (torch.int32,))
        _require_dtype(f"{name}.scales", scales, _SCALE_DTYPES)
        group_size = group_size_of(qweight, scales, name)
        num_groups, num_words = len(qweight) // group_size, qweight.shape[1]
        if qzeros.shape != (num_groups, num_words):
            raise _malformed(f"{name}.qzeros", qzeros, f"{[num_groups, num_words]}")
        if scales.shape != (num_groups, num_words * CODES_PER_WORD):
            expected = [num_groups, num_words * CODES_PER_WORD]
            raise _malformed(f"{name}.scales", scales, f"{expected}")
        return cls(
            _unpack_words(qweight).t().contiguous(),
            _unpack_words(qzeros).t().contiguous(),
            scales.t().contiguous(),
        )

    @classmethod
    def stack(cls, parts: Sequence["QuantizedWeight"]) -> "QuantizedWeight":
        """Several weights over the same input, side by side in their output features."""
        return cls(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.zeros for part in parts]),
            torch.cat([part.scales for part in parts]),
        )

    def pack(self, name: str = "linear") -> tuple[Tensor, Tensor, Tensor]:
        """The tensors (qweight, qzeros, scales) of this weight, as `unpack` reads them.

        Raises:
            UserError: the output features are no multiple of 8.
        """
        if self.codes.shape[0] % CODES_PER_WORD:
            raise _malformed(f"{name}.weight", self.codes, f"[a multiple of {CODES_PER_WORD}, in]")
        qweight, qzeros = pack_words(self.codes.t()), pack_words(self.zeros.t())
        return qweight, qzeros, self.scales.t().contiguous()


def group_size_of(qweight: Tensor, scales: Tensor, name: str = "linear") -> int:
    """Input features that share a scale, by the tensors of a linear as they are stored.

    Args:
        qweight: [I, O / 8].
        scales: [G, O].
        name: the linear's name, for errors.

    Raises:
        UserError: the inputs are not so many groups of one of `GROUP_SIZES`.
    """
    if scales.dim() != 2:
        raise _malformed(f"{name}.scales", scales, "[groups, out]")
    for group_size in GROUP_SIZES:
        if qweight.dim() == 2 and len(qweight) == group_size * len(scales) > 0:
            return group_size
    inputs = f"{alternatives(GROUP_SIZES)} x {len(scales)} groups"
    raise _malformed(f"{name}.qweight", qweight, f"[{inputs}, out / 8]")


def round_to_nearest(weight: Tensor, group_size: int = GROUP_SIZE) -> QuantizedWeight:
    """A weight [O, I] in 4 bits, each group between its own smallest and largest value.

    Args:
        weight: I is a multiple of the group size.
    """
    groups_OGg = weight.float().unflatten(1, (-1, group_size))
    # zero must be a code
    low, high = groups_OGg.amin(2).clamp(max=0), groups_OGg.amax(2).clamp(min=0)
    scales = ((high - low) / (2**BITS - 1)).clamp(min=1e-5).half()
    zeros = (-low / scales.float()).round().clamp(0, 2**BITS - 1)
    codes = (groups_OGg / scales.float().unsqueeze(2)).round() + zeros.unsqueeze(2)
    codes = codes.clamp(0, 2**BITS - 1).to(torch.uint8).flatten(1)
    return QuantizedWeight(codes, zeros.to(torch.uint8), scales)


def dequantize(weight: QuantizedWeight) -> Tensor:
    """The weight as float32 [O, I]."""
    codes_OGg = weight.codes.float().unflatten(1, (-1, weight.group_size))
    centred = codes_OGg - weight.zeros.float().unsqueeze(2)
    return (centred * weight.scales.float().unsqueeze(2)).flatten(1)


def packed_weight(tensors: Mapping[str, Tensor], linear: str) -> QuantizedWeight:
    """The 4-bit weight of a linear from a checkpoint's tensors.

    Raises:
        UserError: tensors that are not in AutoAWQ's GEMM format.
    """
    packed = (tensors[f"{linear}.{part}"] for part in PARTS)
    return QuantizedWeight.unpack(*packed, name=linear)


def dequantized_tensors(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """A checkpoint's tensors in `dtype`, with a dense weight in place of three packed ones.

    Raises:
        UserError: as `packed_weight`.
    """
    dense = {}
    for name, tensor in tensors.items():
        linear, _, part = name.rpartition(".")
        if part == PARTS[0]:
            dense[f"{linear}.weight"] = dequantize(packed_weight(tensors, linear)).to(dtype)
        elif part not in PARTS:
            dense[name] = tensor.to(dtype)
    return dense


def cpu_int4_weight(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """The operands of `torch.ops.aten._weight_int4pack_mm_for_cpu`.

    The kernel keeps scales and offsets in bfloat16, which moves the weight by less than 0.5 %
    (Frobenius norm): noise beside the 4-bit rounding itself.

    Returns:
        The packed codes uint8 [O, I / 2], and scales with offsets bfloat16 [G, O, 2].

    Raises:
        UserError: the output features are no multiple of 16.
    """
    if weight.codes.shape[0] % _CPU_KERNEL_OUT_MULTIPLE:
        raise UserError(
            "4-bit weight does not fit the CPU kernel",
            f"{weight.codes.shape[0]} output features",
            f"they must be a multiple of {_CPU_KERNEL_OUT_MULTIPLE}",
        )
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
    # offsets follow from the rounded scales, so that a zero weight stays zero up to one rounding
    scales = weight.scales.bfloat16().float()
    offsets = (_CPU_KERNEL_ZERO - weight.zeros.float()) * scales
    scales_and_offsets = torch.stack([scales, offsets], dim=2).transpose(0, 1)
    return packed, scales_and_offsets.contiguous().bfloat16()


def _unpack_words(words: Tensor) -> Tensor:
    """int32 [R, O / 8] -> uint8 [R, O], columns in their order."""
    shifts = torch.arange(0, CODES_PER_WORD * BITS, BITS, dtype=torch.int32, device=words.device)
    nibbles = (words.unsqueeze(2) >> shifts) & (2**BITS - 1)
    columns = torch.empty_like(nibbles, dtype=torch.uint8)
    columns[:, :, NIBBLE_COLUMNS] = nibbles.to(torch.uint8)
    return columns.flatten(1)


def pack_words(codes: Tensor) -> Tensor:
    """uint8 [R, O] -> int32 [R, O / 8]."""
    nibbles = codes.unflatten(1, (-1, CODES_PER_WORD))[:, :, NIBBLE_COLUMNS].int()
    words = torch.zeros_like(nibbles[:, :, 0])
    for index in range(CODES_PER_WORD):
        words |= nibbles[:, :, index] << (index * BITS)
    return words


def _require_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise UserError(
            "not AutoAWQ's GEMM format",
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}",
            f"expected {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}",
        )


def _malformed(name: str, tensor: Tensor, expected: str) -> UserError:
    return UserError(
        "not AutoAWQ's GEMM format",
        f"{name} has shape {list(tensor.shape)}",
        f"expected {expected}",
    )
