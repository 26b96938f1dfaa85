"""Shared fixtures: a tiny chain of random weights. No network, no GPU."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DS_ACCELERATOR", "cpu")


import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from polybasic.chain.awq import QUANTIZATION_CONFIG, QuantizedWeight
from polybasic.chain.digests import weights_digest
from polybasic.chain.manifest import Manifest, Plan, Provenance, Tree
from polybasic.chain.package import package_chain

VOCAB_SIZE, HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_LAYERS = 64, 128, 256, 2
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, GROUP_SIZE = 4, 2, 32, 128
PLAN = Plan(
    members=("target", "intermediate", "draft"),
    tree=Tree(depth=3, top_k=2, rows=6),
    flush_length=5,
)
PROVENANCE = Provenance(
    recipe={"name": "tiny", "seed": 0},
    command="polybasic run recipes/tiny.yaml",
    package_versions={"polybasic": "0.1.0"},
    data_digests={"conversations": "0" * 64},
)


@dataclass(frozen=True)
class ChainParts:
    """Folders of the three models, free to be changed by a test."""

    target: Path
    intermediate: Path
    draft: Path

    def package(self, out: Path, **changes: Any) -> Manifest:
        """`package_chain` with everything named."""
        arguments: dict[str, Any] = {
            "target": self.target,
            "target_reference": str(self.target),
            "copy_target": True,
            "intermediate": self.intermediate,
            "draft": self.draft,
            "plan": PLAN,
            "provenance": PROVENANCE,
            "quality": {"mean_kl": 0.012345, "top1_agreement": 0.97},
            "training": {"simulated_accepted_length": 3.5, "steps": 10},
        }
        return package_chain(out, **(arguments | changes))


def write_target(folder: Path) -> None:
    """A random bfloat16 Llama and its tokenizer, written by transformers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCAB_SIZE - 2)}
    words |= {"<unk>": VOCAB_SIZE - 2, "<eos>": VOCAB_SIZE - 1}
    tokenizer = Tokenizer(models.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<eos>",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    ).save_pretrained(folder)


def write_intermediate(folder: Path, target: Path) -> None:
    """The target in 4 bits by rounding to the nearest, in AutoAWQ's GEMM layout."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(target / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor.half()
            continue
        weight, prefix = round_to_nearest(tensor.float()), name.removesuffix(".weight")
        for part, packed in zip(("qweight", "qzeros", "scales"), weight.pack(), strict=True):
            tensors[f"{prefix}.{part}"] = packed.contiguous()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": QUANTIZATION_CONFIG})
    )


def write_draft(folder: Path, target: Path) -> None:
    """A random EAGLE-2 head that says it was trained for `target`."""
    torch.manual_seed(2)
    key_size = NUM_KV_HEADS * HEAD_SIZE
    shapes = {
        "embed_tokens.weight": (VOCAB_SIZE, HIDDEN_SIZE),
        "fc.weight": (HIDDEN_SIZE, 2 * HIDDEN_SIZE),
        "fc.bias": (HIDDEN_SIZE,),
        "layers.0.self_attn.q_proj.weight": (HIDDEN_SIZE, HIDDEN_SIZE),
        "layers.0.self_attn.k_proj.weight": (key_size, HIDDEN_SIZE),
        "layers.0.self_attn.v_proj.weight": (key_size, HIDDEN_SIZE),
        "layers.0.self_attn.o_proj.weight": (HIDDEN_SIZE, HIDDEN_SIZE),
        "layers.0.mlp.gate_proj.weight": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "layers.0.mlp.up_proj.weight": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "layers.0.mlp.down_proj.weight": (HIDDEN_SIZE, INTERMEDIATE_SIZE),
        "layers.0.post_attention_layernorm.weight": (HIDDEN_SIZE,),
    }
    folder.mkdir()
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    tensors["fc.bias"].zero_()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "polybasic": {"target_sha256": weights_digest(target)}}
    (folder / "config.json").write_text(json.dumps(config))


def round_to_nearest(weight: torch.Tensor) -> QuantizedWeight:
    """4-bit codes of `weight` [out, in], between the extremes of each group of inputs."""
    groups = weight.unflatten(1, (-1, GROUP_SIZE))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales).round().clamp(0, 15)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    return QuantizedWeight(codes.flatten(1).to(torch.uint8), zeros.to(torch.uint8), scales)


@pytest.fixture(scope="session")
def _tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_target(folder / "target")
    write_intermediate(folder / "intermediate", folder / "target")
    write_draft(folder / "draft", folder / "target")
    return folder


@pytest.fixture
def tiny_target(_tiny_models: Path, tmp_path: Path) -> Path:
    """A random Llama checkpoint with its tokenizer, the test's own copy."""
    return Path(shutil.copytree(_tiny_models / "target", tmp_path / "tiny_target"))


@pytest.fixture
def tiny_chain_parts(_tiny_models: Path, tmp_path: Path) -> ChainParts:
    """The three models that a chain is made of, the test's own copies."""
    models = Path(shutil.copytree(_tiny_models, tmp_path / "models"))
    return ChainParts(models / "target", models / "intermediate", models / "draft")


@pytest.fixture
def tiny_chain(tiny_chain_parts: ChainParts, tmp_path: Path) -> Path:
    """A packed chain that holds its own target."""
    tiny_chain_parts.package(tmp_path / "chain")
    return tmp_path / "chain"
