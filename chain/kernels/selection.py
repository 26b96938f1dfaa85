"""Selects the backend of a model: the one place that chooses what computes its passes."""

import importlib.util
import logging
import subprocess
from functools import cache
from pathlib import Path

import torch

from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig
from polybasic.chain.kernels.backend import Backend
from polybasic.chain.kernels.cpu.executor import CpuBackend
from polybasic.chain.kernels.cpu.library import kernels_for
from polybasic.chain.kernels.cuda import KERNEL_DTYPES
from polybasic.chain.kernels.environment import kernels_wanted
from polybasic.chain.kernels.product_times import DTYPES
from polybasic.chain.kernels.torch.backends import DeviceBackend, TorchBackend

MIN_CAPABILITY = (8, 0)
"""Ampere: tensor cores for bfloat16, and asynchronous copies."""

_log = logging.getLogger(__name__)


def backend_for(device: torch.device, dtype: torch.dtype, *configs: DecoderConfig) -> Backend:
    """What lays out and runs a model, or models that share weights.

    On a CPU these are the native kernels where they take the dtype and the model's sizes. On a GPU
    they are Triton's, or PyTorch's operations in float32 and where the kernels cannot run, which
    one warning a process reports. Everything else is eager PyTorch. POLYBASIC_KERNELS can ask for
    another choice.

    Args:
        configs: of the models; without any, what runs models of common sizes.

    Raises:
        UserError: POLYBASIC_KERNELS has an unknown value, or is "native" but the kernels are
            unavailable.
    """
    backend = _fastest(device, dtype)
    return backend if all(map(backend.takes, configs)) else TorchBackend(device, dtype)


def _fastest(device: torch.device, dtype: torch.dtype) -> Backend:
    wanted = kernels_wanted()
    if device.type == "cpu":
        if wanted == "device":
            return DeviceBackend(device, dtype)
        kernels = kernels_for(device, dtype)
        return TorchBackend(device, dtype) if kernels is None else CpuBackend(kernels, dtype)
    if device.type != "cuda" or wanted == "eager":
        return TorchBackend(device, dtype)
    missing = _missing(device)
    if dtype in KERNEL_DTYPES and missing is None:
        from polybasic.chain.kernels.cuda.executor import CudaExecutor

        return DeviceBackend(device, dtype, CudaExecutor)
    if dtype in KERNEL_DTYPES and missing is not None:
        _report(missing)
    return DeviceBackend(device, dtype, packs_4_bits=False)


def executors_by_dtype(device: torch.device) -> dict[str, str]:
    """The executor of models of common sizes, by the dtype that they are loaded in.

    Raises:
        UserError: as `backend_for`.
    """
    return {name: backend_for(device, dtype).name for name, dtype in DTYPES.items()}


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
    import triton  # its distribution may have another name

    return f"triton {triton.__version__} (float32: PyTorch's operations)"


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
        return _launcher_fault()
    return None


@cache
def _launcher_fault() -> str | None:
    """Why Triton cannot launch kernels, in one line; None if it can. It is asked once."""
    from triton.runtime import driver

    try:
        _ = driver.active.utils
    except subprocess.CalledProcessError as error:
        reason = f"{Path(error.cmd[0]).name} ends with code {error.returncode}"
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
    else:
        return None
    return f"Triton cannot build what launches them, from C and Python.h (python3-dev): {reason}"


@cache
def _report(missing: str) -> None:
    _log.warning("GPU kernels: PyTorch's operations, which are slower: %s", missing)
