"""Imports heads that others trained into a chain.

Those of EAGLE-1, EAGLE-2 and EAGLE-3 are read here, Medusa's and Hydra's by
`polybasic.chain.heads.medusa`. EAGLE's layouts are those of SafeAILab/EAGLE's own checkpoints
(eagle/model/cnets1.py and cnets.py): one fc and one Llama layer, with a config.json in Llama style;
other formats of EAGLE-3 are converted by `polybasic.chain.heads.foreign`.
"""

import re
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.config import head_config, read_config
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig
from polybasic.chain.formats.checkpoints.draft_vocabulary import OFFSETS, draft_token_ids
from polybasic.chain.formats.checkpoints.names import DRAFT_TABLES
from polybasic.chain.formats.files import whole_folder, write_json
from polybasic.chain.formats.head_kinds.eagle2 import EAGLE2
from polybasic.chain.formats.head_kinds.eagle3 import (
    EAGLE3,
    EAGLE3_ARCHITECTURE,
    EAGLE_SECTION,
    NORM_ALL,
    NORM_EACH,
    NUM_FEATURE_LAYERS,
    VARIANTS,
    feature_norm_names,
)
from polybasic.chain.formats.head_kinds.kind import HeadKind
from polybasic.chain.formats.head_kinds.table import head_kind_of
from polybasic.chain.formats.lineage import TRAINED_FOR_KEY, weights_digest
from polybasic.chain.formats.origin import ORIGIN_KEY
from polybasic.chain.heads.checks import EMBEDDING, check_copy, check_sizes, check_tensors
from polybasic.chain.heads.compact import expanded
from polybasic.chain.heads.dflash import in_dflash_format, is_dflash
from polybasic.chain.heads.foreign import (
    DRAFT_VOCAB_SIZE,
    OTHER_HEAD,
    in_eagle_format,
    read_foreign_config,
)
from polybasic.chain.heads.medusa import in_medusa_format, is_medusa
from polybasic.chain.heads.peagle import in_peagle_format, is_peagle
from polybasic.chain.model.stored import StoredTensors

IMPORTED_FROM_KEY = "imported_from"
"""Next to `TRAINED_FOR_KEY` in a head's config.json: where the head came from."""
FC_BIAS = "fc.bias"
ROPE_THETA = 10000.0
"""What EAGLE's code uses if the head's config has none, whatever the target's."""
_IGNORED = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_LATER_LAYER = re.compile(r"layers\.[1-9]\d*\.")


def qkv_biases(kind: HeadKind) -> tuple[str, ...]:
    """Names of the optional biases of queries, keys and values."""
    return tuple(f"{kind.layer}.self_attn.{part}_proj.bias" for part in "qkv")


def head_norms(kind: HeadKind) -> tuple[str, ...]:
    """Names of the norms of queries and keys, which an EAGLE-3 head may have."""
    return tuple(f"{kind.layer}.self_attn.{part}_norm.weight" for part in "qk" if kind is EAGLE3)


def required_weights(kind: HeadKind) -> tuple[str, ...]:
    """Names of the tensors of every head of the kind; engines leave missing ones random."""
    layer = kind.layer
    names = (
        "fc.weight",
        *(f"{layer}.self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        *(f"{layer}.{norm}.weight" for norm in kind.norms.values()),
    )
    return (*names, "norm.weight", "lm_head.weight") if kind is EAGLE3 else names


def import_head(
    source: Path, target: Path, out: Path, trained_for: Path | None = None
) -> dict[str, Any]:
    """Turn a head that is stored as others publish it into a chain's draft head.

    Its weights are kept bit for bit, in their stored dtype, or made of 8 bits; a missing `fc.bias`
    of an EAGLE-2 head is written as zeros, and a missing embedding is the target's.

    Args:
        source: the head: config.json, and what `weight_files` finds.
        target: the model that the head will draft for.
        out: folder to write, whole; an older one is replaced.
        trained_for: the model whose weights the head is declared for; default: `target`.

    Returns:
        imported_from, kind, parameters (without the embedding), dtype, draft_vocab_size (None:
        all tokens), and of an EAGLE head feature_layers (of EAGLE-3), has_fc_bias and
        has_qkv_biases (whether they have any effect).

    Raises:
        UserError: no head in a known layout, a head of another shape or for another model than
            `target`, an unsupported variant, or a full disk.
    """
    if out.resolve() == source.resolve():
        raise UserError("head would be replaced", f"{out}", "write to another folder")
    config, model = read_foreign_config(source), read_config(target).decoder
    stored = expanded(load_tensors(source), f"{source}")
    if is_medusa(config):
        completed, tensors = in_medusa_format(source, config, stored, target)
        return _write(source, out, trained_for or target, completed, tensors)
    if is_peagle(config):
        completed, tensors = in_peagle_format(source, config, stored, target)
        return _write(source, out, trained_for or target, completed, tensors)
    if is_dflash(config):
        completed, tensors = in_dflash_format(source, config, stored, target)
        return _write(source, out, trained_for or target, completed, tensors)
    tensors = {name: tensor for name, tensor in stored.items() if not _IGNORED.fullmatch(name)}
    kind, config, tensors = in_eagle_format(source, config, tensors, model)
    _check_layout(kind, source, config, tensors)
    completed = _complete(kind, config, tensors, model)
    where = f"{source / 'config.json'}"
    head = head_config(completed, where)
    check_sizes(where, head, model, target)
    check_tensors(source, tensors, head)
    draft_token_ids(tensors, f"{source}")
    dtype = tensors["fc.weight"].dtype
    embedding = StoredTensors(target, dtype, torch.device("cpu")).stored(
        "model.embed_tokens.weight"
    )
    if EMBEDDING in tensors:
        check_copy(source, target, EMBEDDING, tensors[EMBEDDING], embedding)
    else:
        tensors[EMBEDDING] = embedding.to(dtype)
    if kind is EAGLE2:
        tensors.setdefault(FC_BIAS, torch.zeros(head.hidden_size, dtype=dtype))
    completed["torch_dtype"] = str(dtype).removeprefix("torch.")
    return {
        **_write(source, out, trained_for or target, completed, tensors),
        "feature_layers": list(head.feature_layers),
        "has_fc_bias": FC_BIAS in tensors and bool(tensors[FC_BIAS].any()),
        "has_qkv_biases": any(
            bool(tensors[name].any()) for name in qkv_biases(kind) if name in tensors
        ),
    }


def _write(
    source: Path, out: Path, trained_for: Path, config: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Write the head whole, with where it came from; the summary of heads of all kinds."""
    imported_from = _name(source)
    origin = {TRAINED_FOR_KEY: weights_digest(trained_for), IMPORTED_FROM_KEY: imported_from}
    with whole_folder(out) as partial:
        write_json(partial / "config.json", config | {ORIGIN_KEY: origin})
        # clones: tensors of a pickle may share memory, which safetensors refuses
        copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(copies, partial / "model.safetensors", {"format": "pt"})
    no_weights = {EMBEDDING, *DRAFT_TABLES}
    return {
        "imported_from": imported_from,
        "kind": head_kind_of(config, f"{source}").name,
        "parameters": sum(
            prod(each.shape) for name, each in tensors.items() if name not in no_weights
        ),
        "dtype": config["torch_dtype"],
        "draft_vocab_size": len(tensors[OFFSETS]) if OFFSETS in tensors else None,
    }


def _check_layout(
    kind: HeadKind, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Check that all tensors of the layout are there, and no others."""
    names, biases = sorted(tensors), qkv_biases(kind)
    if found := [name for name in names if _LATER_LAYER.match(name)]:
        raise UserError("head of several layers", f"{found[0]} in {folder}", OTHER_HEAD)
    if (num_layers := config.get("num_hidden_layers", 1)) != 1:
        where = f"num_hidden_layers {num_layers} in {folder / 'config.json'}"
        raise UserError("head of several layers", where, OTHER_HEAD)
    fc_biases = (FC_BIAS,) if kind is EAGLE2 else ()
    expected = list(required_weights(kind))
    if config.get(NORM_EACH) or config.get(NORM_ALL):
        expected += feature_norm_names(NUM_FEATURE_LAYERS if config.get(NORM_EACH) else 1)
    if tensors.keys() & {*head_norms(kind)}:
        expected += head_norms(kind)
    known = {*expected, EMBEDDING, *fc_biases, *biases, *DRAFT_TABLES}
    if unknown := [name for name in names if name not in known]:
        raise UserError("unknown tensor in the head", f"{unknown[0]} in {folder}", OTHER_HEAD)
    if config.get("bias"):
        expected += fc_biases
    if config.get("qkv_bias") or tensors.keys() & {*biases}:
        expected += biases
    if missing := [name for name in expected if name not in tensors]:
        raise UserError("missing tensor", f"{missing[0]} in {folder}", "download the head again")
    for key, of_key in (("bias", fc_biases), ("qkv_bias", biases)):
        unused = [name for name in of_key if name in tensors and tensors[name].any()]
        if config.get(key) is False and unused:
            raise UserError(
                "head and its config disagree",
                f"{unused[0]} in {folder} is not zero, {key} in its config.json is false",
                f"set {key} to true if the head was trained with it, else remove the tensor",
            )


def _complete(
    kind: HeadKind, config: dict[str, Any], tensors: dict[str, Tensor], model: DecoderConfig
) -> dict[str, Any]:
    """The head's config.json as this project writes it; missing values come from the weights, else
    from the target."""
    given = {key: value for key, value in config.items() if value is not None}
    layer = kind.layer
    num_heads = given.get("num_attention_heads", model.num_heads)
    head_dim = given.get("head_dim", len(tensors[f"{layer}.self_attn.q_proj.weight"]) // num_heads)
    num_kv_heads = len(tensors[f"{layer}.self_attn.k_proj.weight"]) // max(head_dim, 1)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bias": True,
        "qkv_bias": qkv_biases(kind)[0] in tensors,
        "hidden_act": given.get("hidden_act", "silu"),
        "hidden_size": given.get("hidden_size", len(tensors["fc.weight"])),
        "intermediate_size": given.get(
            "intermediate_size", len(tensors[f"{layer}.mlp.gate_proj.weight"])
        ),
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": given.get("num_key_value_heads", num_kv_heads),
        "head_dim": head_dim,
        "rms_norm_eps": given.get("rms_norm_eps", model.rms_norm_eps),
        **_rope(given),
        # heads declare the length that they were trained at; rotary positions work beyond it
        "max_position_embeddings": model.context_tokens,
        "vocab_size": given.get("vocab_size", model.vocab_size),
        "tie_word_embeddings": False,
        **_vocabulary(kind, given, tensors),
        **(_eagle3_keys(given, tensors) if kind is EAGLE3 else {}),
    }


def _vocabulary(
    kind: HeadKind, given: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """How many tokens are drafted, if the config or the weights say so."""
    name = "lm_head.weight" if kind.has_lm_head else OFFSETS
    stored = {DRAFT_VOCAB_SIZE: len(tensors[name])} if name in tensors else {}
    return stored | {key: given[key] for key in (DRAFT_VOCAB_SIZE,) if key in given}


def _eagle3_keys(given: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Where the config of an EAGLE-3 head differs from that of an EAGLE-2 head."""
    has_head_norms = head_norms(EAGLE3)[0] in tensors
    return {
        "architectures": [EAGLE3_ARCHITECTURE],
        "model_type": "qwen3" if has_head_norms else "llama",
        "bias": False,
        "target_hidden_size": given.get("target_hidden_size", len(tensors["fc.weight"])),
        EAGLE_SECTION: given[EAGLE_SECTION],
        **{key: True for key in VARIANTS if given[key]},
        **{key: given[key] for key in ("layer_types", "sliding_window") if key in given},
    }


def _rope(given: dict[str, Any]) -> dict[str, Any]:
    if "rope_parameters" in given:
        return {"rope_parameters": given["rope_parameters"]}
    rope = {"rope_theta": given.get("rope_theta", ROPE_THETA)}
    return rope | {key: given[key] for key in ("rope_scaling",) if key in given}


def _name(folder: Path) -> str:
    """`org/name@revision` of a snapshot in the hub's cache, else the folder's name alone: a chain
    names no place of a machine."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return folder.resolve().name
    return f"{repository.removeprefix('models--').replace('--', '/')}@{folder.name}"
