"""Models written for llama.cpp, read back by its own package and by transformers."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.awq import QuantizedWeight, dequantize
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.gguf.export import export_gguf
from polybasic.chain.formats.gguf.splits import SPLITS
from polybasic.chain.formats.gguf.tensors import interleaved
from polybasic.chain.formats.gguf.writing import write_gguf
from tests.checkpoints import DISTINCT, FAMILIES, write_family
from tests.conftest import NUM_HEADS, NUM_KV_HEADS, ChainParts
from tests.deploy.serve.serving import write_byte_tokenizer
from tests.recipes.command_line import call, refusal

TEXTS = ("the then", " the  hen", "Straße 12, isn't it?\n", "a<s>b", "日本")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 64},
    "gemma3": {
        "query_pre_attn_scalar": 64,
        "layer_types": ["sliding_attention"] * 3,
    },
}
"""Of the test's models, to what llama.cpp computes."""


@pytest.fixture
def chain(tiny_chain_parts: ChainParts, tmp_path: Path) -> Path:
    write_byte_tokenizer(tiny_chain_parts.target)
    tiny_chain_parts.package(tmp_path / "chain")
    return tmp_path / "chain"


def values_of(path: Path) -> dict[str, np.ndarray]:
    """Tensors of a file as float32."""
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }


def field(path: Path, key: str) -> Any:
    found = gguf.GGUFReader(path).get_field(key)
    return None if found is None else found.contents()


def apart(file: Path, folder: Path) -> Path:
    """A folder that holds nothing but the file."""
    (folder / "alone").mkdir()
    shutil.copy(file, folder / "alone")
    return folder / "alone"


def written_family(folder: Path, family: str, **changes: Any) -> Path:
    write_family(folder, family, **(CHANGES.get(family, {}) | changes))
    write_gguf(folder, folder / "model.gguf")
    return folder


def test_the_target_is_kept_to_the_bit(chain: Path, tmp_path: Path) -> None:
    exported = export_gguf(chain, out=tmp_path / "out")
    assert {name: path.name for name, path in exported.files.items()} == {
        "target": "target-BF16.gguf",
        "intermediate": "intermediate-Q4_1.gguf",
    }
    assert "--model-draft" in exported.command
    stored = load_tensors(chain / "target")
    found = values_of(exported.files["target"])
    assert len(found) == len(stored)
    heads = {"q": NUM_HEADS, "k": NUM_KV_HEADS}
    for part in "qkv":
        expected = stored[f"model.layers.1.self_attn.{part}_proj.weight"].float()
        if part in heads:
            assert not np.array_equal(found[f"blk.1.attn_{part}.weight"], expected.numpy())
            expected = interleaved(expected, heads[part])
        assert np.array_equal(found[f"blk.1.attn_{part}.weight"], expected.numpy())
    for name, theirs in (("model.embed_tokens", "token_embd"), ("lm_head", "output")):
        assert np.array_equal(found[f"{theirs}.weight"], stored[f"{name}.weight"].float().numpy())
    assert field(exported.files["target"], "llama.block_count") == 2
    assert field(exported.files["target"], "general.name") == "tiny target"


def test_the_copy_in_4_bits_moves_by_less_than_a_hundredth_of_a_step(
    chain: Path, tmp_path: Path
) -> None:
    exported = export_gguf(chain, "intermediate", tmp_path / "out")
    stored, found = load_tensors(chain / "intermediate"), values_of(exported.files["intermediate"])
    exact = moved = 0
    for name, theirs in (("mlp.down_proj", "ffn_down"), ("self_attn.o_proj", "attn_output")):
        stem = f"model.layers.0.{name}"
        weight = QuantizedWeight.unpack(
            *(stored[f"{stem}.{part}"] for part in ("qweight", "qzeros", "scales"))
        )
        theirs = {
            "mlp.down_proj": "ffn_down",
            "self_attn.o_proj": "attn_output",
            "mlp.up_proj": "ffn_up",
        }
        values = torch.from_numpy(found[f"blk.0.{theirs[name]}.weight"])
        steps = weight.scales.float().repeat_interleave(weight.group_size, dim=1)
        off = (values - dequantize(weight)).abs() / steps
        assert off.max() <= 15 / 2048
        exact += int((off == 0).sum())
        moved += int((off > 0).sum())
    assert exact
    assert moved
    assert np.array_equal(
        found["token_embd.weight"], stored["model.embed_tokens.weight"].float().numpy()
    )


@pytest.mark.parametrize("family", DISTINCT)
def test_transformers_reads_the_same_weights(family: str, tmp_path: Path) -> None:
    """By its own reading of names, of norms and of the order of rows."""
    folder = written_family(tmp_path / "model", family)
    alone = apart(folder / "model.gguf", tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # it reads a Mistral as the Llama that it is, and of some others not all constants
    config = {} if family == "mistral" else {"config": expected.config}
    found = AutoModelForCausalLM.from_pretrained(
        alone, gguf_file="model.gguf", dtype=torch.float32, **config
    )
    theirs = dict(found.named_parameters())
    for name, weight in expected.named_parameters():
        if "gemma" in family and name.endswith("norm.weight"):  # rounded where one is added
            assert torch.allclose(weight, theirs[name], atol=1e-7), name
        else:
            assert torch.equal(weight, theirs[name]), name


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama32", {"llama.rope.freq_base": 5e5, "llama.attention.key_length": 64}),
        ("qwen3", {"qwen3.rope.freq_base": 1e6, "qwen3.attention.head_count_kv": 2}),
        ("phi3", {"phi3.attention.sliding_window": 0}),
        (
            "gemma2",
            {
                "gemma2.attn_logit_softcapping": 5.0,
                "gemma2.final_logit_softcapping": 3.0,
                "gemma2.attention.sliding_window": 24,
            },
        ),
        (
            "gemma3",
            {
                "gemma3.rope.freq_base": 1e6,
                "gemma3.rope.freq_base_swa": 1e4,
                "gemma3.rope.scaling.factor": 8.0,
                "gemma3.rope.scaling.type": "linear",
            },
        ),
    ],
)
def test_constants_that_transformers_does_not_read(
    family: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    file = written_family(tmp_path / "model", family) / "model.gguf"
    assert {key: field(file, key) for key in expected} == expected
    if family == "llama32":
        # of 32 frequencies the first turn often in 64 positions, the last hardly
        divisors = values_of(file)["rope_freqs.weight"]
        assert (divisors[0], divisors[-1]) == (1.0, 8.0)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("llama2", {"attention_bias": True}, "biases of q_proj, k_proj, v_proj, o_proj"),
        ("qwen3", {"rope_parameters": YARN}, "rotary scaling yarn"),
        ("gemma2", {"query_pre_attn_scalar": 32}, "scores are scaled by"),
        ("gemma3", {"layer_types": ["full_attention"] * 3}, "no windows"),
        ("gemma2", {"final_logit_softcapping": None}, "soft caps"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    family: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"llama.cpp computes this model otherwise: .*{why}"):
        written_family(tmp_path / "model", family, **changes)


def test_a_window_that_llama_cpp_lacks_is_said(tmp_path: Path) -> None:
    write_family(tmp_path / "model", "mistral")
    [warning] = write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    assert warning.startswith("llama.cpp has no window for mistral: after 24 tokens")


def byte_level(*splits: str) -> PreTrainedTokenizerFast:
    """With merges, a begin of text, and a control token for turns."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "he", "Ġthe", "<s>", "<|im_end|>"]
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokens.index("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>", chat_template="{{ 1 }}"
    )


@pytest.mark.parametrize("kind", ["llama2", "gemma2", "llama-bpe", "qwen2"])
def test_transformers_reads_the_same_tokenizer(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_family(folder, kind if kind in FAMILIES else "llama2", **CHANGES.get(kind, {}))
    if kind in SPLITS:
        byte_level(*SPLITS[kind].expressions).save_pretrained(folder)
    assert write_gguf(folder, folder / "model.gguf") == ()
    expected = AutoTokenizer.from_pretrained(folder)
    found = AutoTokenizer.from_pretrained(
        apart(folder / "model.gguf", tmp_path), gguf_file="model.gguf"
    )
    assert found.chat_template == expected.chat_template
    assert found.eos_token_id == expected.eos_token_id
    for text in TEXTS:
        ids = expected(text, add_special_tokens=False)["input_ids"]
        assert found(text, add_special_tokens=False)["input_ids"] == ids, text


def test_begin_of_text_and_ids_without_a_token(tmp_path: Path) -> None:
    write_family(tmp_path, "llama2")
    byte_level(*SPLITS["llama-bpe"].expressions).save_pretrained(tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf")
    ggml = {
        key: field(tmp_path / "model.gguf", f"tokenizer.ggml.{key}")
        for key in ("add_bos_token", "add_eos_token", "bos_token_id", "tokens", "token_type")
    }
    assert (ggml["add_bos_token"], ggml["add_eos_token"], ggml["bos_token_id"]) == (
        True,
        False,
        259,
    )
    assert len(ggml["tokens"]) == len(ggml["token_type"]) == 320
    assert ggml["tokens"][259:262] == ["<s>", "<|im_end|>", "[PAD261]"]
    assert ggml["token_type"][258:262] == [
        gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED
    ]  # fmt: skip


@pytest.mark.parametrize("split", [r"\w+", r" ?\p{L}+"])
def test_an_unknown_splitting_of_texts_is_refused(split: str, tmp_path: Path) -> None:
    write_family(tmp_path, "llama2")
    byte_level(split).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"llama.cpp has no such tokenizer: .*it splits texts by"):
        write_gguf(tmp_path, tmp_path / "model.gguf")


def test_ids_alone_need_no_tokenizer(tiny_target: Path) -> None:
    (tiny_target / "tokenizer.json").unlink()
    file = tiny_target / "model.gguf"
    write_gguf(tiny_target, file, matrices="Q4_0", stop=[7, 5])
    assert field(file, "tokenizer.ggml.eos_token_id") == 5
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert kinds["blk.0.ffn_up.weight"] == kinds["output.weight"] == "Q4_0"
    assert kinds["output_norm.weight"] == "F32"


def test_the_command(chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["export", chain, "--to", "gguf"]
    code, out, err = call(*command)
    assert (code, out) == (0, "target-gguf\n")
    assert "next: llama-server --model target-gguf/target-BF16.gguf --model-draft " in err
    assert call(*command)[0] == 0  # an export is replaced
    (tmp_path / "target-gguf" / "notes.txt").touch()
    assert "would replace something that is no export: target-gguf" in refusal(*command)
    draft = refusal(*command, "--member", "draft", "--out", "new")
    assert "no such model: draft; the chain's: target, intermediate" in draft
