"""What a decoder needs to know of a checkpoint's config.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polybasic.chain.errors import UserError
from polybasic.chain.files import read_json

SUPPORTED_MODEL_TYPES = ("llama",)
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and constants of a decoder in the Llama family's layout.

    `rope` keeps the checkpoint's rotary parameters as transformers names them
    (rope_type, rope_theta, factor, ...).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_tokens: int
    tie_word_embeddings: bool
    rope: dict[str, Any]

    @property
    def query_groups(self) -> int:
        """Query heads that read one key/value head."""
        return self.num_heads // self.num_kv_heads


def read_decoder_config(folder: Path) -> DecoderConfig:
    """Read `folder/config.json`.

    Raises:
        UserError: no config, or an architecture, activation, bias or rotary scaling that the
            decoder does not compute.
    """
    path = folder / "config.json"
    return decoder_config(read_json(path, "model config"), str(path))


def decoder_config(config: dict[str, Any], where: str) -> DecoderConfig:
    """Translate the content of a config.json; `where` names it in errors.

    Raises:
        UserError: as `read_decoder_config`.
    """
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UserError(
            "unsupported architecture",
            f"{where} model_type {model_type!r}",
            f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}",
        )
    for key, supported in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if config.get(key, supported) != supported:
            raise UserError(
                "unsupported architecture",
                f"{where} {key} {config[key]!r}",
                f"only {key} {supported!r} is supported",
            )
    missing = [key for key in _REQUIRED if key not in config]
    if missing:
        raise UserError("model config lacks a key", f"{where} {missing[0]}", "complete the config")
    num_heads = config["num_attention_heads"]
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        rms_norm_eps=config["rms_norm_eps"],
        context_tokens=config["max_position_embeddings"],
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        rope=_rope_parameters(config, where),
    )


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)


def _rope_parameters(config: dict[str, Any], where: str) -> dict[str, Any]:
    # transformers 5 writes rope_parameters; older checkpoints have rope_theta and rope_scaling.
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if rope["rope_type"] not in SUPPORTED_ROPE_TYPES:
        raise UserError(
            "unsupported rotary scaling",
            f"{where} rope_type {rope['rope_type']!r}",
            f"supported: {', '.join(SUPPORTED_ROPE_TYPES)}",
        )
    return rope
