"""The native kernels as Python calls them."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from polybasic.chain.kernels.cpu.native import native_library
from polybasic.chain.kernels.cpu.openmp import openmp_functions
from polybasic.chain.kernels.environment import kernels_wanted

_VERSION = 12
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}
"""Element types of source/products/matrix.h and source/passes/decoder.h."""


def address(tensor: Tensor, dtype: torch.dtype) -> int:
    """Where a tensor's numbers lie, for native code, which takes their type and order on trust.

    Raises:
        AssertionError: it is of another dtype, not on the CPU, or not contiguous.
    """
    assert tensor.dtype == dtype, f"{tensor.dtype} where native code reads {dtype}"
    assert tensor.is_cpu, f"a tensor on {tensor.device} for native code"
    assert tensor.is_contiguous(), f"strides {tensor.stride()} of shape {tuple(tensor.shape)}"
    return tensor.data_ptr()


class Located:
    """Where tensors of one dtype and shape lie.

    Attributes:
        address: of a list of their addresses.

    Raises:
        AssertionError: as `address`, or they have several shapes.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.dtype, self.shape = tensors[0].dtype, tensors[0].shape
        assert all(tensor.shape == self.shape for tensor in tensors)
        addresses = [address(tensor, self.dtype) for tensor in tensors]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self.address = ctypes.addressof(self._pointers)


class FixedTensors(tuple[Tensor, ...]):
    """Tensors that stay where they are, so that they are located once.

    Attributes:
        num_source: see `polybasic.chain.kernels.executor.HoldsSource`.
    """

    num_source = 0
    located = cached_property(Located)


def locate(tensors: Sequence[Tensor]) -> Located:
    """Where they lie now."""
    return tensors.located if isinstance(tensors, FixedTensors) else Located(tensors)


@dataclass(frozen=True)
class Kernels:
    """The loaded library, whose functions run on torch's own threads."""

    library: ctypes.CDLL

    def move_rows(self, tensors: Sequence[Tensor], sources: Sequence[int], first: int) -> None:
        """In each tensor [heads, capacity, H], copy rows to the places from `first` on, in place.

        Args:
            sources: ascending, none before the place that it is copied to.
        """
        located = locate(tensors)
        heads, capacity, size = located.shape
        rows = (ctypes.c_int32 * len(sources))(*sources)
        self.library.polybasic_move_rows(
            located.address,
            len(tensors),
            heads,
            capacity,
            size * located.dtype.itemsize,
            rows,
            len(sources),
            first,
        )

    def noise(self, key: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
        """See `polybasic.chain.kernels.noise.gumbel_noise`."""
        if key.ndim == 2:
            each = zip(key, positions.split(1), strict=True)
            return torch.cat([self.noise(own, place, num_tokens) for own, place in each])
        found = torch.empty(len(positions), num_tokens)
        key, positions = key.contiguous(), positions.contiguous()
        self.library.polybasic_noise(
            address(key, torch.int64),
            address(positions, torch.int64),
            len(positions),
            num_tokens,
            address(found, torch.float32),
            torch.get_num_threads(),
        )
        return found

    def draw(
        self, logits: Tensor, warping: Sequence[float], key: Tensor, positions: Sequence[int]
    ) -> list[int]:
        """The token of each row with the largest sum of warped logit and noise; -1 where a logit
        is NaN or infinity.

        Args:
            logits: [R, V].
            warping: temperature, top-k, top-p and min-p, 0 where a step is off; see
                `polybasic.deploy.runtime.rounds.warping`.
            key: as `polybasic.chain.kernels.noise.noise_key` gives it.
            positions: R of them, of the tokens to draw.
        """
        key = key.contiguous()
        places = (ctypes.c_int64 * len(logits))(*positions)
        return self._drawn(logits, warping, address(key, torch.int64), places)

    def most_probable(self, logits: Tensor) -> list[int]:
        """The first token of each row with the largest logit; -1 where a logit is NaN or infinity.

        Args:
            logits: [R, V].
        """
        return self._drawn(logits, [0.0] * 4, None, None)

    def shares(
        self,
        logits: Tensor,
        rows: Sequence[int],
        tokens: Sequence[int],
        warping: Sequence[float] = (0.0,) * 4,
        key: Tensor | None = None,
        positions: Sequence[int] = (),
    ) -> list[float]:
        """The probability of each of the tokens in the softmax of its row.

        Tokens of the row that are too improbable to add a hundredth, all together, are left out.

        Args:
            logits: [R, V].
            key: default: the softmax of the logits; with one that of what `draw` takes the largest
                of, for which `warping` and `positions` are as there.
        """
        logits = (logits if logits.dtype in ELEMENTS else logits.float()).contiguous()
        num, places = len(rows), [positions[row] if positions else 0 for row in rows]
        shares = (ctypes.c_float * num)()
        self.library.polybasic_shares(
            address(logits, logits.dtype),
            ELEMENTS[logits.dtype],
            num,
            logits.shape[1],
            (ctypes.c_float * 4)(*warping),
            None if key is None else address(key, torch.int64),
            *((ctypes.c_int64 * num)(*numbers) for numbers in (places, rows, tokens)),
            shares,
            torch.get_num_threads(),
        )
        return list(shares)

    def _drawn(
        self,
        logits: Tensor,
        warping: Sequence[float],
        key: int | None,
        positions: "ctypes.Array[ctypes.c_int64] | None",
    ) -> list[int]:
        logits = (logits if logits.dtype in ELEMENTS else logits.float()).contiguous()
        num_rows, num_tokens = logits.shape
        tokens = (ctypes.c_int64 * num_rows)()
        self.library.polybasic_draw(
            address(logits, logits.dtype),
            ELEMENTS[logits.dtype],
            num_rows,
            num_tokens,
            (ctypes.c_float * 4)(*warping),
            key,
            positions,
            tokens,
            torch.get_num_threads(),
        )
        return list(tokens)

    def mask(self, logits: Tensor, masks: Tensor) -> None:
        """Minus infinity, in place, where a token's bit is 0.

        Args:
            logits: float32 [R, V].
            masks: int32 [R, ceil(V / 32)], bits of a row from the lowest of its first word on.
        """
        num_rows, num_tokens = logits.shape
        assert masks.shape == (num_rows, -(-num_tokens // 32)), f"masks of shape {masks.shape}"
        self.library.polybasic_mask(
            address(logits, torch.float32), address(masks, torch.int32), num_rows, num_tokens
        )


@lru_cache(maxsize=1)
def load_kernels() -> Kernels | None:
    """The kernels; None if other kernels are wanted or nothing can compile them.

    Raises:
        UserError: POLYBASIC_KERNELS says native and they cannot be had, or is unknown.
    """
    library = native_library()
    if library is None:
        return None
    assert library.polybasic_version() == _VERSION
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.polybasic_use_openmp.argtypes = [pointer] * 3
    library.polybasic_use_openmp(*openmp_functions())
    library.polybasic_new_workspace.restype = pointer
    library.polybasic_new_workspace.argtypes = [pointer, integer]
    library.polybasic_delete_workspace.argtypes = [pointer]
    library.polybasic_pass.argtypes = [pointer, pointer, pointer, integer]
    library.polybasic_drafts.argtypes = [pointer, pointer, integer, pointer, integer]
    library.polybasic_product.argtypes = [
        pointer, integer, pointer, pointer, integer, pointer, pointer, integer
    ]  # fmt: skip
    library.polybasic_lay_out_blocks.argtypes = [pointer, pointer, ctypes.c_int64, integer]
    library.polybasic_decode_rows.argtypes = [pointer, pointer, integer, pointer]
    library.polybasic_noise.argtypes = [pointer, pointer, integer, integer, pointer, integer]
    library.polybasic_draw.argtypes = [
        pointer, integer, integer, integer, pointer, pointer, pointer, pointer, integer
    ]  # fmt: skip
    library.polybasic_shares.argtypes = [
        pointer, integer, integer, integer, *[pointer] * 6, integer
    ]  # fmt: skip
    library.polybasic_mask.argtypes = [pointer, pointer, integer, integer]
    library.polybasic_move_rows.argtypes = [
        pointer, integer, integer, ctypes.c_int64, ctypes.c_int64, pointer, integer, integer
    ]  # fmt: skip
    return Kernels(library)


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """The kernels, if they support this device and dtype.

    Raises:
        UserError: as `load_kernels`.
    """
    if device.type != "cpu" or dtype not in ELEMENTS or kernels_wanted() in ("device", "eager"):
        return None
    return load_kernels()
