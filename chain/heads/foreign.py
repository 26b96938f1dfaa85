"""Normalises the formats in which others store draft heads.

Sources: SafeAILab/EAGLE 148042c (eagle/model/cnets.py) and f2f2366 (modeling_llama_kv.py),
SpecForge 01dd714 (specforge/modeling/draft/llama3_eagle.py) and 00c4bba (target/
eagle3_target_model.py), speculators 0.9.0 (speculators/models/eagle3), SGLang 0.5.23 and vLLM
0.33.0 (their llama_eagle3.py).
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig
from polybasic.chain.formats.checkpoints.draft_vocabulary import OFFSETS, draft_tables
from polybasic.chain.formats.files import read_json
from polybasic.chain.formats.head_kinds.eagle2 import EAGLE2
from polybasic.chain.formats.head_kinds.eagle3 import (
    EAGLE3,
    EAGLE3_ARCHITECTURE,
    EAGLE_SECTION,
    LAYER_IDS,
    NORM_EACH,
    NORM_RESIDUAL,
    VARIANTS,
)
from polybasic.chain.formats.head_kinds.kind import HeadKind
from polybasic.chain.formats.head_kinds.peagle import PEAGLE_ARCHITECTURE
from polybasic.chain.formats.head_kinds.table import KIND_KEY
from polybasic.chain.formats.origin import ORIGIN_KEY, recorded
from polybasic.chain.heads.checks import without_whole_vocabulary
from polybasic.chain.heads.dflash import SPECULATORS_KIND, SPECULATORS_LAYER, is_dflash
from polybasic.chain.heads.eagle_config import default_feature_layers

DRAFT_VOCAB_SIZE = "draft_vocab_size"
HOT_TOKENS = "hot_token_ids.pt"
"""The draft vocabulary of an EAGLE-2 head as SGLang reads it: a list of token ids."""
OTHER_HEAD = "name a folder that holds a head in the layout of EAGLE-1, EAGLE-2 or EAGLE-3"

_SPECULATORS_KINDS = {"eagle3": EAGLE3_ARCHITECTURE, "peagle": PEAGLE_ARCHITECTURE}
_NEEDED_OF_SPECULATORS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "rms_norm_eps",
)


def read_foreign_config(source: Path) -> dict[str, Any]:
    """Content of a head's config.json, flat where that of an EAGLE-3 head of speculators is nested.

    The `auto_map` that speculators writes next to a copy of its own classes is dropped: the config
    names the kind of head, and no code in the folder is run.

    Raises:
        UserError: as `read_config`, or a kind of head from speculators that is not supported.
    """
    path = source / "config.json"
    config = read_json(path, "config")
    if not isinstance(config, dict) or SPECULATORS_KIND not in config:
        return read_config(source).content
    if is_dflash(config):
        return config
    return _of_speculators(f"{path}", config)


def in_eagle_format(
    source: Path, config: dict[str, Any], tensors: dict[str, Tensor], target: DecoderConfig
) -> tuple[HeadKind, dict[str, Any], dict[str, Tensor]]:
    """Kind, config and tensors of a head in the format of EAGLE's own code.

    EAGLE-3: one flat config that names the layers whose *inputs* are read, with the layer called
    `midlayer`. Either kind: no tables for a draft vocabulary that is the whole vocabulary.

    Args:
        source: the head's folder.
        config: as `read_foreign_config` returns it.
        tensors: all stored tensors, by name.
        target: of the model that it drafts for.

    Raises:
        UserError: a variant that is not supported, or ambiguous feature layers.
    """
    where = f"{source / 'config.json'}"
    if (name := recorded(config, KIND_KEY)) is not None:
        raise UserError("unsupported head", f"{where} {ORIGIN_KEY}.{KIND_KEY} {name}", OTHER_HEAD)
    tensors = without_whole_vocabulary(tensors, target.vocab_size)
    if not _is_eagle3(config, tensors):
        return EAGLE2, config, tensors | _hot_token_tables(source, tensors, target.vocab_size)
    variants = eagle3_variants(where, config)
    layers = eagle3_feature_layers(where, config, target.num_layers)
    section = {"use_aux_hidden_state": True, LAYER_IDS: list(layers)}
    return EAGLE3, config | variants | {EAGLE_SECTION: section}, _with_midlayer(tensors)


def _is_eagle3(config: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
    architectures = config.get("architectures") or []
    return any("Eagle3" in name for name in architectures) or any(
        name.startswith(f"{EAGLE3.layer}.") or "hidden_norm" in name for name in tensors
    )


def _of_speculators(where: str, config: dict[str, Any]) -> dict[str, Any]:
    """The flat config of a head whose layer config is nested."""
    nested = config.get(SPECULATORS_LAYER)
    layer: dict[str, Any] = nested if isinstance(nested, dict) else {}
    seen = {*(layer.get("layer_types") or ["full_attention"])}
    kind = config[SPECULATORS_KIND]
    for key, value, is_computed in (
        (SPECULATORS_KIND, kind, kind in _SPECULATORS_KINDS),
        ("model_type", layer.get("model_type"), layer.get("model_type") in ("llama", "qwen3")),
        ("layer_types", layer.get("layer_types"), seen <= {"full_attention", "sliding_attention"}),
    ):
        if not is_computed:
            raise UserError("unsupported head", f"{where} {key} {value!r}", OTHER_HEAD)
    missing = [key for key in _NEEDED_OF_SPECULATORS if key not in layer]
    # if it is missing, speculators assumes false, vLLM true
    if missing := missing + [key for key in (NORM_RESIDUAL,) if key not in config]:
        raise UserError("head config lacks a key", f"{where} {missing[0]}", "complete the config")
    own = {key: value for key, value in config.items() if key != "auto_map"}
    return layer | own | {"architectures": [_SPECULATORS_KINDS[kind]]}


def eagle3_variants(where: str, config: dict[str, Any]) -> dict[str, bool]:
    """Which variants of EAGLE-3 it is; NVIDIA's heads name them in their section."""
    section = config.get(EAGLE_SECTION) or {}
    if section.get("use_aux_hidden_state") is False:
        where = f"{where} use_aux_hidden_state False"
        raise UserError("unsupported variant of EAGLE-3", where, OTHER_HEAD)
    # SGLang's older name of the first
    given = {NORM_EACH: config.get("use_aux_norm")} | section | config
    return {key: bool(given.get(key) or section.get(key)) for key in VARIANTS}


def eagle3_feature_layers(where: str, config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs the head reads, whichever way its config counts them.

    vLLM and speculators name layers by their inputs, SGLang and SpecForge by their outputs. At the
    top level of a config, which the latter two do not read, inputs are meant, as in the configs
    that this project writes into a chain.
    """
    default = default_feature_layers(num_layers)
    inputs = config.get(LAYER_IDS) or []
    named = (config.get(EAGLE_SECTION) or {}).get(LAYER_IDS) or []
    if not inputs and named:
        after = [layer + 1 for layer in named if isinstance(layer, int)]
        if ORIGIN_KEY not in config and default not in (tuple(named), tuple(after)):
            raise UserError(
                "feature layers can be meant in two ways",
                f"{where} {EAGLE_SECTION}.{LAYER_IDS} {named}: for vLLM the inputs of these "
                "layers, for SGLang and SpecForge their outputs",
                f"name those whose inputs are meant by {LAYER_IDS} at the top of the config",
            )
        inputs = after if ORIGIN_KEY not in config and tuple(after) == default else named
    layers = tuple(inputs) or default
    if all(isinstance(layer, int) for layer in layers) and layers != tuple(sorted(layers)):
        raise UserError(
            "feature layers out of order",
            f"{where} {LAYER_IDS} {list(layers)}",
            "a head whose layers lie side by side in another order is not computed",
        )
    return layers


def _with_midlayer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with EAGLE-3's own layer name; speculators and SGLang call it layer 0."""
    own, counted = f"{EAGLE3.layer}.", f"{EAGLE2.layer}."
    if any(name.startswith(own) for name in tensors):
        return tensors
    return {
        own + name.removeprefix(counted) if name.startswith(counted) else name: tensor
        for name, tensor in tensors.items()
    }


def _hot_token_tables(
    source: Path, tensors: dict[str, Tensor], vocab_size: int
) -> dict[str, Tensor]:
    """The tables of a draft vocabulary that is stored next to the weights, as for SGLang."""
    path = source / HOT_TOKENS
    if OFFSETS in tensors or not path.is_file():
        return {}
    try:
        content = torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise _no_tokens(path, vocab_size) from error
    is_list = isinstance(content, list) and all(type(each) is int for each in content)
    if not is_list or not content or len({*content}) != len(content):
        raise _no_tokens(path, vocab_size)
    if min(content) < 0 or max(content) >= vocab_size:
        raise _no_tokens(path, vocab_size)
    return draft_tables(torch.tensor(sorted(content)), vocab_size)


def _no_tokens(path: Path, vocab_size: int) -> UserError:
    return UserError(
        "malformed draft vocabulary",
        f"{path} is no list of tokens below {vocab_size}, each once",
        "fetch or export the head again",
    )
