"""A micro recipe: everything real, and small enough to run whole in seconds."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

MICRO = """\
name: micro
seed: 1
target:
  scratch:
    num_embedded_conversations: 400
    vocab_size: 768
    num_layers: 2
    hidden_size: 128
    intermediate_size: 256
    num_heads: 2
    num_kv_heads: 1
    context_tokens: 512
    num_steps: 130
    batch_tokens: 512
    row_tokens: 128
    warmup_steps: 2
data: {num_heldout: 8, max_tokens: 192}
train:
  num_steps: 12
  batch_size: 2
  learning_rate: 1e-3
  warmup_steps: 2
  eval_every_steps: 6
  eval_answer_tokens: 16
  save_every_steps: 3
quantize: {num_calibration_samples: 4, calibration_tokens: 64, num_quality_tokens: 256}
plan:
  tree: {depth: 3, top_k: 2, rows: 6}
  flush_length: 4
  num_prompts_per_task: 1
  max_new_tokens: 16
  grid: {depths: [2, 3], top_ks: [2], rows: [4, 6], flush_lengths: [2, 4], ngram_matches: []}
bench: {num_prompts_per_task: 1, max_new_tokens: 16, repeats: 1}
"""

Polybasic = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def micro_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the micro recipe."""
    path = tmp_path_factory.mktemp("recipe") / "micro.yaml"
    path.write_text(MICRO, "utf-8")
    return path


def run_polybasic(arguments: Sequence[object], folder: Path) -> subprocess.CompletedProcess:
    """The command line in a process of its own, one thread, in `folder`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-m", "polybasic.recipes.cli.main", *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture
def polybasic(tmp_path: Path) -> Polybasic:
    """Run `polybasic ARGUMENTS` in the test's own folder."""

    def run(*arguments: object) -> subprocess.CompletedProcess:
        return run_polybasic(arguments, tmp_path)

    return run


@pytest.fixture(scope="session")
def polybasic_in() -> Polybasic:
    """Run the command line with (arguments, folder), for fixtures of more than one test."""
    return run_polybasic


@pytest.fixture(scope="session")
def micro_run(micro_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a micro run that nobody interrupted; tests only read it."""
    folder = tmp_path_factory.mktemp("micro")
    done = run_polybasic(["run", micro_recipe, "--out", folder / "out"], folder)
    assert done.returncode == 0, done.stderr
    return folder / "out"
