"""A base model with an adapter, a ready head and a template of its own: the whole way."""

import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding

from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.formats.manifest import read_manifest
from polybasic.deploy import load_chain
from polybasic.recipes.pipeline.run import run_recipe
from polybasic.recipes.schema.loading import load_recipe
from tests.checkpoints import write_family
from tests.recipes.conversations import write_conversations
from tests.recipes.serving import served

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}USER: {{ message.content }} "
    "{% else %}ASSISTANT: {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
RECIPE = """\
name: ready-made
data: {num_heldout: 12, max_tokens: 96}
train:
  num_steps: 6
  batch_size: 2
  learning_rate: 1e-3
  warmup_steps: 1
  eval_every_steps: 3
  eval_answer_tokens: 8
  eval_tree_depth: 2
  eval_tree_top_k: 2
  eval_tree_rows: 4
quantize:
  num_calibration_samples: 2
  calibration_tokens: 24
  num_quality_tokens: 64
  distill: {num_steps: 3, batch_tokens: 64, row_tokens: 32}
plan:
  tree: {depth: 3, top_k: 2, rows: 6}
  prompts: heldout
  num_prompts_per_task: 1
  max_new_tokens: 8
  grid: {depths: [2], top_ks: [2], rows: [4], flush_lengths: [4], ngram_matches: []}
bench: {num_prompts_per_task: 1, max_new_tokens: 8, repeats: 1, systems: [target, polybasic_full]}
"""


def write_adapter(folder: Path, base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    )
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    adapted.save_pretrained(folder)


def write_head(folder: Path, base: Path) -> None:
    """A random head in EAGLE's layout, stored as EAGLE's are, without the embedding."""
    config = json.loads((base / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {"fc.weight": (hidden, 2 * hidden)}
    shapes |= {f"layers.0.self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
    shapes |= {f"layers.0.mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
    shapes["layers.0.mlp.down_proj.weight"] = (hidden, inner)
    torch.manual_seed(4)
    tensors = {name: torch.randn(shape).half() * 0.05 for name, shape in shapes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden).half()
    folder.mkdir()
    torch.save(tensors, folder / "pytorch_model.bin")
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    head = {name: config[name] for name in (*names, "num_key_value_heads", "rms_norm_eps")}
    head |= {"model_type": "llama", "num_hidden_layers": 1, "bias": False}
    (folder / "config.json").write_text(json.dumps(head))


def greedy(folder: Path, ids: BatchEncoding) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(**ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
    return output[0, ids["input_ids"].shape[1] :].tolist()


def test_adapter_template_ready_head_and_distillation_make_a_chain(tmp_path: Path, capsys) -> None:
    base, adapter, head = tmp_path / "base", tmp_path / "adapter", tmp_path / "head"
    write_family(base, "vicuna")
    write_adapter(adapter, base)
    write_head(head, base)
    write_conversations(tmp_path / "sharegpt.json")
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    (tmp_path / "recipe.yaml").write_text(RECIPE, "utf-8")
    question = {"question_id": 1, "category": "qa", "turns": ["the rain in the north"]}
    (tmp_path / "question.jsonl").write_text(json.dumps(question) + "\n")
    out = tmp_path / "out"
    overrides = [
        f"target.model={base}",
        f"target.adapter={adapter}",
        f"target.chat_template={tmp_path / 'template.jinja'}",
        f"draft.model={head}",
        "draft.adapt=lora",
        "draft.lora.rank=4",
        f"data.conversations={tmp_path / 'sharegpt.json'}",
    ]
    with served(tmp_path) as url:
        overrides.append(f"bench.prompts={url}/question.jsonl")
        recipe = load_recipe(str(tmp_path / "recipe.yaml"), overrides)
        run_recipe(recipe, out, "polybasic run")
    capsys.readouterr()
    # what was downloaded is not asked for again: its server is gone
    run_recipe(recipe, out, "polybasic run")
    assert capsys.readouterr().err.count("skipped") == 7

    manifest = read_manifest(out / "chain")
    merged = out / "target" / "merged"
    # the adapter counts, and the head is declared for what it was merged into
    assert weights_digest(merged) != weights_digest(base)
    config = json.loads((out / "draft" / "config.json").read_text())
    assert config["polybasic"]["target_sha256"] == weights_digest(merged)
    assert (out / "chain/target/model.safetensors").samefile(merged / "model.safetensors")
    for path in (out / "chain").rglob("*"):
        if path.suffix in (".json", ".md", ".html"):
            assert str(tmp_path) not in path.read_text("utf-8"), path
    training = manifest.training["draft"]
    assert training["imported_from"] == "head"
    assert training["simulated_accepted_length"] >= training["initial_accepted_length"]
    quality = manifest.quality["intermediate"]
    assert quality["distillation_steps"] == 3
    assert quality == json.loads((out / "intermediate" / "quality.json").read_text())

    report = json.loads((out / "chain" / "report" / "report.json").read_text())
    head_gain, copy_gain = report["adaptations"]
    assert (head_gain["member"], copy_gain["member"]) == ("draft", "intermediate")
    assert head_gain["before"] == training["initial_accepted_length"]
    assert head_gain["is_kept"] == (training["best_step"] > 0)
    assert copy_gain["after"] == quality["distillation_acceptance_after"]
    assert "Adapted members" in (out / "chain" / "report" / "report.md").read_text()

    prompt = [{"role": "user", "content": "the rain in the north"}]
    tokenizer = AutoTokenizer.from_pretrained(out / "chain" / "tokenizer")
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    assert text == "<s>USER: the rain in the north ASSISTANT:"
    chain = load_chain(out / "chain", dtype="float32")
    answer = chain.generate(prompt, max_new_tokens=24, temperature=0.0)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    assert answer.token_ids == greedy(merged, ids) != greedy(base, ids)

    calibration = (out / "data" / "plan_prompts.jsonl").read_text().splitlines()
    assert {json.loads(line)["category"] for line in calibration} == {"heldout"}
    assert len(calibration) >= 12


def test_two_models_make_a_chain_without_training(tmp_path: Path) -> None:
    """As `--small` does, planned and measured on the user's prompts."""
    shape = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3}
    write_family(tmp_path / "target", "qwen2")
    write_family(tmp_path / "small", "qwen2", num_hidden_layers=2, **shape)
    write_conversations(tmp_path / "sharegpt.json")
    (tmp_path / "recipe.yaml").write_text(RECIPE, "utf-8")
    overrides = [
        f"target.model={tmp_path / 'target'}",
        f"small={{model: {tmp_path / 'small'}}}",
        "train.kind=none",
        "quantize=null",
        f"data.conversations={tmp_path / 'sharegpt.json'}",
        "bench.prompts=heldout",
        "data.num_heldout=24",
    ]
    recipe = load_recipe(str(tmp_path / "recipe.yaml"), overrides)
    run_recipe(recipe, tmp_path / "out", "polybasic run")
    manifest = read_manifest(tmp_path / "out" / "chain")
    assert [member.kind for member in manifest.members] == ["decoder", "decoder"]
    assert manifest.members[1].dtype == "Q4_0"
    assert manifest.members[1].is_copy
    assert manifest.training == {}
    assert 0 < manifest.quality["small"]["top1_agreement"] <= 1
    assert manifest.plan.ngram is not None
    assert manifest.plans, "it is planned"
    report = json.loads((tmp_path / "out" / "chain" / "report" / "report.json").read_text())
    agreement = report["systems"]["polybasic_full"]["agreement"]
    assert agreement["identical"] + agreement["near_ties"] == agreement["answers"] > 0
