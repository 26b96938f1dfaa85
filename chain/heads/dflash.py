"""DFlash heads of others, and of Domino and DSpark, in the layout of a chain.

Sources: SpecForge 0.2.0 (specforge/modeling/draft: dflash.py, domino.py, dspark.py), speculators
0.9.0 (speculators/models: dflash, dspark), NVIDIA's modelopt 0.47.0 (torch/speculative/plugins:
modeling_dflash.py, modeling_domino.py, modeling_dspark.py), DeepSpec (deepspec/modeling/dspark),
vLLM (vllm/model_executor/models/qwen3_dflash.py).
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import head_config, read_config
from polybasic.chain.formats.checkpoints.draft_vocabulary import draft_token_ids
from polybasic.chain.formats.head_kinds.dflash import (
    BLOCK_SIZE,
    CAUSAL,
    LAYER_IDS,
    MASK_TOKEN,
    PROJECTOR,
    SECTION,
    SHIFT,
)
from polybasic.chain.formats.head_kinds.kind import Content
from polybasic.chain.heads.checks import (
    EMBEDDING,
    check_copy,
    check_sizes,
    check_tensors,
    without_whole_vocabulary,
)
from polybasic.chain.heads.eagle_config import HeadSizes, layer_config
from polybasic.chain.kernels.product_times import name_of
from polybasic.chain.model.stored import StoredTensors

SPECULATORS_KIND, SPECULATORS_LAYER = "speculators_model_type", "transformer_layer_config"
Tensors = dict[str, Tensor]

_DEEPSPEC = "DSparkModel"
"""In the name of DeepSpec's architectures, DFlash's among them."""
_LM_HEAD, _TARGET_EMBEDDING, _TARGET_LM_HEAD = (
    "lm_head.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
)
_OF_VERIFIER = re.compile(r"verifier_(norm|lm_head)\.weight|.*rotary_emb\.inv_freq")
_SPELLINGS = (
    (re.compile(r"logit_head\."), ""),
    (re.compile(r"^(markov_w[12]|gate_proj|joint_proj)\."), r"markov_head.\1."),
    (re.compile(r"^confidence_proj\."), "confidence_head.proj."),
)
_LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)
_OPTIONAL_LAYER_KEYS = ("head_dim", "hidden_act", "layer_types", "sliding_window", "rope_scaling")
_MARKOV_KEYS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
_OTHER_HEAD = "supported: DFlash heads without sinks, and those of Domino and DSpark"


def dflash_config(
    sizes: HeadSizes, num_layers: int, block_size: int, section: dict[str, Any], dtype: str
) -> dict[str, Any]:
    """The content of config.json for a DFlash head.

    Args:
        sizes: of its layers.
        section: what is said of the head itself: masks, layers, correction.
        dtype: of the weights.
    """
    return {
        **layer_config(sizes, dtype),
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": num_layers,
        "attention_bias": False,
        BLOCK_SIZE: block_size,
        SECTION: section,
    }


def is_dflash(config: Content) -> bool:
    """Whether a config.json is of such a head, in anybody's spelling."""
    kind = config.get(SPECULATORS_KIND)
    return SECTION in config or kind in ("dflash", "dspark") or _is_deepspec(config)


def in_dflash_format(
    source: Path, config: Content, tensors: Tensors, target: Path
) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of a head that others trained, as a chain has them.

    Copies of the target's embedding and output projection are compared with it and left out.

    Args:
        source: the head's folder.
        config: content of its config.json.
        tensors: all that is stored, by name.
        target: folder of the model that it drafts for.

    Raises:
        UserError: a head of another variant or for another model, a key that its config lacks, a
            missing or an unknown tensor, or one of another shape or dtype.
    """
    where, model = f"{source / 'config.json'}", read_config(target).decoder
    flat = _flat(config, where)
    missing = [key for key in _LAYER_KEYS if flat.get(key) is None]
    rope = "rope_theta" if flat.get("rope_parameters") is None else "rope_parameters"
    if flat.get(rope) is None:
        missing.append(rope)
    if missing:
        raise UserError("head config lacks a key", f"{where} {missing[0]}", "complete the config")
    kept = (*_LAYER_KEYS, *_OPTIONAL_LAYER_KEYS, rope, BLOCK_SIZE, SECTION)
    stored = {
        _name(name): tensor for name, tensor in tensors.items() if not _OF_VERIFIER.fullmatch(name)
    }
    stored = without_whole_vocabulary(stored, model.vocab_size)
    token_ids = draft_token_ids(stored, f"{source}")
    completed = {
        **{key: flat[key] for key in kept if flat.get(key) is not None},
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": any(name.endswith("o_proj.bias") for name in stored),
        # heads declare the length that they were trained at; rotary positions work beyond it
        "max_position_embeddings": model.context_tokens,
        "num_target_layers": model.num_layers,
        "tie_word_embeddings": False,
    }
    if token_ids is not None:
        completed["draft_vocab_size"] = len(token_ids)
    head = head_config(completed, where)
    check_sizes(where, head, model, target)
    stored = _without_copies(source, stored, target, model.tie_word_embeddings, token_ids)
    check_tensors(source, stored, head)
    return completed | {"torch_dtype": name_of(stored["fc.weight"].dtype)}, stored


def _is_deepspec(config: Content) -> bool:
    return any(_DEEPSPEC in name for name in config.get("architectures") or [])


def _flat(config: Content, where: str) -> dict[str, Any]:
    """The config as z-lab and SpecForge spell it, whose section says what the head itself is."""
    if SPECULATORS_KIND in config:
        nested = config.get(SPECULATORS_LAYER)
        layer = dict(nested) if isinstance(nested, dict) else {}
        section = {MASK_TOKEN: config.get(MASK_TOKEN)} | _markov(config)
        layers = config.get("aux_hidden_state_layer_ids")
        # layers are named by their inputs here
        section[LAYER_IDS] = _shifted(layers) if isinstance(layers, list) else layers
        is_dspark = config[SPECULATORS_KIND] == "dspark"
        section[SHIFT] = config.get("sample_from_anchor", is_dspark)
        if config.get("sliding_window_non_causal"):
            section[CAUSAL] = False
        return layer | {BLOCK_SIZE: config.get(BLOCK_SIZE), SECTION: section}
    if _is_deepspec(config):
        section = {key: config.get(key) for key in (MASK_TOKEN, LAYER_IDS)} | _markov(config)
        return {**config, SECTION: section | {SHIFT: True}}
    given = config[SECTION]
    section = dict(given) if isinstance(given, dict) else {}
    size = section.pop(BLOCK_SIZE, None)
    flat = {**config, BLOCK_SIZE: config.get(BLOCK_SIZE, size) or size}
    names = " ".join(config.get("architectures") or [])
    for name in ("Domino", "DSpark"):
        if name in names:
            section.setdefault(PROJECTOR, name.lower())
    if section.get(PROJECTOR) == "dspark":
        section.setdefault(SHIFT, True)
        section.setdefault("enable_confidence_head", bool(section.get("confidence_head_alpha")))
        del section[PROJECTOR]  # there may be no table
        section |= _markov(section)
    for key in ("attention_sink_bias", "add_swa_attention_sink_bias"):
        if value := section.get(key, config.get(key)):
            raise UserError("unsupported variant of DFlash", f"{where} {key} {value}", _OTHER_HEAD)
    if config.get("is_causal") is not None:
        section[CAUSAL] = config["is_causal"]
    if section.pop("use_swa", False):
        flat["sliding_window"] = section.pop("swa_window_size", config.get("sliding_window"))
        if "sliding_attention" not in (config.get("layer_types") or []):
            flat["layer_types"] = ["sliding_attention"] * config.get("num_hidden_layers", 0)
            section.setdefault(CAUSAL, False)
    return flat | {SECTION: section}


def _markov(given: Content) -> dict[str, Any]:
    """What is said of DSpark's heads, of the same names in all spellings but modelopt's."""
    if not given.get("markov_rank"):
        return {}
    found = {key: given[key] for key in _MARKOV_KEYS if given.get(key) is not None}
    if given.get("use_confidence_head"):
        found |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    return found | {PROJECTOR: "dspark"}


def _shifted(layers: Sequence[Any]) -> list[Any]:
    return [layer - 1 if isinstance(layer, int) else layer for layer in layers]


def _name(stored: str) -> str:
    """The name in a chain of a tensor that is stored under this one."""
    for spelling, ours in _SPELLINGS:
        stored = spelling.sub(ours, stored)
    return stored


def _without_copies(
    source: Path, tensors: Tensors, target: Path, is_tied: bool, token_ids: Tensor | None
) -> Tensors:
    """The tensors but for copies of the target's embedding and of rows of its output projection."""
    lm_head = _TARGET_EMBEDDING if is_tied else _TARGET_LM_HEAD
    for name, of_target, rows in (
        (EMBEDDING, _TARGET_EMBEDDING, None),
        (_LM_HEAD, lm_head, token_ids),
    ):
        if name in tensors:
            read = StoredTensors(target, tensors[name].dtype, torch.device("cpu"))
            expected = read.stored(of_target)
            expected = expected if rows is None else expected[rows]
            check_copy(source, target, name, tensors[name], expected)
    return {name: each for name, each in tensors.items() if name not in (EMBEDDING, _LM_HEAD)}
