"""T5 1.1 and FLAN-T5: encoder-decoders with gated MLPs (Raffel et al., 2020; Shazeer, 2020)."""

from collections.abc import Mapping
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.decoder_config import EncoderConfig
from polybasic.chain.formats.families.family import Family, Read
from polybasic.chain.formats.families.reading import malformed

_NAMES = {
    "hidden_size": "d_model",
    "head_dim": "d_kv",
    "intermediate_size": "d_ff",
    "num_attention_heads": "num_heads",
}
_ACTIVATIONS = {"gated-gelu": "gelu_pytorch_tanh", "gated-silu": "silu"}
_BUCKETS, _DISTANCE = "relative_attention_num_buckets", "relative_attention_max_distance"
_CONTEXT_TOKENS = 2048
"""Distances are counted without a limit, but an encoder compares all tokens of a source at once."""


def _spelled(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    for name in (*_NAMES.values(), "num_layers"):
        if name not in config:
            raise UserError("model config lacks a key", f"{where} {name}", "complete the config")
        _check_number(config[name], where, name, 1)
    activation = config.get("feed_forward_proj", "relu")
    if activation not in _ACTIVATIONS:
        raise _unsupported(where, f"feed_forward_proj {activation!r}")
    # transformers writes the second where it completes the first
    is_scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    if is_scaled:
        raise _unsupported(where, "tie_word_embeddings that is not false")
    num_layers = config["num_layers"]
    num_decoder_layers = config.get("num_decoder_layers")
    start = config.get("decoder_start_token_id")
    start = config.get("pad_token_id", 0) if start is None else start
    _check_number(start, where, "decoder_start_token_id", 0)
    num_buckets = config.get(_BUCKETS, 32)
    _check_number(num_buckets, where, _BUCKETS, 4)
    # each half of a direction's buckets has some
    _check_number(config.get(_DISTANCE, 128), where, _DISTANCE, num_buckets)
    return {
        **config,
        **{name: config[own] for name, own in _NAMES.items()},
        "num_hidden_layers": num_layers if num_decoder_layers is None else num_decoder_layers,
        "rms_norm_eps": config.get("layer_norm_epsilon", 1e-6),
        "hidden_act": _ACTIVATIONS[activation],
        "max_position_embeddings": _CONTEXT_TOKENS,
        "tie_word_embeddings": False,
        "decoder_start_token_id": start,
    }


def _check_number(value: Any, where: str, name: str, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise malformed(where, f"{name} {value!r}", f"it is a whole number from {least} on")


def _unsupported(where: str, what: str) -> UserError:
    return UserError("unsupported T5", f"{where} {what}", "supported: T5 1.1 and FLAN-T5")


def _fields(read: Read) -> dict[str, Any]:
    encoder = EncoderConfig(
        read.num_layers,
        getattr(read, _BUCKETS),
        getattr(read, _DISTANCE),
        read.decoder_start_token_id,
    )
    return {"attention_scale": 1.0, "encoder": encoder}


T5 = Family(
    "t5",
    _fields,
    defaults={
        "is_encoder_decoder": True,
        "num_layers": 1,
        _BUCKETS: 32,
        _DISTANCE: 128,
        "decoder_start_token_id": 0,
    },
    spelled=_spelled,
)
