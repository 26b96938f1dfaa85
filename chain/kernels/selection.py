"""Selects what computes passes on a device."""

import importlib.util
import logging
from functools import cache
from importlib.metadata import version

import torch

from polybasic.chain.kernels.cuda import KERNEL_DTYPES
from polybasic.chain.kernels.environment import kernels_wanted
from polybasic.chain.kernels.torch.operations import Operations

MIN_CAPABILITY = (8, 0)
"""Ampere: tensor cores for bfloat16, and asynchronous copies."""

_log = logging.getLogger(__name__)


def operations_for(device: torch.device, dtype: torch.dtype) -> Operations | None:
    """The operations that compute passes on a device, one shared object; None for the eager path.

    On a GPU these are the Triton kernels, or PyTorch's operations in float32 and where the kernels
    cannot run, which one warning a process reports. On a CPU they are PyTorch's operations if
    POLYBASIC_KERNELS asks for the device path.

    Raises:
        UserError: POLYBASIC_KERNELS has an unknown value.
    """
    wanted = kernels_wanted()
    if device.type == "cpu":
        return _reference() if wanted == "device" else None
    if device.type != "cuda" or wanted == "eager":
        return None
    if dtype not in KERNEL_DTYPES:
        return _reference()
    missing = _missing(device)
    return _kernels() if missing is None else _reference_because(missing)


def reads_4_bits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device path keeps 4-bit weights packed because a kernel reads them.

    On a CPU they are kept as on a GPU. PyTorch's operations would dequantize them in each product,
    so on a GPU without kernels they read a dequantized copy.

    Raises:
        UserError: POLYBASIC_KERNELS has an unknown value.
    """
    operations = operations_for(device, dtype)
    return operations is not None and (device.type == "cpu" or operations is not _reference())


def describe_gpu_kernels() -> str:
    """What would compute passes on a GPU, and why.

    For example "triton 3.6.0 (float32: PyTorch's operations)".

    Raises:
        UserError: POLYBASIC_KERNELS has an unknown value.
    """
    if kernels_wanted() == "eager":
        return "eager PyTorch (POLYBASIC_KERNELS=eager)"
    if missing := _missing(torch.device("cuda")):
        return f"PyTorch's operations ({missing})"
    return f"triton {version('triton')} (float32: PyTorch's operations)"


def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def _missing(device: torch.device) -> str | None:
    """Why the kernels cannot run on a GPU, in one line; None if they can."""
    if not has_triton():
        return "no triton found; pip install triton"
    if torch.version.hip is not None:
        return "they are written for NVIDIA's GPUs"
    if torch.cuda.is_available():
        found = torch.cuda.get_device_capability(device)
        if found < MIN_CAPABILITY:
            return "compute capability {}.{}, at least {}.{} is needed".format(
                *found, *MIN_CAPABILITY
            )
    return None


@cache
def _reference() -> Operations:
    return Operations()


@cache
def _kernels() -> Operations:
    from polybasic.chain.kernels.cuda.triton_operations import TritonOperations

    return TritonOperations()


@cache
def _reference_because(missing: str) -> Operations:
    _log.warning("GPU kernels: PyTorch's operations, which are slower: %s", missing)
    return _reference()
