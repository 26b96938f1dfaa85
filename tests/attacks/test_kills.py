"""Processes that are killed while they write, and memory that stays as it is."""

import gc
import json
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.chain.formats import files
from polybasic.deploy import load_chain
from polybasic.recipes.cli.main import main
from tests import forked
from tests.attacks import outcomes

OPTIONS = ("--num-prompts-per-task", "1", "--max-new-tokens", "4", "--dtype", "float32")
COMMANDS = {
    "plan": ("plan", *OPTIONS),
    "bench": ("bench", *OPTIONS, "--repeats", "1", "--systems", "target,polybasic", "--no-plan"),
}
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")
_GROWTH = 1.02


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"question_id": n, "category": "qa", "turns": [f"w{n} w1 w2"]} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Moments:
    """Keeps what a kill would leave of a folder at each moment at which its files change."""

    def __init__(self, folder: Path, kept: Path) -> None:
        self.folder, self.kept, self.is_copying = folder, kept, False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """See `sys.addaudithook`: it is called before the event."""
        if self.is_copying or event not in ("open", *CHANGES) or isinstance(arguments[0], int):
            return
        path = Path(os.fsdecode(arguments[0])).absolute()
        is_change = event != "open" or bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if not is_change or not path.is_relative_to(self.folder):
            return
        self.is_copying = True
        copy = self.kept / f"{len(list(self.kept.iterdir())):03}"
        shutil.copytree(self.folder, copy)
        if event == "open" and arguments[2] & os.O_TRUNC:  # which has happened, and no more
            (copy / path.relative_to(self.folder)).write_bytes(b"")
        self.is_copying = False


def run(name: str, chain: str, prompts: str, kept: str = "", in_place: bool = False) -> None:
    torch.set_num_threads(1)
    if in_place:
        files.partial_path = lambda path: path  # type: ignore[assignment]
    if kept:
        sys.addaudithook(Moments(Path(chain), Path(kept)))
    command, *options = COMMANDS[name]
    main([command, chain, *options, "--prompts", prompts])


def moments(
    name: str, chain: Path, prompts: Path, folder: Path, in_place: bool = False
) -> list[Path]:
    """Copies of the chain as a kill could have left it, in their order."""
    log, kept = folder / "log", folder / "kept"
    kept.mkdir()
    arguments = name, str(chain), str(prompts), str(kept), in_place
    assert forked.run(run, *arguments, log=log) == 0, log.read_text()
    return sorted(kept.iterdir())


@pytest.mark.proof
@pytest.mark.parametrize("name", COMMANDS)
def test_a_kill_leaves_a_whole_chain(
    tiny_chain: Path, prompts: Path, tmp_path: Path, name: str
) -> None:
    left = moments(name, tiny_chain, prompts, tmp_path)
    assert len(left) > 3
    for chain in left:
        assert outcomes.of_command("verify", chain) is None
        report = chain / "report" / "report.json"
        assert not report.exists() or "systems" in json.loads(report.read_text())
    # what was half written goes with the next run
    begun = next(chain for chain in left if list(chain.rglob(".*.partial")))
    log = tmp_path / "again"
    assert forked.run(run, name, str(begun), str(prompts), log=log) == 0, log.read_text()
    assert list(begun.rglob(".*.partial")) == []


@pytest.mark.proof
def test_a_kill_while_a_file_is_written_in_place_is_noticed(
    tiny_chain: Path, prompts: Path, tmp_path: Path
) -> None:
    left = moments("plan", tiny_chain, prompts, tmp_path, in_place=True)
    assert any(outcomes.of_command("verify", chain) is not None for chain in left)


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
