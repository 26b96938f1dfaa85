"""Exported heads, key by key against what the loaders of the engines ask for."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.heads.export import ENGINES, Engine, Exported, export_head, launch_command
from polybasic.chain.heads.importing import import_head
from polybasic.recipes.cli import main as cli
from tests.chain.heads.exported import content_of, loaded
from tests.conftest import HIDDEN_SIZE as H
from tests.conftest import INTERMEDIATE_SIZE as I
from tests.conftest import VOCAB_SIZE as V
from tests.conftest import ChainParts

# What vLLM 0.33.0 builds for a head of one layer: EagleLlamaForCausalLM and its LlamaModel in
# vllm/model_executor/models/llama_eagle.py, LlamaDecoderLayer (without its input norm) in llama.py.
# embed_tokens and lm_head are shared with the target (vllm/v1/spec_decode/llm_base_proposer.py).
K = 2 * H // 4
VLLM_PARAMETERS = {
    "model.embed_tokens.weight": (V, H),
    "model.fc.weight": (H, 2 * H),
    "model.layers.0.self_attn.qkv_proj.weight": (H + 2 * K, H),
    "model.layers.0.self_attn.o_proj.weight": (H, H),
    "model.layers.0.mlp.gate_up_proj.weight": (2 * I, H),
    "model.layers.0.mlp.down_proj.weight": (H, I),
    "model.layers.0.post_attention_layernorm.weight": (H,),
}
# SGLang 0.5.23, LlamaForCausalLMEagle in python/sglang/srt/models/llama_eagle.py: the same, but fc
# is a torch.nn.Linear with a bias.
SGLANG_PARAMETERS = VLLM_PARAMETERS | {"model.fc.bias": (H,)}
QKV_BIAS = {"model.layers.0.self_attn.qkv_proj.bias": (H + 2 * K,)}
# What eagle/model/cnets1.py of SafeAILab/EAGLE cb7e084 reads of a config.
EAGLE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "rope_theta",
    "vocab_size",
    "max_position_embeddings",
    "hidden_act",
)


def change_head(draft: Path, tensors: dict[str, Tensor], **config: Any) -> None:
    """Put tensors and keys into a draft folder."""
    save_file(load_tensors(draft) | tensors, draft / "model.safetensors", {"format": "pt"})
    (draft / "config.json").write_text(json.dumps(content_of(draft) | config))


def qkv_biases() -> dict[str, Tensor]:
    sizes = {"q": H, "k": K, "v": K}
    return {
        f"layers.0.self_attn.{part}_proj.bias": torch.randn(size).bfloat16()
        for part, size in sizes.items()
    }


@pytest.mark.parametrize("to", ENGINES)
def test_weights_are_kept_and_the_zero_bias_is_there(
    tiny_chain: Path, tmp_path: Path, to: Engine
) -> None:
    exported = export_head(tiny_chain, to, None, tmp_path / "out")
    assert (exported.folder, exported.member) == (tmp_path / "out", "draft")
    assert exported.model == str(tiny_chain / "target")
    assert exported.four_bit_copies == (tiny_chain / "intermediate",)
    files = {"config.json", "pytorch_model.bin" if to == "eagle" else "model.safetensors"}
    assert {path.name for path in exported.folder.iterdir()} == files
    stored = load_tensors(tiny_chain / "draft")
    written = load_tensors(exported.folder)
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)
    assert not written["fc.bias"].any()


@pytest.mark.parametrize("to", ENGINES)
def test_a_missing_bias_is_written_as_zeros(
    tiny_chain_parts: ChainParts, tmp_path: Path, to: Engine
) -> None:
    tensors = load_tensors(tiny_chain_parts.draft)
    del tensors["fc.bias"]
    save_file(tensors, tiny_chain_parts.draft / "model.safetensors")
    tiny_chain_parts.package(tmp_path / "chain")
    folder = export_head(tmp_path / "chain", to, None, tmp_path / "out").folder
    bias = load_tensors(folder)["fc.bias"]
    assert bias.shape == (H,)
    assert bias.dtype == torch.bfloat16
    assert not bias.any()


def test_vllm_finds_all_parameters(tiny_chain: Path, tmp_path: Path) -> None:
    folder = export_head(tiny_chain, "vllm", None, tmp_path / "out").folder
    found = loaded(folder)
    # AutoWeightsLoader of models/utils.py ignores biases of modules that have none
    assert found.pop("model.fc.bias") == (H,)
    assert found == VLLM_PARAMETERS
    config = content_of(folder)
    # EAGLEConfig puts "Eagle" before it: EagleLlamaForCausalLM, as in registry.py
    assert config["architectures"] == ["LlamaForCausalLM"]
    # AutoConfig makes a LlamaConfig of it, which EAGLEConfig wraps (vllm/config/speculative.py)
    assert config["model_type"] == "llama"
    # LlamaDecoderLayer: `attention_bias` or `bias` give q, k, v and o biases, `qkv_bias` overrides
    assert (config["bias"], config["attention_bias"], config["qkv_bias"]) == (False, False, False)
    assert config["num_hidden_layers"] == 1
    assert config["tie_word_embeddings"] is False


def test_sglang_finds_all_parameters(tiny_chain: Path, tmp_path: Path) -> None:
    folder = export_head(tiny_chain, "sglang", None, tmp_path / "out").folder
    assert loaded(folder) == SGLANG_PARAMETERS
    config = content_of(folder)
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert config["model_type"] == "llama"
    # LlamaDecoderLayer of llama.py: `attention_bias` or `bias` give q, k, v and o biases
    assert (config["bias"], config["attention_bias"]) == (False, False)
    # LlamaForCausalLMEagle ties lm_head by it; else the target's is set
    assert config["tie_word_embeddings"] is False


def test_a_loader_that_misses_a_tensor_shows(tiny_chain: Path, tmp_path: Path) -> None:
    folder = export_head(tiny_chain, "sglang", None, tmp_path / "out").folder
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        save_file(rest, folder / "model.safetensors")
        assert loaded(folder) != SGLANG_PARAMETERS


def test_eagle_reads_its_keys(tiny_chain: Path, tmp_path: Path) -> None:
    folder = export_head(tiny_chain, "eagle", None, tmp_path / "out").folder
    config, ours = content_of(folder), content_of(tiny_chain / "target")
    # EaModel makes fc with a bias unless the config says `bias: false`
    assert config["bias"] is True
    assert config["qkv_bias"] is False
    assert config["rope_scaling"] is None
    for key in EAGLE_KEYS:
        expected = {"rope_theta": 10000.0, "num_hidden_layers": 1}.get(key, ours.get(key))
        assert config[key] == expected, key
    pickled = torch.load(folder / "pytorch_model.bin", weights_only=True)
    assert pickled.keys() == load_tensors(tiny_chain / "draft").keys()


@pytest.mark.parametrize("has_biases", [False, True], ids=["no biases", "biases"])
def test_an_export_to_eagle_comes_back_bit_for_bit(
    tiny_chain_parts: ChainParts, tmp_path: Path, has_biases: bool
) -> None:
    if has_biases:
        biases = qkv_biases() | {"fc.bias": torch.randn(H).bfloat16()}
        change_head(tiny_chain_parts.draft, biases, qkv_bias=True)
    tiny_chain_parts.package(tmp_path / "chain")
    folder = export_head(tmp_path / "chain", "eagle", "draft", tmp_path / "out").folder
    target = tmp_path / "chain" / "target"
    embedding = {"embed_tokens.weight": load_tensors(target)["model.embed_tokens.weight"]}
    # the fixture's head has an embedding of its own, which no trained head has
    with pytest.raises(UserError, match="head of another model"):
        import_head(folder, target, tmp_path / "again")
    change_head(tiny_chain_parts.draft, embedding)
    tiny_chain_parts.package(tmp_path / "chain")
    export_head(tmp_path / "chain", "eagle", "draft", tmp_path / "out")
    summary = import_head(folder, target, tmp_path / "again")
    assert (summary["has_fc_bias"], summary["has_qkv_biases"]) == (has_biases, has_biases)
    stored, back = load_tensors(tmp_path / "chain" / "draft"), load_tensors(tmp_path / "again")
    assert back.keys() == stored.keys()
    for name in stored:
        assert torch.equal(back[name], stored[name])
        assert back[name].dtype == stored[name].dtype
    assert content_of(tmp_path / "again")["polybasic"]["target_sha256"] == weights_digest(target)


def test_biases_of_attention(tiny_chain_parts: ChainParts, tmp_path: Path) -> None:
    change_head(tiny_chain_parts.draft, qkv_biases())
    tiny_chain_parts.package(tmp_path / "chain")

    def export(to: Engine) -> Path:
        return export_head(tmp_path / "chain", to, None, tmp_path / to).folder

    # LlamaDecoderLayer: `qkv_bias` alone gives biases on q, k and v and none on o
    assert content_of(export("vllm"))["qkv_bias"] is True
    assert content_of(tmp_path / "vllm")["bias"] is False
    assert loaded(tmp_path / "vllm") == SGLANG_PARAMETERS | QKV_BIAS
    # Qwen2ForCausalLMEagle of qwen2_eagle.py: qkv_proj with, o_proj without a bias (qwen2.py)
    config = content_of(export("sglang"))
    assert (config["architectures"], config["model_type"]) == (["Qwen2ForCausalLMEagle"], "qwen2")
    assert loaded(tmp_path / "sglang") == SGLANG_PARAMETERS | QKV_BIAS
    assert content_of(export("eagle"))["qkv_bias"] is True


def test_vllm_would_drop_a_bias_of_fc(tiny_chain_parts: ChainParts, tmp_path: Path) -> None:
    change_head(tiny_chain_parts.draft, {"fc.bias": torch.ones(H).bfloat16()})
    tiny_chain_parts.package(tmp_path / "chain")
    with pytest.raises(UserError) as refused:
        export_head(tmp_path / "chain", "vllm", None, tmp_path / "out")
    assert str(refused.value) == (
        "vLLM does not compute this head: fc.bias of draft is not zero, and its EAGLE class drops "
        "it; run the chain here, or export it --to eagle for other readers"
    )
    assert not (tmp_path / "out").exists()
    folder = export_head(tmp_path / "chain", "sglang", None, tmp_path / "out").folder
    assert load_tensors(folder)["fc.bias"].all()


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_scaled_rotations_are_spelled_as_transformers_reads_them(
    tiny_chain_parts: ChainParts, tmp_path: Path, to: Engine
) -> None:
    change_head(tiny_chain_parts.draft, {}, rope_scaling=LLAMA3_ROPE, rope_parameters=None)
    tiny_chain_parts.package(tmp_path / "chain")
    exported = export_head(tmp_path / "chain", to, None, tmp_path / "out")
    assert content_of(exported.folder)["rope_scaling"] == LLAMA3_ROPE
    assert exported.warnings == ()


def test_what_eagles_code_does_not_load_is_reported(
    tiny_chain_parts: ChainParts, tmp_path: Path
) -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    for scaling, theta, num_warnings in ((LLAMA3_ROPE, 1e4, 1), (linear, 1e6, 1), (linear, 1e4, 0)):
        change_head(
            tiny_chain_parts.draft,
            {},
            rope_parameters=None,
            rope_scaling=scaling,
            rope_theta=theta,
        )
        tiny_chain_parts.package(tmp_path / "chain")
        exported = export_head(tmp_path / "chain", "eagle", None, tmp_path / "out")
        assert len(exported.warnings) == num_warnings
    # the two keys that its config class accepts
    assert content_of(exported.folder)["rope_scaling"] == {"type": "linear", "factor": 2.0}


def test_a_head_of_another_member_goes_with_that_member(
    tiny_four_chain: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        export_head(tiny_four_chain, "vllm", None, tmp_path / "out")
    assert str(refused.value) == (
        "which draft head: the chain's heads: draft, small_draft; name one with --member"
    )
    exported = export_head(tiny_four_chain, "vllm", "small_draft", tmp_path / "out")
    assert exported.model == str(tiny_four_chain / "small")
    assert exported.four_bit_copies == ()


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ("drafft", "no such member: drafft; the chain's heads: draft; name one with --member"),
        ("intermediate", "member is no draft head: intermediate; the chain's heads: draft; name"),
    ],
)
def test_a_wrong_member_is_reported(
    tiny_chain: Path, tmp_path: Path, member: str, message: str
) -> None:
    with pytest.raises(UserError) as refused:
        export_head(tiny_chain, "vllm", member, tmp_path / "out")
    assert str(refused.value).startswith(message)


def test_only_an_export_is_replaced(tiny_chain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export_head(tiny_chain, "vllm", None, out)
    export_head(tiny_chain, "eagle", None, out)
    assert {path.name for path in out.iterdir()} == {"config.json", "pytorch_model.bin"}
    (out / "notes.txt").write_text("mine")
    message = f"would replace something that is no export: {out}; choose another with --out"
    with pytest.raises(UserError, match=message):
        export_head(tiny_chain, "vllm", None, out)
    assert (out / "notes.txt").read_text() == "mine"
    for other in (tiny_chain / "draft", tiny_chain / "chain.json"):
        with pytest.raises(UserError, match="would replace something that is no export"):
            export_head(tiny_chain, "vllm", None, other)


def test_launch_commands() -> None:
    exported = Exported(Path("my heads/draft"), "draft", "eagle2", "org/model")
    assert launch_command("vllm", exported) == (
        "vllm serve org/model --speculative-config '"
        '{"method": "eagle", "model": "my heads/draft", "num_speculative_tokens": 5}\''
    )
    sglang = (
        "python -m sglang.launch_server --model-path org/model --speculative-algorithm EAGLE "
        "--speculative-draft-model-path 'my heads/draft' --speculative-num-steps 5 "
        "--speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
    )
    assert launch_command("sglang", exported) == sglang
    trimmed = replace(exported, hot_tokens=Path("my heads/draft/hot.pt"))
    assert launch_command("sglang", trimmed) == (
        f"{sglang} --speculative-token-map 'my heads/draft/hot.pt'"
    )
    assert launch_command("eagle", exported) == (
        "EaModel.from_pretrained(base_model_path='org/model', ea_model_path='my heads/draft', "
        "use_eagle3=False)"
    )


def test_launch_commands_of_an_eagle3_head() -> None:
    exported = Exported(Path("head"), "draft", "eagle3", "org/model")
    assert '"method": "eagle3"' in launch_command("vllm", exported)
    assert "--speculative-algorithm EAGLE3 " in launch_command("sglang", exported)
    assert launch_command("eagle", exported).endswith("use_eagle3=True)")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def test_the_command_prints_the_folder_and_what_comes_next(
    tiny_chain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[..., tuple[int, str, str]],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call("export", str(tiny_chain), "--to", "sglang")
    assert (code, out) == (0, "draft-sglang\n")
    *_, awq, following = err.strip().splitlines()
    assert awq.startswith(
        f"{tiny_chain / 'intermediate'}, its 4-bit copy, is an ordinary AWQ model"
    )
    assert following.startswith(
        "wrote draft into draft-sglang; next: python -m sglang.launch_server"
    )
    assert content_of(Path("draft-sglang"))["architectures"] == ["LlamaForCausalLMEagle"]
    code, out, err = call("export", str(tiny_chain), "--to", "tgi")
    assert (code, out) == (2, "")
    assert err == "error: unknown engine: --to tgi; use one of eagle, vllm, sglang, int8, gguf\n"
    assert call("export", str(tmp_path / "nowhere"), "--to", "vllm")[0] == 2
