"""A head for each family of targets: trained end to end, and the same head when it is served."""

import json

import pytest
import torch
from safetensors.torch import load_file

from polybasic.chain.attend import attend_causally
from polybasic.chain.errors import UserError
from polybasic.chain.loading import load_decoder, load_head
from polybasic.recipes.embedded.conversations import write_conversations
from polybasic.train.head_start import new_head
from polybasic.train.head_training import train_head
from polybasic.train.settings import DataSettings, HeadSettings
from polybasic.train.target import load_target
from tests.checkpoints import FAMILIES, write_family

ROWS = 30
DATA = DataSettings(num_heldout=4, max_tokens=400)
SETTINGS = HeadSettings(
    num_steps=2,
    warmup_steps=1,
    batch_size=2,
    learning_rate=1e-3,
    dtype="float32",
    eval_every_steps=2,
    eval_answer_tokens=6,
    eval_tree_depth=2,
    eval_tree_top_k=2,
    eval_tree_rows=4,
)
CPU = torch.device("cpu")
YARN = {
    "rope_parameters": {
        "rope_theta": 1e4,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
}


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    write_conversations(path, 40, seed=0)
    return str(path)


def trained(folder, family, conversations, **changes):
    write_family(folder / "target", family, dtype=torch.float32, **changes)
    summary = train_head(
        folder / "target", conversations, DATA, SETTINGS, seed=0, out=folder / "draft"
    )
    return folder / "target", folder / "draft", summary


@torch.no_grad()
def in_training(target_folder, draft, token_ids, features):
    target = load_target(target_folder, CPU)
    head = new_head(target.head_shape(None), target.embedding, SETTINGS, 0, draft, None)
    output, _ = head(token_ids[None], features[None], torch.arange(len(token_ids)))
    return output[0], target.lm_head(output[0])


@torch.no_grad()
def when_served(target_folder, draft, token_ids, features):
    target = load_decoder(target_folder, torch.float32, CPU, 256)
    head = load_head(draft, target, 256)
    config = head.config
    cache = torch.zeros(2 * config.num_kv_heads, 256, config.head_dim)
    attend = attend_causally(head, 0, len(token_ids))
    states = head.forward(token_ids, features, cache, attend)
    return states, target.logits(states)


def rows():
    torch.manual_seed(0)
    return torch.randint(250, (ROWS,)), torch.randn(ROWS, 128)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_head_of_a_family_is_the_same_in_training_and_when_served(family, conversations, tmp_path):
    target, draft, summary = trained(tmp_path, family, conversations)
    assert summary["steps"] == summary["best_step"] == 2
    assert 1 <= summary["simulated_accepted_length"] <= 3
    expected, expected_logits = in_training(target, draft, *rows())
    states, logits = when_served(target, draft, *rows())
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), [("llama3", {}), ("gemma3", {}), ("mistral", YARN)])
def test_rotary_scaling_of_the_target_is_the_heads(family, changes, conversations, tmp_path):
    target, draft, _ = trained(tmp_path, family, conversations, **changes)
    path = draft / "config.json"
    config = json.loads(path.read_text())
    expected, _ = in_training(target, draft, *rows())
    assert config["rope_scaling"]["rope_type"] in ("llama3", "linear", "yarn")
    path.write_text(json.dumps(config | {"rope_scaling": None}))
    states, _ = when_served(target, draft, *rows())
    assert not torch.allclose(states, expected, rtol=1e-3, atol=1e-3), "scaling takes part"
    path.write_text(json.dumps(config))
    states, _ = when_served(target, draft, *rows())
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


def test_embedding_and_lm_head_are_the_models_own_tensors(tmp_path):
    for family, is_tied in (("qwen3", False), ("llama32", True)):
        write_family(tmp_path / family, family)
        target = load_target(tmp_path / family, CPU)
        model = target.model
        assert target.embedding is model.get_input_embeddings().weight
        assert target.lm_head.weight is model.get_output_embeddings().weight
        assert (target.embedding is target.lm_head.weight) == is_tied


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_what_lm_head_reads(family, tmp_path):
    write_family(tmp_path / family, family, dtype=torch.float32)
    target = load_target(tmp_path / family, CPU)
    token_ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected = target.model(token_ids).logits
    torch.testing.assert_close(target.lm_head(target.features(token_ids)), expected)
    assert (target.lm_head.softcap is not None) == (family == "gemma2")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_logits_that_are_not_of_lm_head_alone_are_refused(tmp_path):
    from transformers import GraniteConfig, GraniteForCausalLM

    write_family(tmp_path / "llama3", "llama3")
    for scale in (1.0, 8.0):
        torch.manual_seed(0)
        config = GraniteConfig(
            vocab_size=320,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            logits_scaling=scale,
            initializer_range=0.2,
        )
        GraniteForCausalLM(config).save_pretrained(tmp_path / "granite")
        if scale == 1.0:
            load_target(tmp_path / "granite", CPU, tmp_path / "llama3")
        else:
            with pytest.raises(UserError, match=r"Llama family's layout: .*granite"):
                load_target(tmp_path / "granite", CPU, tmp_path / "llama3")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama2", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("phi3", {"partial_rotary_factor": 0.5}),
    ],
)
def test_rotary_scaling_that_heads_lack_is_refused(family, changes, tmp_path):
    write_family(tmp_path / family, family)
    edit_config(tmp_path / family, **changes)
    with pytest.raises(UserError, match=r"unsupported rotary scaling: .*supported: default"):
        load_target(tmp_path / family, CPU)


def test_tokenizer_of_another_folder(tmp_path):
    write_family(tmp_path / "llama3", "llama3")
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in (tmp_path / "llama3").iterdir():
        if not path.name.startswith(("token", "chat", "special", "vocab", "merges")):
            (bare / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=r"cannot load the target's tokenizer: .*bare"):
        load_target(bare, CPU)
    assert load_target(bare, CPU, tmp_path / "llama3").tokenizer.chat_template


def test_exported_embedding_is_the_raw_table(conversations, tmp_path):
    target, draft, _ = trained(tmp_path, "gemma3", conversations)
    stored = load_file(draft / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(stored, load_target(target, CPU).embedding)
