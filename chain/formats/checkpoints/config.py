"""What a checkpoint's config.json says of its model, read as transformers reads it."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig, HeadConfig, LayerKind
from polybasic.chain.formats.checkpoints.kinds import Kind, is_head
from polybasic.chain.formats.checkpoints.quantization import read_quantization_config
from polybasic.chain.formats.families.reading import completed
from polybasic.chain.formats.families.table import FAMILIES
from polybasic.chain.formats.files import read_json
from polybasic.chain.formats.head_kinds.table import head_kind_of

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
SUPPORTED_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_NEEDED_BY_ROPE_TYPE = {
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "yarn": ("rope_theta", "factor", "original_max_position_embeddings"),
    "llama3": (
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
_OF_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")

_SLIDING = "sliding_attention"
_LAYER_TYPES = ("full_attention", _SLIDING)
_MAX_SIZE = 1 << 24
"""Of one dimension, and of a context."""
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_LAYER_SIZES = ("intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
"""That the config.json of a head without a layer does not have."""
_POSITIVE = (
    *_SIZES,
    "num_key_value_heads",
    "head_dim",
    "draft_vocab_size",
    "target_hidden_size",
)


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

    @property
    def in_4_bits(self) -> bool:
        """Whether its layers are quantized."""
        return bool(self.content.get("quantization_config"))

    @property
    def kind(self) -> Kind:
        """Of a member that is this whole model."""
        return "awq" if self.in_4_bits else "decoder"

    @property
    def group_size(self) -> int | None:
        """Inputs that share a scale where its layers are in 4 bits; None where they are not.

        Raises:
            UserError: as `read_quantization_config`.
        """
        return read_quantization_config(self.content, self.path) if self.in_4_bits else None

    @cached_property
    def decoder(self) -> DecoderConfig:
        """What it says of a decoder.

        Raises:
            UserError: as `decoder_config`.
        """
        return decoder_config(self.content, str(self.path))

    @cached_property
    def head(self) -> HeadConfig:
        """What it says of a draft head.

        Raises:
            UserError: as `head_config`.
        """
        return head_config(self.content, str(self.path))

    def of(self, kind: Kind) -> DecoderConfig:
        """What it says of a member of this kind; a `HeadConfig` of a head."""
        return self.head if is_head(kind) else self.decoder


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
    names = content.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(
            "malformed model config", f"{path} architectures {names!r}", "fetch or write it again"
        )
    if content.get("model_type") not in FAMILIES:
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
    """Translate a head's config.json; a layer of it is Llama's whatever its model_type says.

    Biases are read where they are stored; none is required.

    Raises:
        UserError: as `decoder_config` and `head_kind_of`, what a head of its kind must say is
            missing, another width than its verifier's, or more tokens to draft than there are.
    """
    kind = head_kind_of(config, where)
    own = kind.fields(config, where)
    layer_config = {key: value for key, value in config.items() if key != "layer_types"}
    if kind.layer is None:
        layer_config |= dict.fromkeys(_LAYER_SIZES, 1)
    decoder = decoder_config(layer_config | {"model_type": "llama"}, where)
    values = {field.name: getattr(decoder, field.name) for field in fields(DecoderConfig)}
    if kind.layer is None:
        values["num_layers"] = 0
    values["layer_kinds"] = _head_layer_kinds(config, decoder, where)
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
        **values | {"biased": ()} | own,
        draft_vocab_size=num_draft_tokens,
        kind=kind.name,
    )


def _head_layer_kinds(
    config: dict[str, Any], decoder: DecoderConfig, where: str
) -> tuple[LayerKind, ...]:
    """A kind for each layer of a head; none where all layers see all tokens."""
    types = config.get("layer_types") or []
    # those that were copied from the target's config are of more layers
    if len(types) != decoder.num_layers or _SLIDING not in types:
        return ()
    window = config.get("sliding_window")
    _check_number(where, "sliding_window", window, 1, _MAX_SIZE)
    return tuple(
        LayerKind(decoder.rope, window if layer_type == _SLIDING else None) for layer_type in types
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


def decoder_config(content: dict[str, Any], where: str) -> DecoderConfig:
    """Translate the content of a decoder's config.json; `where` names it in errors.

    What the file leaves out or spells in an older way is as transformers reads it.

    Raises:
        UserError: a malformed config, or an architecture, activation or rotary scaling that the
            decoder does not compute.
    """
    model_type: Any = content.get("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        raise _unsupported(where, "model_type", model_type, FAMILIES)
    config = dict(family.spelled(content, where))
    for key in _SIZES:
        if key not in config:
            raise UserError("model config lacks a key", f"{where} {key}", "complete the config")
    for rope in (config.get("rope_scaling"), config.get("rope_parameters")):
        _check_rope(rope, where)
    if family.defaults is None:
        read = _as_transformers_reads(config, where)
    else:
        read = completed(config, family.defaults, where)
    for key in (*_SIZES, "num_key_value_heads", "max_position_embeddings"):
        _check_number(where, key, getattr(read, key), 1, _MAX_SIZE)
    _check_number(where, "rms_norm_eps", read.rms_norm_eps, 0, 1)
    activation = getattr(read, "hidden_activation", None) or read.hidden_act
    if activation not in SUPPORTED_ACTIVATIONS:
        raise _unsupported(where, "hidden_act", activation, SUPPORTED_ACTIVATIONS)
    if getattr(read, "use_bidirectional_attention", None):
        raise _unsupported(where, "use_bidirectional_attention", True, ("False",))
    if family.defaults is None:
        rope = read.rope_parameters
    else:
        if read.partial_rotary_factor != 1:
            _check_rope({"partial_rotary_factor": read.partial_rotary_factor}, where)
        rope = family.rope(config, where)
    ropes = _ropes(
        rope, family.rope_types or SUPPORTED_ROPE_TYPES, read.max_position_embeddings, where
    )
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
        layer_kinds=_layer_kinds(family.layer_types, read, ropes, where),
        activation=activation,
        **family.fields(read),
    )


def _unsupported(where: str, key: str, value: object, supported: Iterable[str]) -> UserError:
    return UserError(
        "unsupported architecture",
        f"{where} {key} {value!r}",
        f"supported: {', '.join(supported)}",
    )


def _check_number(where: str, key: str, value: Any, least: float, most: float) -> None:
    """Refuse what would end in other shapes than the weights' or in no numbers at all."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and least <= value <= most):
        raise UserError(
            "malformed model config",
            f"{where} {key} {value!r}",
            f"it lies between {least:g} and {most:g}: fetch or write it again",
        )


def _as_transformers_reads(config: dict[str, Any], where: str) -> Any:
    from transformers import CONFIG_MAPPING

    try:
        # it completes nested parts in place
        return CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(config))
    except Exception as error:  # of any kind: it trusts the file
        *_, reason = str(error).strip("'\"").splitlines() or [type(error).__name__]
        raise UserError(
            "malformed model config", f"{where} ({reason.strip()})", "fetch or write it again"
        ) from error


def _check_rope(rope: Any, where: str) -> None:
    """Refuse rotary parameters, flat or by kind of layer, that are not computed."""
    if not isinstance(rope, dict):
        return
    for inner in rope.values():
        _check_rope(inner, where)
    rope_type = _rope_type(rope)
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise UserError(
            "unsupported rotary scaling",
            f"{where} rope_type {rope_type!r}",
            f"supported: {', '.join(SUPPORTED_ROPE_TYPES)}",
        )
    for key in ("rope_theta", "factor"):
        if rope.get(key) is not None:
            _check_number(where, key, rope[key], 1e-6, 1e30)
    if (factor := rope.get("partial_rotary_factor", 1)) != 1:
        raise UserError(
            "unsupported rotary scaling",
            f"{where} partial_rotary_factor {factor}",
            "supported: heads that are rotated whole",
        )


def _ropes(
    rope: dict[str, Any], types: Sequence[str], context_tokens: int, where: str
) -> dict[str, dict[str, Any]]:
    """Rotary parameters by kind of layer, complete and without what says nothing."""
    _check_rope(rope, where)
    if "full_attention" not in rope:
        rope = {"full_attention": rope, "sliding_attention": rope}
    ropes = {}
    for kind in _LAYER_TYPES:
        named = {**rope[kind], "rope_type": _rope_type(rope[kind])}
        if named["rope_type"] not in types:
            raise _unsupported(where, "rope_type", named["rope_type"], types)
        if named["rope_type"] in ("llama3", "yarn"):
            named.setdefault("original_max_position_embeddings", context_tokens)
        _check_scaling(named, where)
        ropes[kind] = {
            key: value
            for key, value in named.items()
            if key not in ("type", "partial_rotary_factor")
        }
    return ropes


def _rope_type(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type") or rope.get("type") or "default"


def _check_scaling(rope: dict[str, Any], where: str) -> None:
    """Check that rotary parameters have what their type computes with, and that as numbers."""
    for key in _NEEDED_BY_ROPE_TYPE[rope["rope_type"]]:
        _check_number(where, key, rope.get(key), 1e-6, 1e30)
    for key in _OF_YARN:
        if rope.get(key) is not None:
            _check_number(where, key, rope[key], 0, 1e30)


def _layer_kinds(
    layer_types: Callable[[Any], Sequence[str]] | None,
    read: Any,
    ropes: dict[str, dict[str, Any]],
    where: str,
) -> tuple[LayerKind, ...]:
    """A kind for each layer; none where all layers see all tokens."""
    types = () if layer_types is None else layer_types(read)
    for name in types:
        if name not in _LAYER_TYPES:
            raise _unsupported(where, "layer_types", name, _LAYER_TYPES)
    if "sliding_attention" not in types:
        return ()
    kinds = {
        "full_attention": LayerKind(ropes["full_attention"]),
        "sliding_attention": LayerKind(ropes["sliding_attention"], read.sliding_window),
    }
    return tuple(kinds[name] for name in types)
