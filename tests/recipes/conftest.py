"""A micro recipe: everything real, and small enough to run whole in seconds."""

from pathlib import Path

import pytest
import torch

from polybasic.deploy.planner.settings import TASKS
from tests.checkpoints import write_family
from tests.recipes.command_line import call
from tests.recipes.conversations import write_conversations

MICRO = """\
name: micro
seed: 1
target: {{model: {models}/target}}
data: {{conversations: {models}/conversations.json, num_heldout: 24, max_tokens: 192}}
train:
  num_steps: 12
  batch_size: 2
  learning_rate: 1e-3
  warmup_steps: 2
  eval_every_steps: 6
  eval_answer_tokens: 16
  save_every_steps: 3
quantize: {{num_calibration_samples: 4, calibration_tokens: 64, num_quality_tokens: 256}}
plan:
  tree: {{depth: 3, top_k: 2, rows: 6}}
  flush_length: 4
  num_prompts_per_task: 1
  max_new_tokens: 16
  grid: {{depths: [2, 3], top_ks: [2], rows: [4, 6], flush_lengths: [2, 4], ngram_matches: []}}
bench: {{num_prompts_per_task: 1, max_new_tokens: 16, repeats: 1}}
"""


@pytest.fixture(scope="session")
def micro_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the micro recipe, with its target and conversations beside it."""
    folder = tmp_path_factory.mktemp("recipe")
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    write_family(folder / "target", "llama2", dtype=torch.bfloat16, num_shards=1, **shape)
    write_conversations(folder / "conversations.json", TASKS)
    (folder / "micro.yaml").write_text(MICRO.format(models=folder), "utf-8")
    return folder / "micro.yaml"


@pytest.fixture(scope="session")
def micro_run(micro_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a micro run that nobody interrupted; tests only read it."""
    out = tmp_path_factory.mktemp("micro") / "out"
    code, _, err = call("run", micro_recipe, "--out", out)
    assert code == 0, err
    return out
