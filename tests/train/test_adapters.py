"""Adapters that peft writes, merged into checkpoints that transformers loads."""

import json
import os
import shutil

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.lineage import weights_digest
from polybasic.train.adapters import merge_adapter
from tests.checkpoints import write_family

TOKENS = torch.arange(3, 40)[None]
MODULES = {"llama2": ["q_proj", "v_proj", "down_proj"], "phi3": ["qkv_proj", "gate_up_proj"]}


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model):
    return model(TOKENS).logits


def write_adapter(folder, base, config):
    """A random adapter that changes what the model says."""
    torch.manual_seed(5)
    model = get_peft_model(load(base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.03)
    model.save_pretrained(folder)
    shutil.rmtree(folder / "README.md", ignore_errors=True)
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    for family in MODULES:
        write_family(folder / family, family, dtype=torch.float32)
        (folder / family / "LICENSE").write_text("terms of the base")
        generation = {"temperature": 0.9, "do_sample": False, "eos_token_id": [2, 3]}
        (folder / family / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def adapters(bases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for family, modules in MODULES.items():
        config = LoraConfig(
            r=4, lora_alpha=16, target_modules=modules, base_model_name_or_path=f"org/{family}"
        )
        write_adapter(folder / family, bases / family, config)
    return folder


@pytest.mark.parametrize("family", MODULES)
def test_merged_logits_equal_those_of_base_and_adapter(family, bases, adapters, tmp_path, capsys):
    base, adapter, out = bases / family, adapters / family, tmp_path / "merged"
    record = merge_adapter(base, adapter, out)
    assert record == {
        "adapter": str(adapter),
        "adapter_sha256": record["adapter_sha256"],
        "rank": 4,
        "num_adapted": 3 * len(MODULES[family]),
        "base_sha256": weights_digest(base),
    }
    assert capsys.readouterr().err == ""
    expected = logits(PeftModel.from_pretrained(load(base), adapter).eval())
    torch.testing.assert_close(logits(load(out)), expected, rtol=1e-5, atol=1e-5)
    assert (logits(load(base)) - expected).abs().max() > 0.1, "the adapter must change something"


def test_merged_folder_is_the_bases_but_for_its_weights(bases, adapters, tmp_path):
    base, out = bases / "llama2", tmp_path / "merged"
    merge_adapter(base, adapters / "llama2", out)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "LICENSE"):
        assert (out / name).read_bytes() == (base / name).read_bytes(), name
    assert not (out / "adapter_config.json").exists()
    assert AutoTokenizer.from_pretrained(out).chat_template
    before, after = (
        {
            name: tensor
            for path in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        for folder in (base, out)
    )
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {
        f"model.layers.{layer}.{block}.{name}_proj.weight"
        for layer in range(3)
        for block, name in (("self_attn", "q"), ("self_attn", "v"), ("mlp", "down"))
    }


def test_pickles_of_base_and_adapter_and_the_bases_dtype(tmp_path):
    base, adapter = tmp_path / "vicuna", tmp_path / "adapter"
    write_family(base, "vicuna")
    write_adapter(adapter, base, LoraConfig(r=2, target_modules=["o_proj"]))
    tensors = load_file(adapter / "adapter_model.safetensors")
    torch.save(tensors, adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    before = weights_digest(base)
    assert merge_adapter(base, adapter, tmp_path / "merged")["base_sha256"] == before
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.float16}
    prefix = "base_model.model.model.layers.1.self_attn.o_proj"
    update = tensors[f"{prefix}.lora_B.weight"] @ tensors[f"{prefix}.lora_A.weight"] * 4
    weight = load(base).model.layers[1].self_attn.o_proj.weight + update
    name = "model.layers.1.self_attn.o_proj.weight"
    torch.testing.assert_close(merged[name], weight.detach().half(), rtol=2e-3, atol=1e-5)


def test_shards_stay_below_their_size(bases, adapters, tmp_path, monkeypatch):
    monkeypatch.setattr("polybasic.train.adapters._SHARD_SIZE", "1MB")
    merge_adapter(bases / "llama2", adapters / "llama2", tmp_path / "merged")
    assert len(list((tmp_path / "merged").glob("model-*-of-*.safetensors"))) > 1
    expected = PeftModel.from_pretrained(load(bases / "llama2"), adapters / "llama2").eval()
    torch.testing.assert_close(
        logits(load(tmp_path / "merged")), logits(expected), rtol=1e-5, atol=1e-5
    )


def test_tokenizer_of_the_adapter_wins(bases, adapters, tmp_path):
    adapter = shutil.copytree(adapters / "llama2", tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(bases / "llama2")
    tokenizer.chat_template = "{{ messages[0].content }}!"
    tokenizer.save_pretrained(adapter)
    merge_adapter(bases / "llama2", adapter, tmp_path / "merged")
    found = AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert found == "{{ messages[0].content }}!"


def test_full_modules_of_an_adapter_are_merged(bases, tmp_path):
    base = bases / "llama2"
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"])
    adapter = write_adapter(tmp_path / "adapter", base, config)
    merge_adapter(base, adapter, tmp_path / "merged")
    expected = logits(PeftModel.from_pretrained(load(base), adapter).eval())
    torch.testing.assert_close(logits(load(tmp_path / "merged")), expected, rtol=1e-5, atol=1e-5)


def test_other_named_base_is_only_a_hint(bases, adapters, tmp_path, capsys):
    adapter = shutil.copytree(adapters / "llama2", tmp_path / "adapter")
    edit(adapter / "adapter_config.json", base_model_name_or_path="meta/another-7b")
    merge_adapter(bases / "llama2", adapter, tmp_path / "merged")
    assert "names another-7b as its base" in capsys.readouterr().err


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(base, adapter, out, match):
    with pytest.raises(UserError, match=match) as caught:
        merge_adapter(base, adapter, out)
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_adapter_of_another_model_is_refused(bases, adapters, tmp_path):
    write_family(tmp_path / "wide", "llama2", hidden_size=256)
    out = tmp_path / "merged"
    refused(tmp_path / "wide", adapters / "llama2", out, r"its base: .*\[128, 4\], not \[256, 4\]")
    refused(bases / "phi3", adapters / "llama2", out, "does not fit its base")
    write_family(tmp_path / "shallow", "llama2", num_hidden_layers=2)
    refused(tmp_path / "shallow", adapters / "llama2", out, r"no place for .*layers\.2\.")


def test_half_an_adapter_is_refused(bases, adapters, tmp_path):
    adapter = shutil.copytree(adapters / "llama2", tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    gone = tensors.pop(next(name for name in tensors if "lora_B" in name))
    save_file(tensors, adapter / "adapter_model.safetensors")
    refused(bases / "llama2", adapter, tmp_path / "merged", "no weight for .*lora_B")
    save_file({**tensors, "x": gone * torch.nan}, adapter / "adapter_model.safetensors")
    refused(bases / "llama2", adapter, tmp_path / "merged", "not finite: x in")
    (adapter / "adapter_model.safetensors").unlink()
    refused(bases / "llama2", adapter, tmp_path / "merged", "adapter without weights")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"alora_invocation_tokens": [3, 4]}, "does not merge: .*alora_invocation_tokens"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "does not merge: .*layer_replication"),
        ({"use_tomorrows_trick": True}, "another version of peft: .*use_tomorrows_trick true"),
        ({"peft_type": "PROMPT_TUNING"}, "no LoRA: .*'PROMPT_TUNING'"),
    ],
)
def test_what_is_more_than_a_sum_is_refused(changes, match, bases, adapters, tmp_path):
    adapter = shutil.copytree(adapters / "llama2", tmp_path / "adapter")
    edit(adapter / "adapter_config.json", **changes)
    refused(bases / "llama2", adapter, tmp_path / "merged", match)


def test_ia3_is_refused(bases, tmp_path):
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    adapter = write_adapter(tmp_path / "adapter", bases / "llama2", config)
    refused(bases / "llama2", adapter, tmp_path / "merged", "no LoRA: .*'IA3'")


class Surprise:
    def __reduce__(self):
        return os.system, ("echo surprise",)


def test_pickle_with_code_is_refused(bases, adapters, tmp_path, capfd):
    adapter = shutil.copytree(adapters / "llama2", tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({"x": Surprise()}, adapter / "adapter_model.bin")
    refused(bases / "llama2", adapter, tmp_path / "merged", "pickle refused")
    assert "surprise" not in capfd.readouterr().out


def test_changed_vocabulary_is_refused(bases, tmp_path):
    base = bases / "llama2"
    model = load(base)
    model.resize_token_embeddings(328)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    refused(base, tmp_path / "adapter", tmp_path / "merged", r"changes the vocabulary: .*328, 128")


def test_tied_embedding_is_refused(tmp_path):
    base = tmp_path / "llama32"
    write_family(base, "llama32", dtype=torch.float32)
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    adapter = write_adapter(tmp_path / "adapter", base, config)
    refused(base, adapter, tmp_path / "merged", "changes a tied embedding: .* lm_head")
    layers = LoraConfig(r=2, target_modules=["q_proj"])
    adapter = write_adapter(tmp_path / "layers", base, layers)
    merge_adapter(base, adapter, tmp_path / "merged")
    expected = logits(PeftModel.from_pretrained(load(base), adapter).eval())
    torch.testing.assert_close(logits(load(tmp_path / "merged")), expected, rtol=1e-5, atol=1e-5)


def test_embedding_that_the_family_ties_is_refused(tmp_path):
    """Gemma's configs on the hub do not say that the embedding is tied: it is their default."""
    base = tmp_path / "gemma3"
    write_family(base, "gemma3", dtype=torch.float32)
    config = json.loads((base / "config.json").read_text())
    del config["tie_word_embeddings"]
    (base / "config.json").write_text(json.dumps(config))
    adapter = write_adapter(
        tmp_path / "adapter", base, LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    )
    refused(base, adapter, tmp_path / "merged", "changes a tied embedding: .* lm_head")


def test_quantized_base_is_refused(bases, adapters, tmp_path):
    base = shutil.copytree(bases / "llama2", tmp_path / "base")
    edit(base / "config.json", quantization_config={"quant_method": "awq"})
    refused(base, adapters / "llama2", tmp_path / "merged", "base is quantized")
