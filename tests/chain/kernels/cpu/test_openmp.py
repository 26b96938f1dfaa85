"""The kernels' threads are torch's own."""

import ctypes
import shutil
import threading
from pathlib import Path

import pytest
import torch

from polybasic.chain.kernels.cpu import openmp


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def library_of(name: str) -> str:
    """File of the library that the process has loaded `name` from."""
    with Path("/proc/self/maps").open() as maps:
        return next(line.split()[-1] for line in maps if name in line)


def threads_of_a_region(parallel: int, thread_num: int, num_threads: int) -> dict[int, int]:
    """Run GOMP_parallel with three threads: operating system's thread id -> OpenMP's number."""
    number = ctypes.CFUNCTYPE(ctypes.c_int)(thread_num)
    count = ctypes.CFUNCTYPE(ctypes.c_int)(num_threads)
    region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    ran: dict[int, int] = {}

    @region
    def note(_: int | None) -> None:
        assert count() == 3
        ran[threading.get_native_id()] = number()

    ctypes.CFUNCTYPE(None, region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(parallel)(
        note, None, 3, 0
    )
    return ran


def threads_of_the_process() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.usefixtures("three_threads")
def test_the_openmp_functions_run_torchs_own_threads(tmp_path: Path) -> None:
    torch.ones(1 << 20).add_(1)  # torch starts its threads
    before = threads_of_the_process()
    ran = threads_of_a_region(*openmp.openmp_functions())
    assert sorted(ran.values()) == [0, 1, 2]
    assert ran[threading.get_native_id()] == 0
    assert set(ran) <= before
    assert torch.get_num_threads() == 3

    # a second copy of the same runtime has threads of its own, and is distinguished
    copy = tmp_path / "other-openmp.so"
    shutil.copy(library_of("libgomp"), copy)
    other = ctypes.CDLL(str(copy))
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    addresses = [openmp._address(other, name) for name in names]
    ran_by_other = threads_of_a_region(*addresses)
    assert sorted(ran_by_other.values()) == [0, 1, 2]
    assert set(ran_by_other) & before == {threading.get_native_id()}
    assert not openmp._is_runtime_of_torch(other)
    assert openmp._is_runtime_of_torch(ctypes.CDLL(torch._C.__file__))
