"""What a machine is said to have left."""

from pathlib import Path

import pytest
import torch

from polybasic.deploy.runtime.hardware import available_bytes
from polybasic.deploy.runtime.rounds.verifier import PassClock, all_running

CPU = torch.device("cpu")


def write_system(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A system with 8 GB available."""
    files = {
        "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n",
        "proc/self/cgroup": groups,
    } | files
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_what_is_available_ends_at_the_control_groups_limits(tmp_path: Path) -> None:
    free = write_system(tmp_path / "free", "0::/a\n", {"sys/fs/cgroup/a/memory.max": "max\n"})
    assert available_bytes(CPU, free) == 8_000_000 * 1024
    above = {
        "sys/fs/cgroup/a/memory.max": "5000000000\n",
        "sys/fs/cgroup/a/memory.current": "3000000000\n",
        "sys/fs/cgroup/a/memory.stat": "anon 2\ninactive_file 500000000\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
    }
    new = write_system(tmp_path / "new", "0::/a/b\n", above)
    assert available_bytes(CPU, new) == 2_500_000_000
    within = {
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4000000000\n",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "1000000000\n",
        "sys/fs/cgroup/memory/a/memory.stat": "total_inactive_file 0\n",
    }
    old = write_system(tmp_path / "old", "5:cpu:/a\n4:memory:/a\n0::/\n", within)
    assert available_bytes(CPU, old) == 3_000_000_000
    assert available_bytes(CPU, tmp_path / "nothing") is None


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The streams that events were recorded on; each pair of events is a quarter second apart."""
    streams: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            pass

        def record(self, stream: object = None) -> None:
            streams.append(stream)

        def elapsed_time(self, end: "Event") -> float:
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return streams


def test_passes_of_a_second_gpu_are_timed_by_its_own_stream(recorded: list[object]) -> None:
    clock = PassClock(torch.device("cuda", 1))
    with clock.running(2):
        pass
    assert (clock.num_passes, clock.seconds) == (2, 0.25)
    assert recorded == ["stream of cuda:1"] * 2


def test_a_pass_of_many_sequences_is_timed_once(recorded: list[object]) -> None:
    clocks = [PassClock(torch.device("cuda")) for _ in range(3)]
    for num_passes in (1, 0):
        with all_running(clocks, num_passes):
            pass
    assert [(clock.num_passes, clock.seconds) for clock in clocks] == [(1, 0.5)] * 3
    assert len(recorded) == 4
