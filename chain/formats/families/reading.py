"""What a config.json leaves out or spells in an older way, completed as transformers completes it.

transformers itself would do, at the cost of importing it and torch, which takes seconds.
`tests/chain/formats/test_config.py` holds both against each other.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from polybasic.chain.base.errors import UserError

COMMON: dict[str, Any] = {
    "vocab_size": 1,
    "hidden_size": 1,
    "intermediate_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "layer_types": None,
    "partial_rotary_factor": 1.0,
}
"""Keys that all families have, with the value of one that is left out; sizes never are."""
_INTEGERS = ("num_key_value_heads", "head_dim", "sliding_window")
"""Keys whose default may be None, and whose value is else an integer."""
_NULLABLE = (
    *_INTEGERS,
    "layer_types",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "use_bidirectional_attention",
)
"""Keys that may be null: without that limit, or as the sizes imply."""
_DEFAULT_THETA = 1e4


def completed(config: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> Any:
    """A config.json with a value for each key of `COMMON` and of the family's `defaults`.

    Args:
        config: what the file says.
        defaults: the family's own keys, with the value of one that is left out.
        where: names the file in errors.

    Raises:
        UserError: a value of another type, or a hidden size that its heads cannot share.
    """
    values = COMMON | dict(defaults)
    for key, default in values.items():
        if key in config:
            _check_type(key, config[key], default, where)
            values[key] = config[key]
    read = SimpleNamespace(**values)
    if not values.get("use_sliding_window", True):  # of Qwen: there is a window only where it is on
        read.sliding_window = None
    if read.num_key_value_heads is None:
        read.num_key_value_heads = read.num_attention_heads
    are_bound = not values.get("is_encoder_decoder", False)  # heads, to the hidden size
    num_heads = read.num_attention_heads
    if are_bound and num_heads > 0 and read.hidden_size % num_heads:
        raise malformed(
            where,
            f"hidden_size {read.hidden_size}",
            f"no multiple of num_attention_heads {read.num_attention_heads}",
        )
    types = read.layer_types
    if types is not None and len(types) != read.num_hidden_layers:
        raise malformed(
            where, f"layer_types of {len(types)}", f"num_hidden_layers is {read.num_hidden_layers}"
        )
    return read


def one_rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Rotary parameters that all layers share, or those of each type of layer by its name.

    Raises:
        UserError: they are no JSON object.
    """
    rope = dict(_objects(config, where))
    inner = [key for key in rope if key in (config.get("layer_types") or ())]
    theta = {"rope_theta": _theta(config, "rope_theta", _DEFAULT_THETA)}
    if inner:
        return rope | {key: theta | rope[key] for key in inner}
    return theta | rope


def rope_by_layer_type(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Those of Gemma 3, whose layers with a window have a base of their own and no scaling.

    Raises:
        UserError: they are no JSON object.
    """
    given = _objects({**config, "rope_scaling": None}, where)
    scaling = _objects({**config, "rope_parameters": None}, where)
    bases = {
        "full_attention": _theta(config, "rope_theta", 1e6),
        "sliding_attention": _theta(config, "rope_local_base_freq", _DEFAULT_THETA),
    }
    ropes = {name: {"rope_theta": base} | (given.get(name) or {}) for name, base in bases.items()}
    ropes["full_attention"] |= scaling
    return ropes


def _objects(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`rope_scaling`, as older configs name it, or `rope_parameters`."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if rope:
            parts = [rope] if not isinstance(rope, dict) else [*_nested(rope)]
            if any(not isinstance(part, dict) for part in parts):
                raise malformed(where, f"{key} {rope!r}", "it is an object of rotary parameters")
            return dict(rope)
    return {}


def _nested(rope: dict[str, Any]) -> list[Any]:
    return [part for name, part in rope.items() if name.endswith("_attention") and part is not None]


def _theta(config: Mapping[str, Any], key: str, default: float) -> Any:
    theta = config.get(key)
    return default if theta is None else theta


def _check_type(key: str, value: Any, default: Any, where: str) -> None:
    right: bool
    if value is None:
        right = key in _NULLABLE
    elif key == "layer_types":
        right = isinstance(value, list) and all(isinstance(name, str) for name in value)
    elif isinstance(value, bool) or isinstance(default, bool):
        right = isinstance(value, bool) and isinstance(default, bool)
    elif isinstance(default, str):
        right = isinstance(value, str)
    elif isinstance(default, int) or key in _INTEGERS:
        right = isinstance(value, int)
    else:
        right = isinstance(value, int | float)
    if not right:
        raise malformed(where, f"{key} {value!r}", "it has another type")


def malformed(where: str, what: str, why: str) -> UserError:
    """The error of a config.json that no model has.

    Args:
        where: names the file.
        what: its value.
    """
    return UserError("malformed model config", f"{where} {what}: {why}", "fetch or write it again")
