"""Sizes of the models that shipped recipes name, as their config.json on the hub has them."""

import json
from pathlib import Path
from typing import Any

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
_LLAMA2 = _LLAMA | {"vocab_size": 32000, "max_position_embeddings": 4096}
_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
_LLAMA3 = _LLAMA | {
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
_SCALED = {
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
_QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}

_QWEN2_TIED = _QWEN2 | {"vocab_size": 151936, "num_key_value_heads": 2, "tie_word_embeddings": True}

_FLAN_T5: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": 32128,
    "d_kv": 64,
    "feed_forward_proj": "gated-gelu",
    "layer_norm_epsilon": 1e-6,
    "decoder_start_token_id": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def _flan_t5(width: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return _FLAN_T5 | {
        "d_model": width,
        "d_ff": inner,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_heads": heads,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "lmsys/vicuna-7b-v1.5": _LLAMA2 | _7B,
    "lmsys/vicuna-13b-v1.5": _LLAMA2
    | {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    },
    "meta-llama/Llama-2-7b-chat-hf": _LLAMA2 | _7B,
    "meta-llama/Llama-2-70b-chat-hf": _LLAMA2 | _70B,
    "meta-llama/Meta-Llama-3-8B-Instruct": _LLAMA3 | _8B | {"max_position_embeddings": 8192},
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA3 | _8B | _SCALED,
    "meta-llama/Llama-3.1-70B-Instruct": _LLAMA3 | _70B | _SCALED,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA3
    | _SCALED
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2-7B-Instruct": _QWEN2
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "Qwen/Qwen2.5-72B-Instruct": _QWEN2 | _70B | {"intermediate_size": 29568},
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": _QWEN2_TIED
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": _QWEN2_TIED
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
    "Qwen/Qwen3-8B": {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "attention_bias": False,
    },
    "google/flan-t5-small": _flan_t5(512, 1024, 8, 6),
    "google/flan-t5-base": _flan_t5(768, 2048, 12, 12),
    "google/flan-t5-xl": _flan_t5(2048, 5120, 24, 32),
}
NUM_PARAMETERS = {
    "lmsys/vicuna-7b-v1.5": 6_738_415_616,
    "lmsys/vicuna-13b-v1.5": 13_015_864_320,
    "meta-llama/Llama-2-7b-chat-hf": 6_738_415_616,
    "meta-llama/Llama-2-70b-chat-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "Qwen/Qwen2-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "google/flan-t5-small": 76_961_152,
    "google/flan-t5-base": 247_577_856,
    "google/flan-t5-xl": 2_849_757_184,
}
"""As the hub counts them in the safetensors files."""


def write_config(folder: Path, model: str) -> Path:
    """A folder with nothing but the model's config.json."""
    path = folder / model.replace("/", "--")
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIGS[model]))
    return path
