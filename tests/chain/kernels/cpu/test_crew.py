"""How many threads passes get: fewer where they wait for each other, and all again later."""

import ctypes
import subprocess
import threading
import time
from pathlib import Path

import pytest

from polybasic.chain.kernels.cpu.build import SOURCE_FOLDER
from polybasic.chain.kernels.cpu.compilers import find_compiler

HARNESS = Path(__file__).with_name("crew_harness.cpp")
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.4


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler, built = find_compiler(), tmp_path_factory.mktemp("crew") / "crew.so"
    assert compiler is not None
    flags = ("-std=c++17", "-O1", "-fPIC", "-shared", f"-I{SOURCE_FOLDER}")
    subprocess.run([*compiler.command, *flags, str(HARNESS), "-o", str(built)], check=True)
    library = ctypes.CDLL(str(built))
    library.crew_note.argtypes = (ctypes.c_int, ctypes.c_double, ctypes.c_double)
    return library


@pytest.fixture
def four(crew: ctypes.CDLL) -> ctypes.CDLL:
    """A crew that has not run yet."""
    crew.crew_begin(4)
    assert crew.crew_size(4) == 4
    return crew


def test_threads_that_are_waited_for_too_long_become_fewer(four: ctypes.CDLL) -> None:
    four.crew_note(4, 20, 14)  # three threads would take a third more, and wait for a quarter of it
    assert four.crew_size(4) == 4
    four.crew_note(4, 20, 16)
    assert four.crew_size(4) == 3
    for _ in range(4):
        four.crew_note(4, 20, 60)
    assert four.crew_size(4) == 1


def test_short_passes_are_judged_together(four: ctypes.CDLL) -> None:
    for _ in range(9):
        four.crew_note(4, 1, 3)
        assert four.crew_size(4) == 4
    four.crew_note(4, 1, 3)
    assert four.crew_size(4) == 3


def seconds_until_all(four: ctypes.CDLL, pass_ms: float) -> float:
    """After a pass that waits for all of its time."""
    four.crew_note(4, pass_ms, 3 * pass_ms)
    assert four.crew_size(4) == 3
    begin = time.monotonic()
    while four.crew_size(4) == 3:
        time.sleep(0.001)
    return time.monotonic() - begin


def test_more_threads_are_tried_again_and_less_often_in_vain(four: ctypes.CDLL) -> None:
    pauses = [seconds_until_all(four, 20) for _ in range(5)]
    assert pauses[0] >= FIRST_PAUSE - 0.01
    assert pauses[2] >= 3 * FIRST_PAUSE
    assert pauses[4] >= LONGEST_PAUSE - 0.01
    time.sleep(1.1 * LONGEST_PAUSE)  # all of them for a while
    assert seconds_until_all(four, 20) < LONGEST_PAUSE / 2


def test_trials_that_take_long_are_seldom(four: ctypes.CDLL) -> None:
    pauses = []
    for _ in range(5):
        time.sleep(0.1)
        pauses.append(seconds_until_all(four, 100))
    assert pauses[1] >= 2 * FIRST_PAUSE - 0.01
    assert pauses[4] >= 2 * LONGEST_PAUSE - 0.01


def test_short_passes_of_fewer_threads_bring_none_back(four: ctypes.CDLL) -> None:
    four.crew_note(4, 20, 60)
    assert [four.crew_size(most) for most in (4, 1, 2, 4)] == [3, 1, 2, 3]


def test_each_caller_has_a_crew(four: ctypes.CDLL) -> None:
    four.crew_note(4, 20, 60)
    found = []
    other = threading.Thread(target=lambda: found.append(four.crew_size(4)))
    other.start()
    other.join()
    assert found == [4]
    assert four.crew_size(4) == 3
