"""What llama.cpp computes of the families of models, and the numbers that it asks a file for."""

from collections.abc import Iterator, Mapping
from typing import Any

import gguf

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import ConfigFile
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig
from polybasic.chain.formats.families.family import QKV

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
"""By model_type. Mistral is a Llama there."""
_WINDOW_PERIODS = {"gemma2": 2, "gemma3_text": 6}
"""Of so many layers the last one sees all tokens; other families have no windows in llama.cpp."""
_WIDE_LAYERS = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the size (27B) whose scores llama.cpp scales by another width than that of heads."""


def architecture_of(config: ConfigFile) -> gguf.MODEL_ARCH:
    """The architecture that llama.cpp computes a model by.

    Raises:
        UserError: it has none, or computes something else than this runtime.
    """
    model_type = config.content["model_type"]
    if model_type not in ARCHITECTURES:
        raise UserError(
            "not written as GGUF",
            f"{config.path} model_type {model_type!r}",
            f"these are: {', '.join(ARCHITECTURES)}",
        )
    for difference in _differences(model_type, config.decoder):
        raise UserError(
            "llama.cpp computes this model otherwise",
            f"{config.path} ({difference})",
            "run the chain here",
        )
    return ARCHITECTURES[model_type]


def scaled_width(model_type: str, sizes: Mapping[str, Any]) -> int:
    """The width whose root llama.cpp divides a Gemma's scores by.

    Args:
        sizes: of a config.json.
    """
    if sizes["num_hidden_layers"] == _WIDE_LAYERS[model_type]:
        return sizes["hidden_size"] // sizes["num_attention_heads"]
    return sizes["head_dim"]


def warnings_of(config: ConfigFile) -> tuple[str, ...]:
    """One line for each thing that llama.cpp does otherwise in some contexts."""
    windows = {kind.window for kind in config.decoder.kinds if kind.window is not None}
    if config.content["model_type"] in _WINDOW_PERIODS or not windows:
        return ()
    window = min(windows)
    if window >= config.decoder.context_tokens:
        return ()
    return (
        f"llama.cpp has no window for {config.content['model_type']}: after {window} tokens its "
        "answers are other ones",
    )


def add_numbers(writer: gguf.GGUFWriter, config: ConfigFile) -> None:
    """Write sizes and constants.

    Args:
        config: of a model that has an architecture.
    """
    decoder, model_type = config.decoder, config.content["model_type"]
    writer.add_context_length(decoder.context_tokens)
    writer.add_embedding_length(decoder.hidden_size)
    writer.add_block_count(decoder.num_layers)
    writer.add_feed_forward_length(decoder.intermediate_size)
    writer.add_head_count(decoder.num_heads)
    writer.add_head_count_kv(decoder.num_kv_heads)
    writer.add_key_length(decoder.head_dim)
    writer.add_value_length(decoder.head_dim)
    writer.add_rope_dimension_count(decoder.head_dim)
    writer.add_layer_norm_rms_eps(decoder.rms_norm_eps)
    writer.add_vocab_size(decoder.vocab_size)
    writer.add_rope_freq_base(decoder.rope["rope_theta"])
    if decoder.rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(decoder.rope["factor"])
    if decoder.attention_softcap is not None:
        writer.add_attn_logit_softcapping(decoder.attention_softcap)
    if decoder.logit_softcap is not None:
        writer.add_final_logit_softcapping(decoder.logit_softcap)
    for kind in decoder.kinds:
        if model_type in _WINDOW_PERIODS and kind.window is not None:
            writer.add_sliding_window(kind.window)
            writer.add_rope_freq_base_swa(kind.rope["rope_theta"])
    if model_type == "phi3":
        # as its converter says it: 0 where there is none
        writer.add_sliding_window(decoder.kinds[0].window or 0)
        writer.add_rope_scaling_orig_ctx_len(decoder.context_tokens)


def _differences(model_type: str, decoder: DecoderConfig) -> Iterator[str]:
    """What llama.cpp would compute otherwise."""
    is_gemma = model_type in _WINDOW_PERIODS
    if decoder.biased != (QKV if model_type == "qwen2" else ()):
        yield f"biases of {', '.join(decoder.biased)}"
    activation = "gelu_pytorch_tanh" if is_gemma else "silu"
    if decoder.activation != activation:
        yield f"activation {decoder.activation}, it computes {activation}"
    for kind in decoder.kinds:
        rope_type = kind.rope["rope_type"]
        computed = ["default", "linear"]
        if ARCHITECTURES[model_type] is gguf.MODEL_ARCH.LLAMA:
            computed.append("llama3")
        if model_type == "gemma3_text" and kind.window is not None:
            computed.remove("linear")
        if rope_type not in computed:
            yield f"rotary scaling {rope_type}"
    if model_type == "phi3" and decoder.num_heads * decoder.head_dim != decoder.hidden_size:
        yield f"{decoder.num_heads} heads of {decoder.head_dim} for width {decoder.hidden_size}"
    if not is_gemma:
        return
    period = _WINDOW_PERIODS[model_type]
    for layer, kind in enumerate(decoder.layer_kinds):
        if (kind.window is None) != ((layer + 1) % period == 0):
            yield f"windows of other layers than {period - 1} in {period}"
    if not decoder.layer_kinds:
        yield "no windows"
    sizes = {
        "num_hidden_layers": decoder.num_layers,
        "hidden_size": decoder.hidden_size,
        "num_attention_heads": decoder.num_heads,
        "head_dim": decoder.head_dim,
    }
    scaled = scaled_width(model_type, sizes)
    if abs((decoder.attention_scale or 0.0) * scaled**0.5 - 1) > 1e-6:
        yield f"scores are scaled by {decoder.attention_scale}, it takes {scaled**-0.5}"
    has_softcaps = (decoder.attention_softcap is not None, decoder.logit_softcap is not None)
    if has_softcaps != (model_type == "gemma2",) * 2:
        yield "soft caps of scores and logits are of the other Gemma"
    if not decoder.tie_word_embeddings:
        yield "an output projection of its own"
