"""config.json of models: what is read, in old spellings too, and what is refused."""

import pytest

from polybasic.chain.errors import UserError
from polybasic.chain.formats.config import decoder_config
from polybasic.chain.formats.decoder_config import LayerKind


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
            "malformed model config: here (Missing required keys in `rope_parameters` for",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["chunked_attention"] * 3},
            "unsupported architecture: here layer_types 'chunked_attention'; supported: full_",
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "unsupported architecture: here use_bidirectional_attention True; supported: False",
        ),
        ({"hidden_size": "64"}, "malformed model config: here (TypeError: Field 'hidden_size' exp"),
        ({"hidden_size": 63}, "malformed model config: here (ValueError: The hidden size (63) is"),
        ({"rope_scaling": 5}, "malformed model config: here (TypeError: Field 'rope_parameters'"),
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
