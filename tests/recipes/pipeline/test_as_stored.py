"""Recipes whose target keeps the blocks of a GGUF file."""

import json
from pathlib import Path

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import has_blocks
from polybasic.chain.formats.gguf.importing import imported
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.formats.manifest import read_manifest
from polybasic.deploy import load_chain
from polybasic.recipes.pipeline.run import run_recipe
from polybasic.recipes.schema.loading import load_recipe
from tests.chain.formats.gguf.test_import import written
from tests.recipes.conversations import write_conversations

RECIPE = """\
name: stored
target:
  weights: as_stored
  chat_template: "{% for one in messages %}{{ one.content }} {% endfor %}"
data: {num_heldout: 12, max_tokens: 96}
train:
  num_steps: 2
  batch_size: 2
  warmup_steps: 1
  eval_every_steps: 2
  eval_answer_tokens: 4
  eval_tree_depth: 2
  eval_tree_top_k: 2
  eval_tree_rows: 4
quantize: null
plan: {num_prompts_per_task: 1}
bench: {num_prompts_per_task: 1}
"""


def packed(folder: Path, kind: str, *overrides: str) -> Path:
    """The chain that the recipe makes of a file with matrices of a type."""
    file = written(folder / "model", "llama2", dtype=torch.float32, matrices=kind)
    write_conversations(folder / "chats.json")
    (folder / "recipe.yaml").write_text(RECIPE, "utf-8")
    given = [f"target.model={file}", f"data.conversations={folder / 'chats.json'}", *overrides]
    recipe = load_recipe(str(folder / "recipe.yaml"), given)
    run_recipe(recipe, folder / "out", "polybasic package", only=["chain"])
    return folder / "out" / "chain"


def test_a_target_keeps_its_blocks_and_a_head_is_trained_for_it(tmp_path: Path, capsys) -> None:
    chain = packed(tmp_path, "Q4_1")
    dense = imported(tmp_path / "model" / "model.gguf")
    target, draft = read_manifest(chain).members
    assert (target.dtype, draft.drafts_for) == ("Q4_1", ("target",))
    assert [has_blocks(folder) for folder in (chain / "target", dense)] == [True, False]
    # trained on the dequantized weights, and declared for the blocks
    record = json.loads((tmp_path / "out/draft/training.json").read_text())
    assert record["target_sha256"] == weights_digest(dense)
    config = json.loads((chain / "draft" / "config.json").read_text())
    assert config["polybasic"]["target_sha256"] == weights_digest(chain / "target")
    loaded = load_chain(chain, context_tokens=200)
    prompt = "the rain in the north is as old as"
    drafted, alone = (
        loaded.generate(prompt, max_new_tokens=40, temperature=0.0, members=members)
        for members in (["target", "draft"], ["target"])
    )
    assert drafted.statistics.forward_passes["draft"] > 0
    assert drafted.token_ids == alone.token_ids
    # once more in the type that it is told, which is another chain
    assert "converted" not in capsys.readouterr().err
    packed(tmp_path, "Q4_1", "target.weights=converted")
    assert not has_blocks(chain / "target")
    assert read_manifest(chain).member("draft").drafts_for == ("target",)


def test_a_file_that_is_not_multiplied_as_stored_is_said_to_be_converted(
    tmp_path: Path, capsys
) -> None:
    chain = packed(tmp_path, "BF16", "train.kind=none")
    assert "holds other types than are multiplied as stored: converted" in capsys.readouterr().err
    assert read_manifest(chain).member("target").dtype == "bfloat16"


@pytest.mark.parametrize("override", ["target.adapter=lora", "quantize={}"])
def test_what_needs_other_weights_is_refused(override: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE, "utf-8")
    given = ["target.model=model.gguf", "data.conversations=chats.json", override]
    name = override.partition("=")[0]
    expected = (
        rf"^weights as stored beside {name}: target.weights = as_stored; set {name}=null, or "
    )
    with pytest.raises(UserError, match=expected):
        load_recipe(str(tmp_path / "recipe.yaml"), given)
