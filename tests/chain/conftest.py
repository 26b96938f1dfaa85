"""A tiny chain of random weights: a Llama target, its AWQ-shaped intermediate and a draft head."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from polybasic.chain.digests import weights_digest
from polybasic.chain.manifest import Manifest, Plan, Provenance, Tree
from polybasic.chain.package import package_chain

VOCAB_SIZE, HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_LAYERS = 64, 128, 256, 2
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, GROUP_SIZE = 4, 2, 32, 128
QUANTIZATION = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP_SIZE,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
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
    from tokenizers import Tokenizer, models
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
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCAB_SIZE - 2)}
    words |= {"<unk>": VOCAB_SIZE - 2, "<eos>": VOCAB_SIZE - 1}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<unk>")),
        unk_token="<unk>",
        eos_token="<eos>",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    ).save_pretrained(folder)


def write_intermediate(folder: Path, target: Path) -> None:
    """Random 4-bit words in AutoAWQ's GEMM layout beside the target's unquantized tensors."""
    from safetensors.torch import load_file

    torch.manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(target / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor.half()
            continue
        (out_size, in_size), prefix = tensor.shape, name.removesuffix(".weight")
        tensors[f"{prefix}.qweight"] = _random_words(in_size, out_size // 8)
        tensors[f"{prefix}.qzeros"] = _random_words(in_size // GROUP_SIZE, out_size // 8)
        scales = torch.rand(in_size // GROUP_SIZE, out_size) * 0.01
        tensors[f"{prefix}.scales"] = scales.half()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))


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


def _random_words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


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
