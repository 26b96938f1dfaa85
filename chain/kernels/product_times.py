"""Which dtypes PyTorch multiplies fast here: measured once on each CPU, then remembered.

A processor without instructions for bfloat16 or float16 takes several times as long for a product
in them as in float32, and tens of times for the products of a backward pass. What computes in
PyTorch asks here; the native kernels have products of their own (`chain/kernels/cpu/`).
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from polybasic.chain.base.caching import cache_folder, read_cached, write_cached
from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processor import processor_flags
from polybasic.chain.formats.files import read_json, sha256_of_object
from polybasic.chain.kernels.environment import TIMES_VARIABLE, times_given

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""That weights are stored in, by name."""

_ROWS, _IN_SIZE, _OUT_SIZE = 128, 256, 768
_PASS_OPERATIONS = 2 * _ROWS * _IN_SIZE * _OUT_SIZE
_TIMED_SECONDS = 0.02
"""Of repeated calls of one product; a call that takes longer is not repeated."""
_SLOW_RATIO = 2.0
"""A forward product that takes this many times as long as in float32 is slow. Below that, the half
of the bytes that weights in two bytes take can still pay."""
_TRAINING_RATIO = 0.8
"""Of float32's time, what products in bfloat16 may take to be trained in: casts take time too."""
_CPU = torch.device("cpu")
_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables by which PyTorch and oneDNN use fewer instructions than the processor has."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProductTimes:
    """Milliseconds of a product of 128 rows with a matrix [768, 256] in one dtype, on one core.

    Attributes:
        forward: of the product itself.
        backward: of the two products that give the gradients of rows and matrix.
    """

    forward: float
    backward: float

    @property
    def training(self) -> float:
        """Of a step: forward and backward."""
        return self.forward + self.backward

    @property
    def forward_gflops(self) -> float:
        """10^9 operations a second."""
        return _PASS_OPERATIONS / self.forward / 1e6

    @property
    def backward_gflops(self) -> float:
        """10^9 operations a second."""
        return 2 * _PASS_OPERATIONS / self.backward / 1e6


@cache
def product_times() -> dict[str, ProductTimes]:
    """The times on this CPU by dtype, those of an earlier process where there was one.

    POLYBASIC_PRODUCT_TIMES names a file of such times that is believed instead.

    Raises:
        UserError: that file cannot be read, or holds something else.
    """
    if (given := times_given()) is not None:
        return _given(given)
    try:
        file = cache_folder() / "product_times" / f"{_digest()}.json"
    except RuntimeError:  # there is no home folder
        return _measured()
    found = _read(file)
    if found is None:
        found = _measured()
        content = {name: asdict(times) for name, times in found.items()}
        write_cached(file, content, "products are timed again by each process")
    return found


def multiplies_fast(dtype: torch.dtype, device: torch.device = _CPU) -> bool:
    """Whether PyTorch's products in `dtype` take no multiple of their time in float32."""
    if dtype == torch.float32:
        return True
    if device.type == "cuda":
        return dtype != torch.bfloat16 or _has_bfloat16()
    times = product_times()
    return times[name_of(dtype)].forward < _SLOW_RATIO * times["float32"].forward


def training_dtype(device: torch.device) -> torch.dtype:
    """The dtype whose forward and backward products are fastest: bfloat16 or float32.

    Not float16, in which gradients underflow unless the loss is scaled.
    """
    if device.type == "cuda":
        return torch.bfloat16 if _has_bfloat16() else torch.float32
    times = product_times()
    is_worth_it = times["bfloat16"].training < _TRAINING_RATIO * times["float32"].training
    return torch.bfloat16 if is_worth_it else torch.float32


def evaluation_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """For passes over a model as PyTorch runs it: its own dtype, or float32 where that is slow."""
    return stored if multiplies_fast(stored, device) else torch.float32


def training_slowdown(dtype: torch.dtype, device: torch.device) -> float:
    """How many times as long a training step's products take as in `training_dtype`; at least 1.

    On a GPU nothing is measured: 1.
    """
    if device.type == "cuda":
        return 1.0
    times = product_times()
    best = times[name_of(training_dtype(device))]
    return max(1.0, times[name_of(dtype)].training / best.training)


def name_of(dtype: torch.dtype) -> str:
    """As recipes and configs write it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _has_bfloat16() -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False)


@torch.inference_mode()
def _measured() -> dict[str, ProductTimes]:
    """In one thread and by its own clock: other work on the machine then changes little."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: _times_in(dtype) for name, dtype in DTYPES.items()}
    finally:
        torch.set_num_threads(num_threads)


def _times_in(dtype: torch.dtype) -> ProductTimes:
    def ones(*sizes: int) -> Tensor:
        return torch.ones(sizes, dtype=dtype)

    rows, matrix, gradient = (
        ones(_ROWS, _IN_SIZE),
        ones(_OUT_SIZE, _IN_SIZE),
        ones(_ROWS, _OUT_SIZE),
    )

    def forward() -> object:
        return torch.nn.functional.linear(rows, matrix)

    def backward() -> object:
        return gradient @ matrix, gradient.T @ rows

    return ProductTimes(_milliseconds(forward), _milliseconds(backward))


def _milliseconds(run: Callable[[], object]) -> float:
    """The least of several calls; of one, if it takes long."""
    least, taken = float("inf"), 0.0
    while taken < _TIMED_SECONDS:
        began = time.thread_time()
        run()
        seconds = time.thread_time() - began
        least, taken = min(least, seconds), taken + seconds
    return 1e3 * least


def _digest() -> str:
    return sha256_of_object(
        {
            "processor": sorted(processor_flags()),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "limits": {name: os.environ.get(name) for name in _LIMITS},
            "onednn": torch.backends.mkldnn.is_available(),
            "torch": torch.__version__,
            "sizes": (_ROWS, _IN_SIZE, _OUT_SIZE),
        }
    )


def _given(file: Path) -> dict[str, ProductTimes]:
    content = read_json(file, "product times")
    try:
        found = {name: ProductTimes(**content[name]) for name in DTYPES}
        is_sound = all(times.forward > 0 and times.backward > 0 for times in found.values())
    except (TypeError, KeyError):
        is_sound = False
    if not is_sound:
        raise UserError(
            "not the times of products",
            f"{TIMES_VARIABLE}={file}",
            "write milliseconds: {dtype: {forward, backward}} for " + ", ".join(DTYPES),
        )
    return found


def _read(file: Path) -> dict[str, ProductTimes] | None:
    """Times of an earlier process; None if the file is missing or not one of ours."""
    content = read_cached(file, "products are timed again")
    if content is None:
        return None
    try:
        return {name: ProductTimes(**content[name]) for name in DTYPES}
    except (TypeError, KeyError) as error:
        _log.warning("products are timed again: %s holds something else (%s)", file, error)
        return None
