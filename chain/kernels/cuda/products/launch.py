"""Launches the product kernels: tiles of the weight, and buffers for results.

#   R = rows (tokens of one pass), I = in features, O = out features
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from polybasic.chain.formats.checkpoints.block_types import DEVICE_STEP
from polybasic.chain.kernels.cuda import KERNEL_DTYPES
from polybasic.chain.kernels.cuda.products.kernels import norm_kernel, product_kernel
from polybasic.chain.kernels.cuda.products.unpacking import (
    dequantize_blocks_kernel,
    dequantize_kernel,
)
from polybasic.chain.kernels.torch.operations import (
    DeviceLinear,
    DeviceWeight,
    JoinedLinear,
    Norm,
    Operations,
)
from polybasic.chain.kernels.torch.packed_blocks import PackedBlocks
from polybasic.chain.kernels.torch.packed_weight import PackedWeight
from polybasic.chain.kernels.weights import Linear

MAX_ROWS = 64
"""Most rows of the kernels; with more, PyTorch's operations keep the tensor cores busy."""
ROWS_OF_KERNELS = (16, 32, 64)
"""Of which kernels are compiled; fewer rows are padded."""
MAX_SPLIT_TILES = 8192
"""Most tiles of a product whose inputs are split."""

_ALIGNED_INPUTS = 8
_WIDE_CAPABILITIES = (9, 10, 11)
_EARLY_CAPABILITY = 9
_NORM_WARPS = 8
_DEQUANTIZED_OUTS = 64


@dataclass(frozen=True)
class Tiling:
    """How programs divide a product.

    Attributes:
        outs: rows of the weight that a program reads, a power of two from 64 on.
        ins: inputs of one step, a power of two; of a packed weight the size of its groups.
        splits: programs that share the inputs of a tile.
        warps: of a program, a multiple of 4.
        stages: steps whose data are in flight at once.
        registers: limit for a thread; None for no limit.
        is_fused: the norm is part of the kernel; else another kernel computes it first.
        is_early: programs begin, and request weights, while the previous kernel ends; on GPUs for
            which `can_begin_early`.
    """

    outs: int
    ins: int
    splits: int = 1
    warps: int = 4
    stages: int = 3
    registers: int | None = None
    is_fused: bool = True
    is_early: bool = False


@dataclass(frozen=True)
class Product:
    """A product with the operations before and after it.

    Attributes:
        x_RI: rows need not be adjacent.
        norm: of the rows; None for none.
        added: contiguous [R, O], added to the product; None for none.
        activation: "silu" or "gelu_pytorch_tanh", applied to the first half of the product, which
            then multiplies the second half; None for none. Never with `added`.
    """

    linear: DeviceLinear
    x_RI: Tensor
    norm: Norm | None = None
    added: Tensor | None = None
    activation: str | None = None

    @property
    def can_launch(self) -> bool:
        """Whether the kernels compute this product."""
        weight = self.linear.weight
        num_rows, in_size = self.x_RI.shape
        if self.x_RI.stride(1) != 1:
            return False
        if not 0 < num_rows <= MAX_ROWS or self.x_RI.dtype not in KERNEL_DTYPES:
            return False
        if isinstance(weight, PackedBlocks):
            return True
        if isinstance(weight, PackedWeight):
            return _is_power_of_2(weight.group_size)
        return weight.dtype == self.x_RI.dtype and in_size % _ALIGNED_INPUTS == 0

    @property
    def can_fuse(self) -> bool:
        """Whether a kernel can multiply by the norm's weights before it knows the norm.

        In float16 the rows times these weights may overflow or lose precision.
        """
        return self.norm is not None and self.x_RI.dtype == torch.bfloat16

    @property
    def num_kernel_rows(self) -> int:
        """R as kernels are compiled for it: the next power of two, at least 16."""
        return max(ROWS_OF_KERNELS[0], triton.next_power_of_2(len(self.x_RI)))

    def computed(self, tiling: Tiling | None) -> Tensor:
        """[R, O], or [R, O / 2] of a gated product, in the dtype of x.

        Args:
            tiling: of the kernel; None leaves the product to PyTorch's operations.
        """
        norm, x_RI = self.norm, self.x_RI
        if tiling is None:
            if self.activation is not None:
                return _MANY_ROWS.gated_product(self.linear, x_RI, norm, self.activation)
            return _MANY_ROWS.product(self.linear, x_RI, norm, self.added)
        if norm is not None and not (tiling.is_fused and self.can_fuse):
            x_RI, norm = normed(x_RI, norm), None
        grid, arguments = replace(self, x_RI=x_RI, norm=norm).arguments(tiling)
        with torch.cuda.device_of(x_RI):
            product_kernel[grid](**arguments)
        out: Tensor = arguments["out_ptr"]
        return out

    def compile(self, tiling: Tiling) -> None:
        """Compile what `computed` launches, unless already done."""
        grid, arguments = self._launched(tiling).arguments(tiling)
        product_kernel.warmup(grid=grid, **arguments)

    def kernel_key(self, tiling: Tiling) -> Hashable:
        """Equal where `compile` compiles the same kernel, as far as sizes are multiples of 16."""
        launched = self._launched(tiling)
        _, arguments = launched.arguments(tiling)
        kinds = {
            name: value.dtype if isinstance(value, Tensor) else value
            for name, value in arguments.items()
            if value is None or isinstance(value, Tensor) or name == name.upper()
        }
        options = tiling.warps, tiling.stages, tiling.registers, len(self.x_RI) == 1
        return self.x_RI.device, *sorted(kinds.items()), *options

    def _launched(self, tiling: Tiling) -> "Product":
        """What the kernel computes; the norm may be another one's."""
        is_fused = tiling.is_fused and self.can_fuse
        return self if is_fused else replace(self, norm=None)

    def arguments(self, tiling: Tiling) -> tuple[tuple[int], dict[str, Any]]:
        """Grid and arguments of `product_kernel`, which then writes `out_ptr`."""
        x_RI, weight, device = self.x_RI, self.linear.weight, self.x_RI.device
        (out_size, in_size), is_gated = self.linear.shape, self.activation is not None
        num_outs, tile_outs = (
            (out_size // 2, tiling.outs // 2) if is_gated else (out_size, tiling.outs)
        )
        num_tiles = triton.cdiv(num_outs, tile_outs)
        parts = tickets = None
        if tiling.splits > 1:
            assert num_tiles <= MAX_SPLIT_TILES, f"{num_tiles} tiles of {tiling.splits} parts"
            part_size = self.num_kernel_rows * (tiling.outs + 1)
            num_parts = num_tiles * tiling.splits
            parts = torch.empty(num_parts * part_size, dtype=torch.float32, device=device)
            tickets = _tickets(device)
        arguments: dict[str, Any] = {
            "x_ptr": x_RI,
            **_weight_arguments(weight, tiling.ins),
            "norm_ptr": None if self.norm is None else _in_words(self.norm.weight),
            "bias_ptr": self.linear.bias,
            "added_ptr": self.added,
            "out_ptr": x_RI.new_empty(len(x_RI), num_outs),
            "parts_ptr": parts,
            "tickets_ptr": tickets,
            "num_rows": len(x_RI),
            "in_size": in_size,
            "out_size": out_size,
            "x_stride": x_RI.stride(0),
            "num_splits": tiling.splits,
            "eps": 0.0 if self.norm is None else self.norm.eps,
            "ROWS": self.num_kernel_rows,
            "OUTS": tiling.outs,
            "INS": tiling.ins,
            "IS_SPLIT": tiling.splits > 1,
            "IS_EVEN": in_size % tiling.ins == 0,
            "IS_NARROW": num_outs < tile_outs,
            "IS_GATED": is_gated,
            "IS_GELU": self.activation == "gelu_pytorch_tanh",
            "IS_ON_GPU": device.type == "cuda",
            "IS_WIDE": _is_wide(device),
            "IS_EARLY": tiling.is_early,
            "STAGES": tiling.stages,
            "num_warps": tiling.warps,
            "num_stages": tiling.stages,
        }
        if tiling.registers is not None:
            arguments["maxnreg"] = tiling.registers
        if tiling.is_early:
            arguments["launch_pdl"] = True
        return (num_tiles * tiling.splits,), arguments


def normed(x_RI: Tensor, norm: Norm) -> Tensor:
    """The norm of each row, computed in float32."""
    num_rows, in_size = x_RI.shape
    out = x_RI.new_empty(num_rows, in_size)
    with torch.cuda.device_of(x_RI):
        norm_kernel[(num_rows,)](
            x_RI,
            norm.weight,
            out,
            in_size,
            x_RI.stride(0),
            norm.eps,
            INS=triton.next_power_of_2(in_size),
            num_warps=_NORM_WARPS,
            **early_launch(x_RI.device),
        )
    return out


def dequantized(weight: PackedWeight | PackedBlocks, dtype: torch.dtype) -> Tensor:
    """`weight.dequantized` in one launch, for a dtype of the kernels."""
    if isinstance(weight, PackedBlocks):
        return dequantized_blocks(weight, dtype)
    (out_size, in_size), device = weight.shape, weight.words.device
    out = torch.empty(out_size, in_size, dtype=dtype, device=device)
    grid = triton.cdiv(out_size, _DEQUANTIZED_OUTS), len(weight.words)
    with torch.cuda.device_of(out):
        dequantize_kernel[grid](
            weight.words,
            weight.groups,
            out,
            out_size,
            in_size,
            OUTS=_DEQUANTIZED_OUTS,
            INS=weight.group_size,
            IS_ON_GPU=device.type == "cuda",
            num_warps=4,
        )
    return out


def dequantized_blocks(
    weight: PackedBlocks, dtype: torch.dtype, outputs: Tensor | None = None
) -> Tensor:
    """`PackedBlocks.dequantized` in one launch, of these outputs int64 [R] or of all."""
    (out_size, in_size), device = weight.shape, weight.words.device
    num_outs = out_size if outputs is None else len(outputs)
    out = torch.empty(num_outs, in_size, dtype=dtype, device=device)
    grid = triton.cdiv(num_outs, _DEQUANTIZED_OUTS), len(weight.words)
    with torch.cuda.device_of(out):
        dequantize_blocks_kernel[grid](
            **_weight_arguments(weight, DEVICE_STEP),
            outputs_ptr=outputs,
            out_ptr=out,
            num_outs=num_outs,
            out_size=out_size,
            in_size=in_size,
            OUTS=_DEQUANTIZED_OUTS,
            IS_ON_GPU=device.type == "cuda",
            num_warps=4,
        )
    return out


class ManyRows(Operations):
    """PyTorch's operations over any number of rows, with packed weights unpacked in one launch."""

    def product(
        self,
        linear: Linear,
        x_RI: Tensor,
        norm: Norm | None = None,
        added: Tensor | None = None,
    ) -> Tensor:
        if isinstance(linear, JoinedLinear):
            return self.joined_product(linear, x_RI, norm, added)
        assert isinstance(linear, DeviceLinear), "weights in the layout of another executor"
        weight, dtype = linear.weight, x_RI.dtype
        if (
            not isinstance(weight, Tensor)
            and dtype in KERNEL_DTYPES
            and _is_power_of_2(weight.group_size)
        ):
            linear = DeviceLinear(dequantized(weight, dtype), linear.bias)
        return super().product(linear, x_RI, norm, added)


_MANY_ROWS = ManyRows()


def _weight_arguments(weight: DeviceWeight, ins: int) -> dict[str, Any]:
    """Those of `product_kernel` that say what a weight is, but for its sizes."""
    found: dict[str, Any] = {
        "weight_ptr": weight, "groups_ptr": None, "high_ptr": None, "constants_ptr": None,
        "GROUP": ins, "BLOCK_BITS": 0, "ZERO": 0, "HAS_OFFSETS": False,
    }  # fmt: skip
    if isinstance(weight, PackedWeight):
        return {**found, "weight_ptr": weight.words, "groups_ptr": weight.groups}
    if isinstance(weight, PackedBlocks):
        kind = weight.type
        return {
            "weight_ptr": weight.words,
            "groups_ptr": weight.factors,
            "high_ptr": weight.high,
            "constants_ptr": weight.constants,
            "GROUP": weight.group_size,
            "BLOCK_BITS": kind.bits,
            "ZERO": kind.zero_code,
            "HAS_OFFSETS": kind.has_offsets,
        }
    return found


def _in_words(weight: Tensor) -> Tensor:
    return weight if weight.dtype == torch.float32 else weight.view(torch.int32)


@cache
def _tickets(device: torch.device) -> Tensor:
    """Zeros, restored by every launch; launches follow one another on a stream."""
    with torch.inference_mode(False):
        return torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)


@cache
def _is_wide(device: torch.device) -> bool:
    """Whether the tensor cores read rows from shared memory; assumed in the interpreter."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device)[0] in _WIDE_CAPABILITIES


def can_begin_early(device: torch.device) -> bool:
    """Whether a GPU can start a kernel before the previous one has ended."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] >= _EARLY_CAPABILITY


def early_launch(device: torch.device) -> dict[str, bool]:
    """Options of a kernel that begins early wherever that can be."""
    return (
        {"IS_EARLY": True, "launch_pdl": True} if can_begin_early(device) else {"IS_EARLY": False}
    )


def _is_power_of_2(number: int) -> bool:
    return number & (number - 1) == 0
