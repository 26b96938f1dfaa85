"""Random checkpoints of the families that people have, small, written by transformers itself.

Key names, config files (in the spelling of the hub's checkpoints, which transformers 4 wrote),
tokenizer classes and special tokens are the families' own; weights and vocabularies are not.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GemmaTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerBase,
    Qwen2Tokenizer,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
)

VOCAB_SIZE = 320
"""Larger than the tokenizers', as Qwen's and Phi's are."""
T5_VOCAB_SIZE = 48
"""Likewise."""
CONTEXT_TOKENS = 512
CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSTRUCTION = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}[INST] {{ message.content | trim }} [/INST]"
    "{% else %} {{ message.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
TURNS = (
    "{{ bos_token }}{% for message in messages %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """One architecture with the quirks of its published checkpoints.

    Attributes:
        model_type: as transformers names it.
        tokenizer: makes the family's own tokenizer, with a chat template.
        config: what differs from the small shape that all share.
        dtype: that its checkpoints are stored in.
        has_pickles: stored as pytorch_model-*.bin.
    """

    model_type: str
    tokenizer: Callable[[], PreTrainedTokenizerBase]
    config: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    has_pickles: bool = False


def sentencepiece_tokenizer() -> PreTrainedTokenizerBase:
    """Llama 2's kind: pieces with a word mark, bytes for the rest."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"aehilnorst", "▁t", "he", "▁the"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    tokenizer = LlamaTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges
    )
    tokenizer.chat_template = INSTRUCTION
    return tokenizer


def byte_level_tokenizer() -> PreTrainedTokenizerBase:
    """Qwen's and Llama 3's kind: bytes, and control tokens for turns."""
    vocabulary = {character: index for index, character in enumerate(sorted(ByteLevel.alphabet()))}
    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary |= {token: len(vocabulary) + index for index, token in enumerate(controls)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def gemma_tokenizer() -> PreTrainedTokenizerBase:
    """Gemma's kind: no mark before the first word, turns between control tokens."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = GemmaTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[],
        extra_special_tokens=["<start_of_turn>", "<end_of_turn>"],
    )
    tokenizer.chat_template = TURNS
    return tokenizer


_LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
_GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 32, "sliding_window": 24}

FAMILIES = {
    "llama2": Family(
        "llama", sentencepiece_tokenizer, {"num_key_value_heads": 4}, dtype=torch.float16
    ),
    "vicuna": Family(
        "llama",
        sentencepiece_tokenizer,
        {"num_key_value_heads": 4},
        dtype=torch.float16,
        has_pickles=True,
    ),
    "llama3": Family(
        "llama",
        byte_level_tokenizer,
        {"rope_parameters": {"rope_theta": 500000.0, **_LLAMA3_SCALING}},
    ),
    "llama32": Family(
        "llama",
        byte_level_tokenizer,
        {
            "rope_parameters": {"rope_theta": 500000.0, **_LLAMA3_SCALING},
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": Family("mistral", sentencepiece_tokenizer, {"sliding_window": 24}),
    "qwen2": Family(
        "qwen2",
        byte_level_tokenizer,
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    ),
    "qwen25": Family(
        "qwen2",
        byte_level_tokenizer,
        {
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": Family(
        "qwen3",
        byte_level_tokenizer,
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "head_dim": 64},
    ),
    "phi3": Family(
        "phi3",
        byte_level_tokenizer,
        {"sliding_window": 24, "pad_token_id": 256, "num_key_value_heads": 4},
    ),
    "gemma2": Family(
        "gemma2",
        gemma_tokenizer,
        {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": Family(
        "gemma3_text",
        gemma_tokenizer,
        {
            **_GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
        },
    ),
}

DISTINCT = ("llama2", "llama32", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")
"""One for each way in which they differ; the others combine what these have."""


def write_family(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    num_shards: int = 2,
    **changes: Any,
) -> None:
    """Write a random checkpoint of one of FAMILIES with its tokenizer.

    Norms and biases are random too, so that leaving one out shows.

    Args:
        folder: to write.
        family: a key of FAMILIES.
        seed: of the weights.
        dtype: of the weights; default: the family's own.
        num_shards: weight files (at least; an index is written for two and more).
        changes: of the config, as transformers names it.
    """
    described = FAMILIES[family]
    tokenizer = described.tokenizer()
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_TOKENS,
        "initializer_range": 0.1,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = CONFIG_MAPPING[described.model_type](**(shape | described.config | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
    model.to(dtype or described.dtype)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=num_bytes // num_shards + 1)
    if described.has_pickles:
        _store_as_pickles(folder)
    tokenizer.save_pretrained(folder)
    _write_legacy_config(folder / "config.json")


def t5_tokenizer() -> PreTrainedTokenizerBase:
    """T5's kind: a token for padding, which the decoder starts from, and an end after each text."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz.,:?", "▁the", "ing"]
    vocabulary = [(piece, -float(index + 1)) for index, piece in enumerate(pieces)]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0)


def write_t5(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> None:
    """Write a random checkpoint of FLAN-T5's kind with its tokenizer.

    Args:
        folder: to write.
        seed: of the weights.
        changes: of the config, as transformers names it.
    """
    shape = {
        "vocab_size": T5_VOCAB_SIZE,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 3,
        "num_decoder_layers": 3,
        "num_heads": 3,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "decoder_start_token_id": 0,
        "initializer_factor": 1.0,
    }
    torch.manual_seed(seed)
    model = T5ForConditionalGeneration(T5Config(**(shape | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            elif "relative_attention_bias" in name:
                parameter.normal_(0, 1)
    # as in FLAN-T5, apart from the embedding
    model.lm_head.weight = torch.nn.Parameter(torch.randn(T5_VOCAB_SIZE, model.config.d_model))
    model.to(dtype).save_pretrained(folder)
    t5_tokenizer().save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tie_word_embeddings": False}))


def _store_as_pickles(folder: Path) -> None:
    """Replace safetensors by the files that transformers 4 wrote before it had them."""
    from safetensors.torch import load_file

    for path in sorted(folder.glob("model*.safetensors")):
        torch.save(load_file(path), folder / _pickle_name(path.name))
        path.unlink()
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = json.loads(index.read_text())
        content["weight_map"] = {
            name: _pickle_name(file) for name, file in content["weight_map"].items()
        }
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(content))
        index.unlink()


def _pickle_name(name: str) -> str:
    return name.replace("model", "pytorch_model", 1).removesuffix(".safetensors") + ".bin"


def _write_legacy_config(path: Path) -> None:
    """Spell rotary parameters and dtype as transformers 4 did, which most checkpoints still do."""
    config = json.loads(path.read_text())
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.43.0"
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    rope.pop("partial_rotary_factor", None)
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    path.write_text(json.dumps(config, indent=2))
