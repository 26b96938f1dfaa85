"""What a decoder needs to know of a checkpoint's config.json."""

from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import read_json
from polybasic.chain.formats.manifest import HEAD_KINDS, HeadKind, Kind

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
SUPPORTED_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"
"""In the config.json of an EAGLE-3 head."""
NUM_FEATURE_LAYERS = 3
"""Layers of the verifier that an EAGLE-3 head reads."""

_GEMMAS = ("gemma2", "gemma3_text")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_POSITIVE = (
    *_SIZES,
    "num_key_value_heads",
    "head_dim",
    "draft_vocab_size",
    "target_hidden_size",
)


@dataclass(frozen=True)
class LayerKind:
    """How the layers of one kind place tokens, and how far back they look.

    Attributes:
        rope: rotary parameters as transformers names them.
        window: tokens that a token sees, itself included; None for all.
    """

    rope: dict[str, Any]
    window: int | None = None

    def first_seen(self, position: int) -> int:
        """The first position that a token at `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and constants of a decoder; the defaults are Llama's.

    Attributes:
        rope: rotary parameters as transformers names them (rope_type, rope_theta, factor, ...), of
            the layers that see all tokens.
        layer_kinds: one for each layer where windows or rotary parameters differ from `rope`
            alone; else empty.
        activation: of the gated MLP.
        attention_scale: factor of the scores; None for head_dim ** -0.5.
        attention_softcap: c of c * tanh(score / c); None leaves scores as they are.
        logit_softcap: as `attention_softcap`, of the logits.
        embedding_scale: factor of the embeddings that the first layer reads.
        biased: projections whose bias must be stored, by the last part of their names.
        has_fused_projections: q, k and v are stored as one matrix, gate and up as another.
        has_head_norms: queries and keys are normed head by head.
        has_post_norms: what attention and MLP add to the residual is normed.
        has_offset_norms: norms multiply by 1 + weight, in float32.
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
    layer_kinds: tuple[LayerKind, ...] = ()
    activation: str = "silu"
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    biased: tuple[str, ...] = ()
    has_fused_projections: bool = False
    has_head_norms: bool = False
    has_post_norms: bool = False
    has_offset_norms: bool = False

    @property
    def query_groups(self) -> int:
        """Query heads that read one key/value head."""
        return self.num_heads // self.num_kv_heads

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers that there are, each once."""
        kinds: list[LayerKind] = []
        for kind in self.layer_kinds or (LayerKind(self.rope),):
            if kind not in kinds:
                kinds.append(kind)
        return tuple(kinds)

    def kind_of(self, layer: int) -> int:
        """Place of a layer's kind in `kinds`."""
        return self.kinds.index(self.layer_kinds[layer]) if self.layer_kinds else 0

    @property
    def cache_shape(self) -> tuple[object, ...]:
        """Layers with their kinds, key/value heads, head size and width of the states.

        Decoders that agree in it can share a cache, and one's states serve a head of the other.
        """
        kinds = [self.kinds[self.kind_of(layer)] for layer in range(self.num_layers)]
        return kinds, self.num_kv_heads, self.head_dim, self.hidden_size


@dataclass(frozen=True)
class HeadConfig(DecoderConfig):
    """Shapes and constants of a draft head's one layer, and what the head reads and drafts.

    Attributes:
        draft_vocab_size: tokens that it can draft; None where its config says nothing: all.
        feature_layers: of an EAGLE-3 head: the verifier's layers whose inputs it reads, in the
            order in which they lie side by side; empty for an EAGLE-2 head.
    """

    draft_vocab_size: int | None = None
    feature_layers: tuple[int, ...] = ()

    @property
    def kind(self) -> HeadKind:
        """As manifests name it."""
        return "eagle3" if self.feature_layers else "eagle2"

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that the head can draft."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size


class LayerSizes(Protocol):
    """Sizes of a layer; a `DecoderConfig` has them."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True)
class ConfigFile:
    """The config.json of a checkpoint.

    Attributes:
        folder: where it lies.
        content: all that it says, also to other programs.
    """

    folder: Path
    content: dict[str, Any]

    @property
    def path(self) -> Path:
        """Of the file, for errors."""
        return self.folder / "config.json"

    @property
    def dtype(self) -> str:
        """Name of the dtype of the weights."""
        return self.content.get("dtype") or self.content.get("torch_dtype") or "float32"

    @cached_property
    def decoder(self) -> DecoderConfig:
        """What it says of a decoder.

        Raises:
            UserError: as `decoder_config`.
        """
        return decoder_config(self.content, str(self.path))

    @cached_property
    def head(self) -> HeadConfig:
        """What it says of an EAGLE-2 or EAGLE-3 head.

        Raises:
            UserError: as `head_config`.
        """
        return head_config(self.content, str(self.path))

    def of(self, kind: Kind) -> DecoderConfig:
        """What it says of a member of this kind; a `HeadConfig` of a head."""
        return self.head if kind in HEAD_KINDS else self.decoder


def read_config(folder: Path) -> ConfigFile:
    """Read the config.json of a checkpoint; what it says of a model is translated when asked for.

    Raises:
        UserError: no JSON object, remote code in place of a supported architecture, or a size that
            is no positive integer.
    """
    path = folder / "config.json"
    content = read_json(path, "model config")
    if not isinstance(content, dict):
        raise UserError("malformed config", f"{path} holds no JSON object", "fetch it again")
    if content.get("model_type") not in SUPPORTED_MODEL_TYPES:
        # Phi-3's checkpoints still name the code that they were published with
        refuse_remote_code(path, content)
    for key in _POSITIVE:
        value = content.get(key)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UserError("malformed config", f"{key} = {value!r} in {path}", "fetch it again")
    return ConfigFile(folder, content)


def refuse_remote_code(path: Path, content: dict[str, Any]) -> None:
    """Refuse a config that names code of its own.

    Raises:
        UserError: it has an auto_map.
    """
    if "auto_map" in content:
        raise UserError(
            "remote code refused",
            f"auto_map in {path}",
            "use a checkpoint of a model that transformers itself has",
        )


def head_config(config: dict[str, Any], where: str) -> HeadConfig:
    """Translate a head's config.json, whose layer is Llama's whatever its model_type says.

    A config that names an EAGLE-3 architecture or feature layers is an EAGLE-3 head's. Biases are
    read where they are stored; none is required.

    Raises:
        UserError: as `decoder_config`, an EAGLE-3 head without its three feature layers or
            of another width than its verifier, or more tokens to draft than there are.
    """
    # kinds of layers that were copied from the target's config are those of more than one layer
    layer_config = {key: value for key, value in config.items() if key != "layer_types"}
    decoder = decoder_config(layer_config | {"model_type": "llama"}, where)
    values = {field.name: getattr(decoder, field.name) for field in fields(DecoderConfig)}
    num_draft_tokens = config.get("draft_vocab_size")
    if num_draft_tokens is not None and (
        not isinstance(num_draft_tokens, int) or not 1 <= num_draft_tokens <= decoder.vocab_size
    ):
        raise UserError(
            "malformed head config",
            f"{where} draft_vocab_size {num_draft_tokens!r} of {decoder.vocab_size}",
            "fetch or write it again",
        )
    width = config.get("target_hidden_size")
    if width not in (None, decoder.hidden_size):
        raise UserError(
            "unsupported head",
            f"{where} hidden_size {decoder.hidden_size}, target_hidden_size {width!r}",
            "supported: heads that are as wide as their model",
        )
    return HeadConfig(
        **values | {"biased": ()},
        draft_vocab_size=num_draft_tokens,
        feature_layers=_feature_layers(config, where),
    )


def check_feature_layers(head: HeadConfig, num_layers: int, where: str) -> None:
    """Check that a verifier of so many layers has those that a head reads.

    Args:
        where: the head's config, for errors.

    Raises:
        UserError: it lacks one.
    """
    if max(head.feature_layers, default=0) >= num_layers:
        raise UserError(
            "head does not fit its target",
            f"{where} reads layers {', '.join(map(str, head.feature_layers))} of {num_layers}",
            "train a head for this target",
        )


def decoder_config(config: dict[str, Any], where: str) -> DecoderConfig:
    """Translate the content of a decoder's config.json; `where` names it in errors.

    What the file leaves out or spells in an older way is as transformers reads it.

    Raises:
        UserError: a malformed config, or an architecture, activation or rotary scaling that the
            decoder does not compute.
    """
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise _unsupported(where, "model_type", model_type, SUPPORTED_MODEL_TYPES)
    for key in _SIZES:
        if key not in config:
            raise UserError("model config lacks a key", f"{where} {key}", "complete the config")
    for rope in (config.get("rope_scaling"), config.get("rope_parameters")):
        _check_rope(rope, where)
    read = _as_transformers_reads(config, where)
    activation = getattr(read, "hidden_activation", None) or read.hidden_act
    if activation not in SUPPORTED_ACTIVATIONS:
        raise _unsupported(where, "hidden_act", activation, SUPPORTED_ACTIVATIONS)
    if getattr(read, "use_bidirectional_attention", None):
        raise _unsupported(where, "use_bidirectional_attention", True, ("False",))
    ropes = _ropes(read.rope_parameters, where)
    is_gemma = model_type in _GEMMAS
    return DecoderConfig(
        vocab_size=read.vocab_size,
        hidden_size=read.hidden_size,
        intermediate_size=read.intermediate_size,
        num_layers=read.num_hidden_layers,
        num_heads=read.num_attention_heads,
        num_kv_heads=read.num_key_value_heads,
        head_dim=getattr(read, "head_dim", None) or read.hidden_size // read.num_attention_heads,
        rms_norm_eps=read.rms_norm_eps,
        context_tokens=read.max_position_embeddings,
        tie_word_embeddings=read.tie_word_embeddings,
        rope=ropes["full_attention"],
        layer_kinds=_layer_kinds(read, ropes, where),
        activation=activation,
        attention_scale=read.query_pre_attn_scalar**-0.5 if is_gemma else None,
        attention_softcap=read.attn_logit_softcapping if model_type == "gemma2" else None,
        logit_softcap=read.final_logit_softcapping if is_gemma else None,
        embedding_scale=read.hidden_size**0.5 if is_gemma else None,
        biased=_biased(read),
        has_fused_projections=model_type == "phi3",
        has_head_norms=model_type in ("qwen3", "gemma3_text"),
        has_post_norms=is_gemma,
        has_offset_norms=is_gemma,
    )


def _feature_layers(config: dict[str, Any], where: str) -> tuple[int, ...]:
    """Of an EAGLE-3 head's config; none for any other."""
    section = config.get("eagle_config")
    layers = section.get("eagle_aux_hidden_state_layer_ids") if isinstance(section, dict) else None
    if layers is None and EAGLE3_ARCHITECTURE not in (config.get("architectures") or []):
        return ()
    if (
        not isinstance(layers, list)
        or len(layers) != NUM_FEATURE_LAYERS
        or not all(isinstance(layer, int) and layer >= 0 for layer in layers)
    ):
        raise UserError(
            "malformed head config",
            f"{where} eagle_config.eagle_aux_hidden_state_layer_ids {layers}",
            f"name the {NUM_FEATURE_LAYERS} layers whose inputs the head reads",
        )
    return tuple(layers)


def _unsupported(where: str, key: str, value: object, supported: tuple[str, ...]) -> UserError:
    return UserError(
        "unsupported architecture",
        f"{where} {key} {value!r}",
        f"supported: {', '.join(supported)}",
    )


def _as_transformers_reads(config: dict[str, Any], where: str) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    try:
        # it completes nested parts in place
        return CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(config))
    except (StrictDataclassError, KeyError, TypeError, ValueError) as error:
        reason = str(error).strip("'\"").splitlines()[-1].strip()
        raise UserError(
            "malformed model config", f"{where} ({reason})", "fetch or write it again"
        ) from error


def _check_rope(rope: Any, where: str) -> None:
    """Refuse rotary parameters, flat or by kind of layer, that are not computed."""
    if not isinstance(rope, dict):
        return
    for inner in rope.values():
        _check_rope(inner, where)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise UserError(
            "unsupported rotary scaling",
            f"{where} rope_type {rope_type!r}",
            f"supported: {', '.join(SUPPORTED_ROPE_TYPES)}",
        )
    if (factor := rope.get("partial_rotary_factor", 1)) != 1:
        raise UserError(
            "unsupported rotary scaling",
            f"{where} partial_rotary_factor {factor}",
            "supported: heads that are rotated whole",
        )


def _ropes(rope: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Rotary parameters by kind of layer, without what says nothing."""
    _check_rope(rope, where)
    if "full_attention" not in rope:
        rope = {"full_attention": rope, "sliding_attention": rope}
    return {
        kind: {
            key: value
            for key, value in rope[kind].items()
            if key not in ("type", "partial_rotary_factor")
        }
        for kind in ("full_attention", "sliding_attention")
    }


def _layer_kinds(read: Any, ropes: dict[str, dict[str, Any]], where: str) -> tuple[LayerKind, ...]:
    """A kind for each layer; none where all layers see all tokens."""
    if read.model_type == "llama":
        return ()
    if read.model_type in ("mistral", "phi3"):
        name = "full_attention" if read.sliding_window is None else "sliding_attention"
        names = [name] * read.num_hidden_layers
    else:
        names = read.layer_types
    kinds = {
        "full_attention": LayerKind(ropes["full_attention"]),
        "sliding_attention": LayerKind(ropes["sliding_attention"], read.sliding_window),
    }
    for name in names:
        if name not in kinds:
            raise _unsupported(where, "layer_types", name, tuple(kinds))
    if set(names) == {"full_attention"}:
        return ()
    return tuple(kinds[name] for name in names)


def _biased(read: Any) -> tuple[str, ...]:
    if read.model_type == "qwen2":
        return ("q_proj", "k_proj", "v_proj")
    # the other families' models have no biases, whatever their configs say
    biased: tuple[str, ...] = ()
    if read.model_type in ("llama", "qwen3", *_GEMMAS) and read.attention_bias:
        biased += ("q_proj", "k_proj", "v_proj", "o_proj")
    if read.model_type == "llama" and read.mlp_bias:
        biased += ("gate_proj", "up_proj", "down_proj")
    return biased
