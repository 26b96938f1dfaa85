"""The command line under torchrun: two nodes, which here are two folders of one machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.checkpoints import write_family
from tests.recipes.command_line import call
from tests.train.counting import write_counting

ROOT = Path(__file__).parents[3]
STEPS = 100
RECIPE = """\
name: counting
target: {{model: {target}}}
data: {{conversations: {conversations}, num_heldout: 3, max_tokens: 64}}
train:
  num_steps: {steps}
  warmup_steps: 1
  batch_size: 6
  learning_rate: 1e-4
  dtype: float32
  eval_every_steps: 1000
  eval_answer_tokens: 8
  eval_tree_depth: 3
  save_every_steps: 1000
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_family(tmp_path / "target", "llama2", dtype=torch.float32)
    conversations = write_counting(tmp_path / "counting.jsonl", "On from {}", 2, 7)
    path = tmp_path / "counting.yaml"
    path.write_text(
        RECIPE.format(target=tmp_path / "target", conversations=conversations, steps=STEPS)
    )
    return path


def losses(out: Path) -> list[float]:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def torchrun(node: Path, rank: int, port: int, *words: str) -> subprocess.Popen[str]:
    """One of two nodes, with a working folder and a log of its own."""
    node.mkdir()
    (node / "python").mkdir()
    (node / "python" / "polybasic").symlink_to(ROOT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    launcher += ["--node-rank", str(rank), "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    launcher += ["--master-port", str(port), "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    environment = {**os.environ, "PYTHONPATH": str(node / "python"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*launcher, "-m", "polybasic", *words],
        cwd=node,
        env=environment,
        text=True,
        stdout=(node / "out.txt").open("w"),
        stderr=(node / "err.txt").open("w"),
    )


@pytest.mark.proof
def test_torchrun_on_two_nodes_is_stopped_and_three_processes_go_on(
    recipe: Path, tmp_path: Path
) -> None:
    """The losses are those of a run of one process that nobody stopped."""
    out, nodes = tmp_path / "out", [tmp_path / f"node{rank}" for rank in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # the first node's output folder counts
    words = [["train", str(recipe), "--out", str(out)], ["train", str(recipe), "--out", "other"]]
    launched = [torchrun(nodes[rank], rank, port, *words[rank]) for rank in range(2)]
    code, _, err = call("train", recipe, "--out", tmp_path / "alone")
    assert code == 0, err
    expected = losses(tmp_path / "alone" / "draft")
    working = out / ".draft.partial"
    while len(losses(working)) < 3:
        assert launched[0].poll() is None, (nodes[0] / "err.txt").read_text()
        time.sleep(0.01)
    launched[1].send_signal(signal.SIGUSR1)
    for each in launched:
        each.wait()
    said = (nodes[0] / "err.txt").read_text()
    assert said.count("interrupted by SIGUSR1: step ") == 1
    assert "interrupted by" not in (nodes[1] / "err.txt").read_text()
    num_two = len(losses(working))
    assert f"step {num_two} of {STEPS} is saved in {out}" in said
    assert 3 <= num_two < STEPS
    assert [path.name for path in nodes[1].iterdir() if path.is_dir()] == ["python"]

    code, _, err = call("train", recipe, "--out", out, "--nproc", "3")
    assert code == 0, err
    assert losses(out / "draft") == pytest.approx(expected, rel=1e-5)
