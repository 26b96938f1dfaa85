"""What a GGUF file says of a model, as a config.json."""

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import decoder_config
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig
from polybasic.chain.formats.checkpoints.shapes import expected_shapes
from polybasic.chain.formats.gguf.architectures import ARCHITECTURES, scaled_width
from polybasic.chain.formats.gguf.header import Header, TensorPlace
from polybasic.chain.formats.gguf.tensors import llama3_divisors

_ROPE_FACTORS = "rope_freqs.weight"
_UNREAD = "attn_rot_embd.weight"
"""That old files hold for each layer, and nothing reads."""
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Of all models of Llama 3.1 and 3.2; their factors differ."""
_SUFFIXES = (".weight", ".bias")


def config_of(header: Header) -> dict[str, Any]:
    """A config.json that says the same as the file's header.

    Raises:
        UserError: an architecture, a rotary scaling or a size that the runtime does not compute, or
            what the file must say and does not.
    """
    named = header.text("general.architecture")
    read = _READERS.get(named)
    if read is None:
        raise UserError(
            "unsupported architecture",
            f"{header.path} general.architecture {named!r:.80}",
            f"supported: {', '.join(_READERS)}",
        )
    if header.integer(f"{named}.expert_count", 0):
        raise UserError(
            "unsupported architecture",
            f"{header.path} is a mixture of {header.integer(f'{named}.expert_count')} experts",
            "name a model without experts",
        )
    size, num_heads = _integer(header, "embedding_length"), _integer(header, "attention.head_count")
    if num_heads < 1 or size < 1:
        header.refuse(f"{named}.attention.head_count", "a number from 1 on")
    embedding = _tensor(header, "token_embd.weight")
    head_dim = _integer(header, "attention.key_length", size // num_heads)
    content: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "hidden_size": size,
        "intermediate_size": _integer(header, "feed_forward_length"),
        "num_hidden_layers": _integer(header, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _integer(header, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": _integer(header, "context_length"),
        "rms_norm_eps": _real(header, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_theta": _real(header, "rope.freq_base", 1e4),
        "rope_scaling": _rope_scaling(header),
    }
    for key, expected in (("rope.dimension_count", head_dim), ("attention.value_length", head_dim)):
        if (found := _integer(header, key, expected)) != expected:
            raise UserError(
                "unsupported architecture",
                f"{header.path} {named}.{key} is {found}",
                f"supported: as the head size, {expected}",
            )
    content |= read(header, content)
    decoder = decoder_config(content, f"{header.path}")
    if _ROPE_FACTORS in header.tensors:
        content["rope_scaling"] = _llama3_scaling(header, decoder)
    return content


def places_of(header: Header, content: dict[str, Any]) -> dict[str, TensorPlace]:
    """Where each tensor of a checkpoint lies in the file, by the checkpoint's names.

    Args:
        content: of the config.json that `config_of` gives.

    Raises:
        UserError: a tensor is missing, has another shape, or is none of the architecture's.
    """
    decoder = decoder_config(content, f"{header.path}")
    names = gguf.get_tensor_name_map(ARCHITECTURES[content["model_type"]], decoder.num_layers)
    places: dict[str, TensorPlace] = {}
    rest = set(header.tensors)
    for name, shape in expected_shapes("decoder", decoder, None, set()):
        theirs = names.get_name(name, try_suffixes=_SUFFIXES)
        place = _tensor(header, theirs or name)
        if place.shape != shape:
            raise UserError(
                "tensor shape mismatch",
                f"{theirs} in {header.path} is {list(place.shape)}, by its keys {list(shape)}",
                "fetch or convert the file again",
            )
        places[name] = place
        rest.discard(theirs or name)
    rest = {name for name in rest if name != _ROPE_FACTORS and not name.endswith(_UNREAD)}
    if rest:
        raise UserError(
            "unsupported architecture",
            f"{header.path} holds {min(rest)}, which a {content['model_type']} does not have",
            "name a file that holds the whole model and nothing else",
        )
    return places


def _llama(header: Header, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }


def _qwen2(header: Header, content: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def _qwen3(header: Header, content: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def _phi3(header: Header, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": _integer(header, "attention.sliding_window", 0) or None,
    }


def _gemma2(header: Header, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": _integer(header, "attention.sliding_window", 4096),
        "attn_logit_softcapping": _real(header, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _real(header, "final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": scaled_width("gemma2", content),
    }


def _gemma3(header: Header, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": _integer(header, "attention.sliding_window"),
        "rope_local_base_freq": _real(header, "rope.freq_base_swa", 1e4),
        "final_logit_softcapping": _real(header, "final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": scaled_width("gemma3_text", content),
    }


_READERS: dict[str, Callable[[Header, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
"""By general.architecture: what a config.json says beside sizes."""


def _rope_scaling(header: Header) -> dict[str, Any] | None:
    kind = header.text(_key(header, "rope.scaling.type"), "none")
    factor = _real(header, "rope.scaling.factor", 1.0)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UserError(
            "unsupported rotary scaling",
            f"{header.path} {_key(header, 'rope.scaling.type')} {kind!r:.80}",
            "supported: none, linear, yarn and that of Llama 3",
        )
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": _integer(
            header, "rope.scaling.original_context_length", _integer(header, "context_length")
        ),
        "beta_fast": _real(header, "rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": _real(header, "rope.scaling.yarn_beta_slow", 1.0),
    }
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if (found := _real(header, f"rope.scaling.{key}", 1.0)) != 1.0:
            raise UserError(
                "unsupported rotary scaling",
                f"{header.path} {_key(header, f'rope.scaling.{key}')} {found:g}",
                "supported: 1",
            )
    return scaling


def _llama3_scaling(header: Header, decoder: DecoderConfig) -> dict[str, Any]:
    """The parameters by which Llama 3 divides its frequencies, from the quotients that are stored.

    Raises:
        UserError: they are of no model of Llama 3.
    """
    place = header.tensors[_ROPE_FACTORS]
    found = np.fromfile(place.file, "<f4", decoder.head_dim // 2, offset=place.offset)
    if place.type is gguf.GGMLQuantizationType.F32 and place.shape == found.shape:
        rope = {"rope_theta": decoder.rope["rope_theta"], **_LLAMA3, "factor": float(found.max())}
        if found.max() >= 1 and np.allclose(llama3_divisors(decoder.head_dim, rope), found):
            return {key: value for key, value in rope.items() if key != "rope_theta"}
    raise UserError(
        "unsupported rotary scaling",
        f"{header.path} {_ROPE_FACTORS} is not that of Llama 3",
        "supported: none, linear, yarn and that of Llama 3",
    )


def _tensor(header: Header, name: str) -> TensorPlace:
    if name not in header.tensors:
        raise UserError("missing tensor", f"{name} in {header.path}", "fetch the whole model")
    return header.tensors[name]


def _key(header: Header, name: str) -> str:
    return f"{header.metadata['general.architecture']}.{name}"


def _integer(header: Header, name: str, default: int | None = None) -> int:
    return header.integer(_key(header, name), default)


def _real(header: Header, name: str, default: float | None = None) -> float:
    return header.real(_key(header, name), default)
