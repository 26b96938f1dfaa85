"""Imports EAGLE-1, EAGLE-2 and EAGLE-3 heads that others trained into a chain.

The layouts are those of SafeAILab/EAGLE's own checkpoints (eagle/model/cnets1.py and cnets.py): one
fc and one Llama layer, with a config.json in Llama style; other formats of EAGLE-3 are converted by
`polybasic.chain.heads.foreign`.
"""

import re
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from polybasic.chain.errors import UserError
from polybasic.chain.formats.checkpoint import load_tensors
from polybasic.chain.formats.config import check_feature_layers, head_config, read_config
from polybasic.chain.formats.decoder_config import DecoderConfig, HeadConfig
from polybasic.chain.formats.draft_vocabulary import OFFSETS, draft_token_ids
from polybasic.chain.formats.files import whole_folder, write_json
from polybasic.chain.formats.head_kinds.eagle2 import EAGLE2
from polybasic.chain.formats.head_kinds.eagle3 import EAGLE3, EAGLE3_ARCHITECTURE, EAGLE_SECTION
from polybasic.chain.formats.head_kinds.kind import HeadKind
from polybasic.chain.formats.lineage import TRAINED_FOR_KEY, weights_digest
from polybasic.chain.formats.names import DRAFT_TABLES
from polybasic.chain.formats.origin import ORIGIN_KEY
from polybasic.chain.formats.shapes import expected_shapes
from polybasic.chain.heads.foreign import (
    DRAFT_VOCAB_SIZE,
    OTHER_HEAD,
    in_eagle_format,
    read_foreign_config,
)
from polybasic.chain.model.stored import StoredTensors

IMPORTED_FROM_KEY = "imported_from"
"""Next to `TRAINED_FOR_KEY` in a head's config.json: where the head came from."""
EMBEDDING = "embed_tokens.weight"
FC_BIAS = "fc.bias"
ROPE_THETA = 10000.0
"""What EAGLE's code uses if the head's config has none, whatever the target's."""
_IGNORED = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_LATER_LAYER = re.compile(r"layers\.[1-9]\d*\.")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_COMPARED_ROWS = 8192
# A copy of the embedding may have been rounded to bfloat16 (8 bits) or float16 (least step 6e-8).
_RELATIVE_ROUNDING, _ABSOLUTE_ROUNDING = 2**-8, 2e-7


def qkv_biases(kind: HeadKind) -> tuple[str, ...]:
    """Names of the optional biases of queries, keys and values."""
    return tuple(f"{kind.layer}.self_attn.{part}_proj.bias" for part in "qkv")


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
    """Turn a head that is stored in EAGLE's layout into a chain's draft head.

    Its weights are kept bit for bit, in their stored dtype; a missing `fc.bias` of an EAGLE-2 head
    is written as zeros, and a missing embedding is the target's.

    Args:
        source: the head: config.json, and model.safetensors or pytorch_model.bin.
        target: the model that the head will draft for.
        out: folder to write, whole; an older one is replaced.
        trained_for: the model whose weights the head is declared for; default: `target`.

    Returns:
        imported_from, kind, parameters (without the embedding), dtype, draft_vocab_size (None:
        all tokens), feature_layers (of an EAGLE-3 head), has_fc_bias and has_qkv_biases (whether
        they have any effect).

    Raises:
        UserError: no head in EAGLE's layout, a head of another shape or for another model than
            `target`, an unsupported variant, or a full disk.
    """
    if out.resolve() == source.resolve():
        raise UserError("head would be replaced", f"{out}", "write to another folder")
    config, model = read_foreign_config(source), read_config(target).decoder
    stored = load_tensors(source)
    tensors = {name: tensor for name, tensor in stored.items() if not _IGNORED.fullmatch(name)}
    kind, config, tensors = in_eagle_format(source, config, tensors, model)
    _check_layout(kind, source, config, tensors)
    completed = _complete(kind, config, tensors, model)
    where = f"{source / 'config.json'}"
    head = head_config(completed, where)
    _check_sizes(where, head, model, target)
    _check_tensors(source, tensors, head)
    draft_token_ids(tensors, f"{source}")
    dtype = tensors["fc.weight"].dtype
    embedding = StoredTensors(target, dtype, torch.device("cpu")).stored(
        "model.embed_tokens.weight"
    )
    if EMBEDDING in tensors:
        _check_embedding(source, target, tensors[EMBEDDING], embedding)
    else:
        tensors[EMBEDDING] = embedding.to(dtype)
    if kind is EAGLE2:
        tensors.setdefault(FC_BIAS, torch.zeros(head.hidden_size, dtype=dtype))
    imported_from = _name(source)
    completed["torch_dtype"] = str(dtype).removeprefix("torch.")
    completed[ORIGIN_KEY] = {
        TRAINED_FOR_KEY: weights_digest(trained_for or target),
        IMPORTED_FROM_KEY: imported_from,
    }
    with whole_folder(out) as partial:
        write_json(partial / "config.json", completed)
        # clones: tensors of a pickle may share memory, which safetensors refuses
        copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(copies, partial / "model.safetensors", {"format": "pt"})
    no_weights = {EMBEDDING, *DRAFT_TABLES}
    return {
        "imported_from": imported_from,
        "kind": kind.name,
        "parameters": sum(
            prod(each.shape) for name, each in tensors.items() if name not in no_weights
        ),
        "dtype": completed["torch_dtype"],
        "draft_vocab_size": len(tensors[OFFSETS]) if OFFSETS in tensors else None,
        "feature_layers": list(head.feature_layers),
        "has_fc_bias": FC_BIAS in tensors and bool(tensors[FC_BIAS].any()),
        "has_qkv_biases": any(
            bool(tensors[name].any()) for name in qkv_biases(kind) if name in tensors
        ),
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
    return {
        "architectures": [EAGLE3_ARCHITECTURE],
        "bias": False,
        "target_hidden_size": given.get("target_hidden_size", len(tensors["fc.weight"])),
        EAGLE_SECTION: given[EAGLE_SECTION],
    }


def _rope(given: dict[str, Any]) -> dict[str, Any]:
    if "rope_parameters" in given:
        return {"rope_parameters": given["rope_parameters"]}
    rope = {"rope_theta": given.get("rope_theta", ROPE_THETA)}
    return rope | {key: given[key] for key in ("rope_scaling",) if key in given}


def _check_sizes(where: str, head: HeadConfig, model: DecoderConfig, target: Path) -> None:
    for key in ("hidden_size", "vocab_size"):
        found, expected = getattr(head, key), getattr(model, key)
        if found != expected:
            raise UserError(
                "head does not fit its target",
                f"{key} {found} in {where}, {expected} in {target / 'config.json'}",
                "name the model that the head was trained for, or a head for this one",
            )
    check_feature_layers(head, model.num_layers, where)


def _check_tensors(folder: Path, tensors: dict[str, Tensor], head: HeadConfig) -> None:
    expected = dict(expected_shapes(head.kind, head, None, tensors.keys()))
    tables = [name for name in DRAFT_TABLES if name in expected]
    if missing := [name for name in tables if name not in tensors]:
        raise UserError("missing tensor", f"{missing[0]} in {folder}", "download the head again")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise UserError(
                "tensor shape mismatch",
                f"{name} in {folder} is {list(tensor.shape)}, by its config.json "
                f"{list(expected[name])}",
                "weights and config are of two heads: download both again",
            )
        if name not in tables and tensor.dtype not in _DTYPES:
            raise UserError(
                "unsupported dtype",
                f"{name} in {folder} is {tensor.dtype}",
                "store the head in bfloat16, float16 or float32",
            )


def _check_embedding(source: Path, target: Path, found: Tensor, expected: Tensor) -> None:
    """A head keeps a frozen copy of the embedding that it was trained with."""
    for rows in zip(found.split(_COMPARED_ROWS), expected.split(_COMPARED_ROWS), strict=True):
        copied, original = (part.float() for part in rows)
        if not torch.allclose(copied, original, _RELATIVE_ROUNDING, _ABSOLUTE_ROUNDING):
            difference = (copied - original).abs().max().item()
            raise UserError(
                "head of another model",
                f"{EMBEDDING} in {source} differs from the embedding of {target} by up to "
                f"{difference:.2g}",
                "name the model that the head was trained for, or a head for this one",
            )


def _name(folder: Path) -> str:
    """`org/name@revision` of a snapshot in the hub's cache, else the folder as it was given."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return str(folder)
    return f"{repository.removeprefix('models--').replace('--', '/')}@{folder.name}"
