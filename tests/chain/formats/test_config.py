"""config.json of models: what is read, in old spellings too, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import decoder_config
from polybasic.chain.formats.checkpoints.decoder_config import LayerKind
from polybasic.chain.formats.families.table import FAMILIES


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "mamba"}, "unsupported architecture: here model_type 'mamba'; supported:"),
        ({"model_type": None}, "unsupported architecture: here model_type None; supported: llama,"),
        ({"model_type": "gemma3"}, "unsupported architecture: here model_type 'gemma3'; supported"),
        ({"hidden_act": "gelu"}, "unsupported architecture: here hidden_act 'gelu'; supported: s"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "unsupported rotary scaling: here rope_type 'dynamic'; supported: default, linear, ",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "unsupported rotary scaling: here rope_type 'longrope'; supported: default, linear, ",
        ),
        (
            {"model_type": "phi3", "partial_rotary_factor": 0.75},
            "unsupported rotary scaling: here partial_rotary_factor 0.75; supported: heads that",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "unsupported architecture: here rope_type 'yarn'; supported: default",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["chunked_attention"] * 3},
            "unsupported architecture: here layer_types 'chunked_attention'; supported: full_",
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "unsupported architecture: here use_bidirectional_attention True; supported: False",
        ),
        ({"hidden_size": "64"}, "malformed model config: here hidden_size '64': it has"),
        ({"hidden_size": 63}, "malformed model config: here hidden_size 63: no multiple"),
        (
            {"rope_scaling": {"type": "yarn"}},
            "malformed model config: here factor None; it lies between",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention"]},
            "malformed model config: here layer_types of 1: num_hidden_layers is 3",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": "yes"},
            "malformed model config: here use_sliding_window 'yes': it has another type",
        ),
        ({"rope_scaling": 5}, "malformed model config: here rope_scaling 5: it is an obj"),
    ],
)
def test_unsupported_configs_are_refused(changed: dict[str, object], message: str) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
    }
    assert decoder_config(config, "here").head_dim == 16
    with pytest.raises(UserError) as refusal:
        decoder_config(config | changed, "here")
    assert str(refusal.value).startswith(message)
    assert len(str(refusal.value).splitlines()) == 1


def test_missing_config_key_is_named() -> None:
    with pytest.raises(UserError, match="model config lacks a key: here vocab_size"):
        decoder_config({"model_type": "llama"}, "here")


def test_legacy_spellings_are_read() -> None:
    """As the hub's config.json of Gemma 3 1B says it: a pattern and two bases."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
    }
    gemma = {
        "model_type": "gemma3_text",
        "sliding_window": 512,
        "sliding_window_pattern": 3,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
    }
    config = decoder_config(sizes | gemma, "here")
    local = LayerKind({"rope_type": "default", "rope_theta": 10000}, 512)
    everywhere = LayerKind({"rope_type": "default", "rope_theta": 1000000})
    layers = (local, local, everywhere) * 2 + (local,)
    assert config.layer_kinds == layers
    assert config.kinds == (local, everywhere)
    assert config.tie_word_embeddings
    mistral = decoder_config(sizes | {"model_type": "mistral"}, "here")
    assert mistral.kinds == (LayerKind({"rope_type": "default", "rope_theta": 1e4}, 4096),)
    llama = decoder_config(sizes | {"model_type": "llama", "sliding_window": 8}, "here")
    assert (llama.layer_kinds, llama.context_tokens, llama.biased) == ((), 2048, ())


SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
}
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 500000.0, "rope_scaling": None},
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16}},
    {
        "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    {
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}, "rope_theta": 5},
]
OWN_ROPES: dict[str, list[dict[str, Any]]] = {
    "phi3": [ROPES[0], ROPES[1], ROPES[6], {"original_max_position_embeddings": 4096}],
    "gemma3_text": [
        ROPES[0],
        ROPES[1],
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 3},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            }
        },
    ],
}
OTHERS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True, "sliding_window": None},
    {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5},
    {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3},
    {"layer_types": ["full_attention"] * 7, "final_logit_softcapping": None},
    {"layer_types": [*["sliding_attention"] * 6, "full_attention"], "query_pre_attn_scalar": 64},
]


# T5's has keys of its own: tests/chain/kernels/test_encoder_decoder.py
DECODERS = [family for family in FAMILIES.own if family.model_type != "t5"]


@pytest.mark.parametrize("family", DECODERS, ids=lambda family: family.model_type)
def test_configs_are_completed_as_transformers_completes_them(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = family.model_type
    ropes = OWN_ROPES.get(name, ROPES)
    # Mistral's and Phi-3's own classes have no types of layers
    others = OTHERS[: 4 if name in ("llama", "mistral", "phi3") else None]
    configs = [{"model_type": name} | SIZES | rope | other for rope in ropes for other in others]
    configs += [CONFIG_MAPPING[name](**SIZES | other).to_dict() for other in OTHERS[:3]]
    own = [decoder_config(config, "here") for config in configs]
    with monkeypatch.context() as patch:
        patch.setitem(FAMILIES._by_name, name, replace(family, defaults=None))
        assert own == [decoder_config(config, "here") for config in configs]
    changed = {**family.defaults, "rms_norm_eps": 0.5}
    monkeypatch.setitem(FAMILIES._by_name, name, replace(family, defaults=changed))
    assert own[0] != decoder_config(configs[0], "here")
