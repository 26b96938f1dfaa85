"""Finds the OpenMP runtime whose threads torch uses, so that kernels share them.

The kernels are compiled without an OpenMP flag and get the runtime's functions by address.
"""

import ctypes
from typing import NamedTuple

from polybasic.chain.kernels.cpu.unavailable import NativeUnavailable


class OpenmpFunctions(NamedTuple):
    """Addresses of functions of the OpenMP runtime that runs torch's threads.

    Attributes:
        parallel: void GOMP_parallel(void (*function)(void*), void* data, unsigned num_threads,
            unsigned flags).
        thread_num: int omp_get_thread_num(void).
        num_threads: int omp_get_num_threads(void).
    """

    parallel: int
    thread_num: int
    num_threads: int


def openmp_functions() -> OpenmpFunctions:
    """Functions of the OpenMP runtime whose threads torch uses; the process may have loaded others.

    Raises:
        NativeUnavailable: this torch has no such runtime.
    """
    import torch

    # the scopes in which torch's own calls are resolved: the process, then torch's libraries
    for name in (None, torch._C.__file__):
        runtime = ctypes.CDLL(name)
        try:
            if _is_runtime_of_torch(runtime):
                return OpenmpFunctions(
                    _address(runtime, "GOMP_parallel"),
                    _address(runtime, "omp_get_thread_num"),
                    _address(runtime, "omp_get_num_threads"),
                )
        except AttributeError:  # a missing symbol
            continue
    raise NativeUnavailable(
        "torch's OpenMP runtime was not found", "install a torch that is built with OpenMP"
    )


def _is_runtime_of_torch(runtime: ctypes.CDLL) -> bool:
    """Whether torch uses this runtime: it then sees a number of threads that is set there.

    Raises:
        AttributeError: `runtime` is not an OpenMP runtime.
    """
    import torch

    probed = torch.get_num_threads() + 1
    num_threads = runtime.omp_get_max_threads()
    runtime.omp_set_num_threads(probed)
    is_seen = torch.get_num_threads() == probed
    runtime.omp_set_num_threads(num_threads)
    return is_seen


def _address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address
