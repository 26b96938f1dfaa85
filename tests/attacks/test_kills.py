"""Processes that are killed while they write, and memory that stays as it is."""

import gc
import json
import random
import resource
import time
from pathlib import Path

import pytest
import torch

from polybasic.deploy import load_chain
from polybasic.recipes.cli.main import main
from tests import forked
from tests.attacks import outcomes

OPTIONS = ("--num-prompts-per-task", "1", "--max-new-tokens", "4", "--dtype", "float32")
COMMANDS = {
    "plan": ("plan", *OPTIONS),
    "bench": ("bench", *OPTIONS, "--repeats", "1", "--systems", "target,polybasic"),
}
_NUM_KILLS = 20
_GROWTH = 1.02


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"question_id": n, "category": "qa", "turns": [f"w{n} w1 w2"]} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(name: str, chain: str, prompts: str) -> None:
    torch.set_num_threads(1)
    command, *options = COMMANDS[name]
    main([command, chain, *options, "--prompts", prompts])


@pytest.mark.proof
@pytest.mark.parametrize("name", COMMANDS)
def test_a_kill_leaves_a_whole_chain(
    tiny_chain: Path, prompts: Path, tmp_path: Path, name: str
) -> None:
    asked = run, name, str(tiny_chain), str(prompts)
    log, draw = tmp_path / "log", random.Random(20)
    assert forked.run(*asked, log=log) == 0, log.read_text()  # it imports, and plans for bench
    begin = time.monotonic()
    assert forked.run(*asked, log=log) == 0, log.read_text()
    seconds, num_killed = time.monotonic() - begin, 0
    while num_killed < _NUM_KILLS:
        process = forked.start(*asked, log=log)
        # files are written at the end
        part = draw.uniform(0.8, 0.95) if num_killed % 2 else draw.uniform(0.2, 0.8)
        process.join(part * seconds)
        process.kill()
        process.join()
        num_killed += process.exitcode == -9
        seconds *= 1 if process.exitcode == -9 else 0.8  # the machine has become less busy
        assert outcomes.of_command("verify", tiny_chain) is None
        report = tiny_chain / "report" / "report.json"
        assert not report.exists() or "systems" in json.loads(report.read_text())
    assert forked.run(*asked, log=log) == 0, log.read_text()
    left = [path.name for path in tiny_chain.rglob(".*.partial")]
    assert left == []


@pytest.mark.proof
def test_answers_and_loads_leave_no_memory_behind(tiny_chain: Path) -> None:
    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def answer(num: int) -> None:
        for seed in range(num):
            chain.generate("w1 w2 w3", max_new_tokens=20, temperature=seed % 2, seed=seed)

    def load(num: int) -> None:
        for _ in range(num):
            load_chain(tiny_chain, dtype="float32").generate("w1", max_new_tokens=2)

    chain = load_chain(tiny_chain, dtype="float32")
    answer(50)
    before = resident()
    answer(300)
    assert resident() < _GROWTH * before
    load(10)
    before = resident()
    load(30)
    assert resident() < _GROWTH * before
    kept = torch.ones(int(0.05 * before) // 4)  # what the test must see
    assert resident() > _GROWTH * before, len(kept)
