"""Families of checkpoints the whole way: trained for, quantized, packed, and run in full.

What is proved of each: `polybasic package` on a folder as users have it gives a chain whose three
members run together, and whose greedy answer is, in float32, that of transformers token for token.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.manifest import read_manifest
from polybasic.deploy import load_chain
from polybasic.recipes.pipeline.run import run_recipe
from polybasic.recipes.schema.loading import load_recipe
from tests.checkpoints import write_family, write_t5
from tests.recipes.command_line import call, refusal
from tests.recipes.conversations import write_conversations

RECIPE = """\
name: family
data: {num_heldout: 4, max_tokens: 160}
train:
  num_steps: 2
  batch_size: 2
  learning_rate: 1e-3
  warmup_steps: 1
  eval_every_steps: 2
  eval_answer_tokens: 8
  eval_tree_depth: 2
  eval_tree_top_k: 2
  eval_tree_rows: 4
  dtype: float32
quantize: {num_calibration_samples: 2, calibration_tokens: 24, num_quality_tokens: 64}
plan: {tree: {depth: 3, top_k: 2, rows: 6}, flush_length: 4}
"""
MEMBERS = ("target", "intermediate", "draft")
NEW_TOKENS = 40
"""With the prompt more than the families' sliding window of 24."""

FAMILIES = ("vicuna", "phi3", "gemma3")
"""Pickles and SentencePiece; fused projections and bytes; windows of two kinds and soft caps."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_from_checkpoint_to_answers(family: str, tmp_path: Path) -> None:
    target, recipe = tmp_path / "target", tmp_path / "recipe.yaml"
    write_family(target, family)
    recipe.write_text(RECIPE, "utf-8")
    out = tmp_path / "out"
    write_conversations(tmp_path / "chats.json")
    overrides = [f"target.model={target}", f"data.conversations={tmp_path / 'chats.json'}"]
    run_recipe(load_recipe(str(recipe), overrides), out, "polybasic package", only=("chain",))

    manifest = read_manifest(out / "chain")
    assert tuple(member.name for member in manifest.members) == MEMBERS
    assert manifest.members[2].drafts_for == ("target", "intermediate")
    assert manifest.training["draft"]["steps"] == 2
    assert manifest.quality["intermediate"]["num_tokens"] == 64

    prompt = [{"role": "user", "content": "the rain in the north is as old as the sea"}]
    chain = load_chain(out / "chain", dtype="float32")
    answer = chain.generate(prompt, max_new_tokens=NEW_TOKENS, temperature=0.0, members=MEMBERS)
    assert set(answer.statistics.forward_passes) == set(MEMBERS)
    assert answer.statistics.forward_passes["target"] < len(answer.token_ids)

    # soft-capped attention is exact in transformers' eager code only
    model = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompt_ids = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    expected = model.generate(
        **prompt_ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )[0, prompt_ids["input_ids"].shape[1] :]
    assert answer.token_ids == expected.tolist()


def test_a_cascade_of_encoder_decoders(tmp_path: Path) -> None:
    """A recipe's chain of three that are nobody's copy, and the same from the command line."""
    for seed, name in enumerate(("target", "base", "smallest")):
        write_t5(tmp_path / name, seed=seed, num_layers=3 - seed, num_decoder_layers=3 - seed)
    given = [
        f"target.model={tmp_path / 'target'}",
        f"small.model={tmp_path / 'base'}",
        f"package.intermediates={{smallest: {tmp_path / 'smallest'}}}",
    ]
    recipe = load_recipe("flan-t5-cascade", given)
    run_recipe(recipe, tmp_path / "out", "polybasic package", only=("chain",))
    assert read_manifest(tmp_path / "out" / "chain").plan.members == ("target", "small", "smallest")

    prompt = "the sea is as old as the rain in the north"
    command = ("generate", tmp_path / "target", "-p", prompt, "--max-new-tokens", NEW_TOKENS)
    code, alone, err = call(*command)
    assert code == 0, err
    small = ("--small", tmp_path / "base", "--small", tmp_path / "smallest")
    members = ("--members", "target,small,smaller", "--verify")
    code, out, err = call(*command, *small, *members)
    assert (code, out) == (0, alone), err
    assert "smaller " in err.partition("forward passes: ")[2]
    code, _, err = call("warmup", tmp_path / "target", *small)
    assert code == 0, err
    answer = load_chain(tmp_path / "out" / "chain").generate(prompt, max_new_tokens=NEW_TOKENS)
    assert answer.text.strip() == alone.strip()
    assert len(answer.statistics.forward_passes) == 3

    fifth = (*small, "--small", tmp_path / "base", "--small", tmp_path / "base")
    assert "too many smaller models: --small" in refusal(*command, *fifth)
    for change, message in (
        ("small.quantize=true", "an encoder-decoder gets no copy in few bits"),
        ("train.kind=eagle2", "an encoder-decoder gets no draft head"),
        ("quantize={}", "unsupported architecture: model_type 't5'"),
    ):
        made = load_recipe("flan-t5-cascade", [*given, change])
        with pytest.raises(UserError, match=message):
            run_recipe(made, tmp_path / "other", "polybasic package", only=("chain",))
