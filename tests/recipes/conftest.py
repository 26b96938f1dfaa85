"""A micro recipe: everything real, and small enough to run whole in seconds."""

from pathlib import Path

import pytest

from tests.recipes.command_line import call

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
    num_steps: 60
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


@pytest.fixture(scope="session")
def micro_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the micro recipe."""
    path = tmp_path_factory.mktemp("recipe") / "micro.yaml"
    path.write_text(MICRO, "utf-8")
    return path


@pytest.fixture(scope="session")
def micro_run(micro_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a micro run that nobody interrupted; tests only read it."""
    out = tmp_path_factory.mktemp("micro") / "out"
    code, _, err = call("run", micro_recipe, "--out", out)
    assert code == 0, err
    return out
