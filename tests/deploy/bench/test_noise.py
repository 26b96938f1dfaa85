"""Whether a steady machine is told from one that drifts, stumbles, or is shared."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from polybasic.deploy.bench.noise import CoreUse, Quiet, noise_of
from polybasic.deploy.bench.schema import Answers, NoiseReport

QUIET = CoreUse(100, others=1, stolen=0)


def report(seconds: np.ndarray, use: CoreUse | None = QUIET) -> NoiseReport:
    """Of answers of 50 tokens each, [repeats, prompts]."""
    rows = seconds.tolist()
    tokens = [[50.0] * len(row) for row in rows]
    return noise_of(answers(tokens, rows), use)


def answers(tokens: list[list[float]], seconds: list[list[float]]) -> Answers:
    return Answers(
        num_tokens=tokens,
        seconds=seconds,
        num_first=[[1] * len(row) for row in seconds],
        first_seconds=[[0.0] * len(row) for row in seconds],
    )


def took(*by_repeat: float, noise: float = 0.02) -> np.ndarray:
    numbers = np.random.default_rng(0)
    steady = np.broadcast_to(0.1 * np.exp(0.5 * numbers.standard_normal(28)), (len(by_repeat), 28))
    return np.array(by_repeat)[:, None] * steady * np.exp(noise * numbers.standard_normal((1, 28)))


def test_steady_machine() -> None:
    found = report(took(1, 1.02, 0.99))
    assert found.warnings == []
    assert len(found.repeat_tokens_per_second) == 3
    assert found.spread == pytest.approx(1.02 / 0.99 - 1)


@pytest.mark.parametrize(
    ("by_repeat", "said"),
    [
        ((1, 1.1, 1.2), "slowed down"),
        ((1.2, 1.1, 1), "became faster"),
        ((1, 1.2, 1), "repeats differ by 20 %"),
        ((1, 1.2), "repeats differ by 20 %"),
        ((1,), "single repeat"),
    ],
)
def test_drift(by_repeat: tuple[float, ...], said: str) -> None:
    (warning,) = report(took(*by_repeat)).warnings
    assert said in warning


def test_interrupted_repeat_is_left_out() -> None:
    rows = took(1, 1.01, 1).tolist()
    rows[2] = [10 * seconds for seconds in rows[2][:5]]
    tokens = [[50.0] * len(row) for row in rows]
    found = noise_of(answers(tokens, rows))
    assert len(found.repeat_tokens_per_second) == 2
    assert found.warnings == []


def test_outliers() -> None:
    seconds = took(1, 1, 1)
    shortest = int(seconds[0].argmin())
    seconds[1, shortest] *= 1.6
    assert report(seconds).warnings == []  # one of 84 is usual
    for repeat, prompt in ((0, 3), (2, 7)):
        seconds[repeat, prompt] *= 1.6
    assert any("3 of 84 of the target's answers" in text for text in report(seconds).warnings)


def test_samples_of_other_lengths_are_no_outliers() -> None:
    numbers = np.random.default_rng(0)
    tokens = numbers.integers(1, 90, (3, 28)).astype(float)
    first = 0.1  # as long as reading the prompt takes
    found = noise_of(
        Answers(
            num_tokens=tokens.tolist(),
            seconds=(first + 0.002 * (tokens - 1)).tolist(),
            num_first=np.ones_like(tokens).tolist(),
            first_seconds=np.full_like(tokens, first).tolist(),
        )
    )
    assert not any("target's answers took" in warning for warning in found.warnings)


def test_answers_of_a_token_have_no_outliers() -> None:
    ones = [[1.0] * 4] * 2
    found = noise_of(answers(ones, [[0.1] * 4, [0.1, 0.1, 0.1, 0.11]]))
    assert found.warnings == []


def test_taken_cores() -> None:
    steady = took(1, 1)
    assert report(steady, None).warnings == []
    (warning,) = report(steady, CoreUse(100, others=23, stolen=0.1)).warnings
    assert warning.startswith("Other processes took 23 %")
    (warning,) = report(steady, CoreUse(100, others=1, stolen=4)).warnings
    assert "withheld 4 %" in warning


# What is read


def write_stat(root: Path, processes: dict[int, tuple[int, int]], **cores: list[int]) -> None:
    """Ticks of cores, and of processes: parent and user time."""
    (root / "proc").mkdir(exist_ok=True)
    lines = [f"{name} {' '.join(map(str, ticks))}" for name, ticks in cores.items()]
    (root / "proc" / "stat").write_text("\n".join(["cpu  9 9 9 9 9 9 9 9 0 0", *lines, "intr 5"]))
    for process, (parent, ticks) in processes.items():
        folder = root / "proc" / str(process)
        folder.mkdir(exist_ok=True)
        fields = ["S", str(parent), *["0"] * 9, str(ticks), "0", "0", "0", *["0"] * 30]
        (folder / "stat").write_text(f"{process} (a) b c) {' '.join(fields)}\n")


def test_times_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores 0 and 1 are ours; what the process and its grandchild do is no one else's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    own = os.getpid()
    idle = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    before = {own: (1, 100), 900001: (own, 0), 900002: (900001, 0), 900003: (1, 0)}
    write_stat(tmp_path, before, cpu0=idle, cpu1=idle, cpu2=idle)
    quiet = Quiet(tmp_path)
    after = {own: (1, 400), 900001: (own, 0), 900002: (900001, 200), 900003: (1, 300)}
    busy, stolen = [700, 50, 50, 100, 50, 25, 25, 0, 0, 0], [0, 0, 0, 960, 0, 0, 0, 40, 0, 0]
    write_stat(tmp_path, after, cpu0=busy, cpu1=stolen, cpu2=busy)
    ticks = os.sysconf("SC_CLK_TCK")
    use = quiet.stop()
    assert use is not None
    assert use.elapsed * ticks == pytest.approx(2000)
    assert use.stolen * ticks == pytest.approx(40)
    assert use.others * ticks == pytest.approx(850 - 500)


def test_system_without_proc(tmp_path: Path) -> None:
    assert Quiet(tmp_path).stop() is None


BURN = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass"


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux' /proc")
def test_a_child_is_no_other() -> None:
    """Others on this machine take what they take: the child's own time must not be added."""
    quiet = Quiet()
    began = time.monotonic()
    child = subprocess.Popen([sys.executable, "-S", "-c", BURN])
    while child.poll() is None:
        time.sleep(0.02)
    running = quiet._own()  # the child has ended, and was waited for
    seconds = time.monotonic() - began
    use = quiet.stop()
    assert use is not None
    assert quiet._began is not None
    assert (running - quiet._began[3]) / os.sysconf("SC_CLK_TCK") >= 0.55
    cores = len(os.sched_getaffinity(0))
    assert use.others <= cores * seconds - 0.5
