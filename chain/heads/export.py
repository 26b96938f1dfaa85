"""Writes a chain's draft head in the format of EAGLE's own code, vLLM or SGLang.

The formats follow their loaders: SafeAILab/EAGLE cb7e084 (eagle/model/ea_model.py
and cnets1.py) and, for EAGLE-3, 148042c (cnets.py) and f2f2366 (modeling_llama_kv.py); vLLM 0.33.0
(vllm/model_executor/models/llama_eagle.py, llama_eagle3.py and llama.py, vllm/transformers_utils/
configs/eagle.py, vllm/v1/worker/gpu_model_runner.py); SGLang 0.5.23 (sglang/srt/models/
llama_eagle.py, llama_eagle3.py, llama.py and qwen2_eagle.py, sglang/srt/speculative/
eagle_worker_v2.py and spec_utils.py, sglang/srt/model_executor/model_runner_components/
spec_aux_hidden_state.py). DFlash heads: vLLM 036a00d (qwen3_dflash.py), SGLang 003b23d (dflash.py).
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.config import ConfigFile
from polybasic.chain.formats.checkpoints.decoder_config import HeadConfig
from polybasic.chain.formats.checkpoints.draft_vocabulary import draft_token_ids
from polybasic.chain.formats.checkpoints.kinds import is_head
from polybasic.chain.formats.checkpoints.names import DRAFT_TABLES
from polybasic.chain.formats.files import read_json, whole_folder, write_json
from polybasic.chain.formats.head_kinds.dflash import DFLASH, block_of
from polybasic.chain.formats.head_kinds.eagle2 import EAGLE2
from polybasic.chain.formats.head_kinds.eagle3 import (
    EAGLE3,
    EAGLE_SECTION,
    LAYER_IDS,
    NORM_EACH,
    NORM_OUTPUT,
    VARIANTS,
    variants_of,
)
from polybasic.chain.formats.manifest import Manifest, Member
from polybasic.chain.formats.origin import ORIGIN_KEY
from polybasic.chain.formats.verify import CheckedChain, check_chain
from polybasic.chain.heads.compact import compacted
from polybasic.chain.heads.eagle_config import eagle3_config, eagle_config
from polybasic.chain.heads.foreign import HOT_TOKENS
from polybasic.chain.heads.importing import FC_BIAS, ROPE_THETA, qkv_biases

Engine = Literal["eagle", "vllm", "sglang"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
INT8 = "int8"
EXPORTED_TO_KEY = "exported_to"
_NAMES: dict[Engine, str] = {"eagle": "EAGLE", "vllm": "vLLM", "sglang": "SGLang"}
_VARIANTS: dict[Engine, tuple[str, ...]] = {
    "eagle": (),
    "vllm": VARIANTS,
    "sglang": (NORM_EACH, NORM_OUTPUT),
}
"""Of EAGLE-3, which each engine computes."""
_FILES = {"config.json", "model.safetensors", "pytorch_model.bin", HOT_TOKENS}


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        folder: the exported head.
        member: the head's name in the chain.
        kind: the head's.
        model: the model that the head drafts for, as engines take it: a folder or a hub id.
        four_bit_copies: folders of the model's 4-bit copies, which the head also drafts for.
        num_positions: tokens of a path that the head was trained for; None where there is no limit.
        hot_tokens: the file with the draft vocabulary that the engine reads besides the head.
        warnings: one line for each thing that the engine's code refuses or does differently.
    """

    folder: Path
    member: str
    kind: str
    model: str
    four_bit_copies: tuple[Path, ...] = ()
    num_positions: int | None = None
    hot_tokens: Path | None = None
    warnings: tuple[str, ...] = ()


def export_head(
    chain: Path,
    to: Engine,
    member: str | None,
    out: Path | None,
    target: str | None = None,
) -> Exported:
    """Write one of a chain's draft heads as a folder that an engine loads.

    Weights keep their dtype. An EAGLE-2 head's `fc.bias` is always written, because without it
    SGLang leaves it random (and EAGLE's older loader refuses the file), and must be zero for vLLM,
    which drops it. Its draft vocabulary becomes the file of hot tokens that SGLang reads; the other
    engines support none and draft over all tokens, which is reported. An EAGLE-3 head stores its
    draft vocabulary with its weights.

    Args:
        chain: folder of the chain.
        to: the engine.
        member: the head's name; default: the only head of the chain.
        out: folder to write, whole; default: member and engine, in the current folder. An export
            that is there is replaced.
        target: the folder or hub id that the chain's target is taken from; None for what the chain
            says.

    Raises:
        UserError: a broken chain, no such head, a head or target that the engine does not support,
            something else at `out`, or a full disk.
    """
    checked = check_chain(chain, target=target)
    head = _find_head(checked.manifest, member)
    folder = out or Path(f"{head.name}-{to}")
    _refuse_replacing(folder)
    source = checked.members[head.name]
    tensors, config = load_tensors(source), checked.configs[head.name]
    shape = config.head
    model, *copies = head.drafts_for
    _check_computes(to, shape, head.name, tensors, checked.configs[model])
    four_bit_copies = [name for name in copies if checked.manifest.member(name).kind == "awq"]
    token_ids = draft_token_ids(tensors, f"{source}")
    written = _written(shape, tensors)
    origin = dict(config.content.get(ORIGIN_KEY, {})) | {EXPORTED_TO_KEY: to}
    num_layers = checked.configs[model].decoder.num_layers
    writes_hot_tokens = to == "sglang" and shape.kind == "eagle2" and token_ids is not None
    with whole_folder(folder) as partial:
        if shape.kind == DFLASH.name:
            # a chain has it as its own code writes it
            content = {key: value for key, value in config.content.items() if key != ORIGIN_KEY}
        else:
            content = _config(to, shape, written, num_layers)
        write_json(partial / "config.json", content | {ORIGIN_KEY: origin})
        _save(to, partial, written)
        if token_ids is not None and writes_hot_tokens:
            torch.save(token_ids.tolist(), partial / HOT_TOKENS)
    return Exported(
        folder,
        head.name,
        shape.kind,
        _name_for_engines(checked, model),
        tuple(checked.members[name] for name in four_bit_copies),
        shape.num_positions,
        folder / HOT_TOKENS if writes_hot_tokens else None,
        _warnings(to, shape, num_layers),
    )


def export_compact(chain: Path, member: str | None, out: Path | None, target: str | None) -> Path:
    """Write one of a chain's draft heads in 8 bits.

    Args:
        chain: folder of the chain.
        member: the head's name; default: the only head of the chain.
        out: folder to write, whole; default: member and `int8`, in the current folder. An export
            that is there is replaced.
        target: as of `export_head`.

    Returns:
        The folder, which `draft.model` takes.

    Raises:
        UserError: a broken chain, no such head or none of EAGLE's, something else at `out`, or a
            full disk.
    """
    checked = check_chain(chain, target=target)
    head = _find_head(checked.manifest, member)
    folder = out or Path(f"{head.name}-{INT8}")
    _refuse_replacing(folder)
    shape = checked.configs[head.name].head
    if shape.kind not in (EAGLE2.name, EAGLE3.name):
        where = f"{head.name} is of kind {shape.kind}"
        raise UserError("head that is not kept in 8 bits", where, "choose a head of EAGLE's")
    content = dict(checked.configs[head.name].content)
    content[ORIGIN_KEY] = dict(content.get(ORIGIN_KEY, {})) | {EXPORTED_TO_KEY: INT8}
    tensors = compacted(load_tensors(checked.members[head.name]))
    with whole_folder(folder) as partial:
        write_json(partial / "config.json", content)
        save_file(tensors, partial / "model.safetensors", {"format": "pt"})
    return folder


def launch_command(to: Engine, exported: Exported) -> str:
    """How to run a model with its exported head: a shell command, or a line of Python for EAGLE."""
    model, head, is_eagle3 = exported.model, str(exported.folder), exported.kind == "eagle3"
    if to == "eagle":
        return (
            f"EaModel.from_pretrained(base_model_path={model!r}, ea_model_path={head!r}, "
            f"use_eagle3={is_eagle3})"
        )
    num_tokens = exported.num_positions
    method = "dflash" if exported.kind == DFLASH.name else "eagle3" if is_eagle3 else "eagle"
    if to == "vllm":
        config = {"method": method, "model": head, "num_speculative_tokens": num_tokens or 5}
        return shlex.join(["vllm", "serve", model, "--speculative-config", json.dumps(config)])
    speculative: dict[str, Any] = {"algorithm": method.upper(), "draft-model-path": head}
    if num_tokens is None:
        speculative |= {"num-steps": 5, "eagle-topk": 4, "num-draft-tokens": 16}
    else:
        # the last token of the sequence is one of them
        speculative["num-draft-tokens"] = num_tokens + 1
    if exported.hot_tokens is not None:
        speculative["token-map"] = f"{exported.hot_tokens}"
    options = [
        part for key, value in speculative.items() for part in (f"--speculative-{key}", f"{value}")
    ]
    return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", model, *options])


def _written(shape: HeadConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that are exported to all three engines, by EAGLE's own names."""
    if shape.kind == "eagle2":
        zeros = torch.zeros_like(tensors["layers.0.post_attention_layernorm.weight"])
        # no engine's EAGLE-2 class has a place for the tables, and vLLM's refuses them
        rest = {name: each for name, each in tensors.items() if name not in DRAFT_TABLES}
        return {FC_BIAS: zeros} | rest
    unused = {FC_BIAS, *qkv_biases(EAGLE3)}
    if shape.num_draft_tokens == shape.vocab_size:
        unused |= {*DRAFT_TABLES}
    return {name: tensor for name, tensor in tensors.items() if name not in unused}


def _find_head(manifest: Manifest, name: str | None) -> Member:
    heads = {member.name: member for member in manifest.members if is_head(member.kind)}
    where = f"the chain's heads: {', '.join(heads)}" if heads else "the chain has none"
    if name is None:
        if len(heads) != 1:
            raise UserError("which draft head", where, "name one with --member")
        return next(iter(heads.values()))
    if name in heads:
        return heads[name]
    names = [member.name for member in manifest.members]
    if name not in names:
        raise UserError("no such member", f"{name}; {where}", "name one with --member")
    raise UserError("member is no draft head", f"{name}; {where}", "name one with --member")


def _refuse_replacing(folder: Path) -> None:
    if folder.is_dir():
        names = {path.name for path in folder.iterdir()}
        if not names or (names <= _FILES and _is_export(folder)):
            return
    elif not folder.exists():
        return
    raise UserError(
        "would replace something that is no export", f"{folder}", "choose another with --out"
    )


def _is_export(folder: Path) -> bool:
    path = folder / "config.json"
    config = read_json(path, "config") if path.is_file() else None
    origin = config.get(ORIGIN_KEY) if isinstance(config, dict) else None
    return isinstance(origin, dict) and EXPORTED_TO_KEY in origin


def _check_computes(
    to: Engine, shape: HeadConfig, name: str, tensors: dict[str, Tensor], target: ConfigFile
) -> None:
    """Check that the engine computes the same with head and target as this runtime."""
    if shape.kind == DFLASH.name:
        if lacking := _lacks_of_dflash(to, shape):
            raise _not_computed(to, f"{name} {lacking}")
        return
    is_eagle3 = shape.kind == "eagle3"
    if not is_eagle3 and shape.kind != "eagle2":
        raise _not_computed(to, f"{name} is of kind {shape.kind}")
    if to != "eagle" and target.decoder.embedding_scale is not None:
        model_type = target.content["model_type"]
        reason = "its EAGLE class is Llama's"
        if is_eagle3:
            reason = "its class does not hand out the inputs of that model's layers"
        raise _not_computed(
            to, f"{name} drafts for {target.folder} of model_type {model_type}, {reason}"
        )
    for variant in variants_of(shape):
        if variant not in _VARIANTS[to]:
            raise _not_computed(to, f"{name} has {variant}")
    if shape.has_head_norms:
        raise _not_computed(to, f"{name} norms queries and keys")
    if shape.layer_kinds:
        raise _not_computed(to, f"{name} has a window")
    if len({*shape.feature_layers}) < len(shape.feature_layers):
        layers = _listed(shape.feature_layers)
        raise _not_computed(to, f"{name} reads layers {layers}, and it hands out each layer once")
    dropped: tuple[str, ...] = (FC_BIAS,) if is_eagle3 or to == "vllm" else ()
    dropped += qkv_biases(EAGLE3) if is_eagle3 else ()
    for bias in dropped:
        if bias in tensors and tensors[bias].any():
            described = "EAGLE-3" if is_eagle3 else "EAGLE"
            raise _not_computed(
                to, f"{bias} of {name} is not zero, and its {described} class drops it"
            )


def _lacks_of_dflash(to: Engine, shape: HeadConfig) -> str | None:
    """What a DFlash head has that an engine's class for them does not compute."""
    block = block_of(shape)
    has_windows = any(kind.window is not None for kind in shape.kinds)
    has = {
        "is a DFlash head": to == "eagle",
        "has a correction": block.correction is not None,
        "drafts after the anchor's row": block.predicts_next,
        "drafts a part of the vocabulary": shape.num_draft_tokens < shape.vocab_size,
        "says what rows of its block see": to == "sglang"
        and block.is_causal is not None
        and (block.is_causal or has_windows),
    }
    return next((what for what, is_so in has.items() if is_so), None)


def _warnings(to: Engine, shape: HeadConfig, num_layers: int) -> tuple[str, ...]:
    """What the engine's code refuses to load, or does differently from this runtime."""
    warnings = []
    is_trimmed = shape.num_draft_tokens < shape.vocab_size
    if is_trimmed and shape.kind == "eagle2" and to != "sglang":
        warnings.append(
            f"{_NAMES[to]} knows no draft vocabulary of an EAGLE-2 head: it drafts over all "
            f"{shape.vocab_size} tokens, not over {shape.num_draft_tokens}"
        )
    # the other engines share only the layout with EAGLE's own code
    if to != "eagle":
        return tuple(warnings)
    if shape.kind == "eagle2" and shape.head_dim * shape.num_heads != shape.hidden_size:
        sizes = f"{shape.num_heads} heads of {shape.head_dim} for hidden_size {shape.hidden_size}"
        warnings.append(f"EAGLE's own code does not load {sizes}: it divides the one by the other")
    rope_type, theta = shape.rope["rope_type"], shape.rope["rope_theta"]
    if rope_type != "default" and not _is_eagle_linear(shape.rope):
        warnings.append(
            f"EAGLE's own code does not compute rope_type {rope_type} with rope_theta {theta:g}"
        )
    if shape.kind == "eagle3" and shape.feature_layers != _engine_layers(num_layers):
        warnings.append(
            f"EAGLE's own code reads the inputs of layers {_listed(_engine_layers(num_layers))} "
            f"of this model, the head was trained on those of {_listed(shape.feature_layers)}"
        )
    return tuple(warnings)


def _engine_layers(num_layers: int) -> tuple[int, ...]:
    """Layers whose inputs all three engines read if a config names none."""
    return 2, num_layers // 2, num_layers - 3


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))


def _is_eagle_linear(rope: dict[str, Any]) -> bool:
    """Whether EAGLE's code scales in this way: with a factor it supports only its default base."""
    return rope["rope_type"] == "linear" and rope["rope_theta"] == ROPE_THETA


def _not_computed(to: Engine, where: str) -> UserError:
    elsewhere = "" if to == "eagle" else ", or export it --to eagle for other readers"
    return UserError(
        f"{_NAMES[to]} does not compute this head", where, f"run the chain here{elsewhere}"
    )


def _config(
    to: Engine, shape: HeadConfig, tensors: dict[str, Tensor], num_layers: int
) -> dict[str, Any]:
    """The config.json that the engine reads.

    `bias` means that of fc for EAGLE and for SGLang's EAGLE-3 class; otherwise vLLM and SGLang read
    it as biases of the attention projections, which would be uninitialised memory. `qkv_bias` is
    read by EAGLE and vLLM; SGLang has another class for EAGLE-2 heads with such biases.
    """
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    if shape.kind == "eagle3":
        draft_vocab_size = shape.num_draft_tokens
        layers, variants = shape.feature_layers, variants_of(shape)
        config = eagle3_config(shape, False, dtype, layers, draft_vocab_size, variants)
        config |= _layer_ids(shape.feature_layers, num_layers)
    else:
        has_qkv_bias = qkv_biases(EAGLE2)[0] in tensors
        config = eagle_config(shape, has_qkv_bias, dtype)
        config["bias"] = to == "eagle"
        if to == "sglang":
            config["architectures"] = ["LlamaForCausalLMEagle"]
            if has_qkv_bias:
                config |= {"architectures": ["Qwen2ForCausalLMEagle"], "model_type": "qwen2"}
    if to == "eagle" and _is_eagle_linear(shape.rope):
        # its config class accepts only these two keys
        config["rope_scaling"] = {"type": "linear", "factor": shape.rope["factor"]}
    return {**config, "attention_bias": False, "hidden_act": shape.activation}


def _layer_ids(layers: tuple[int, ...], num_layers: int) -> dict[str, Any]:
    """The layers that an EAGLE-3 head reads, in each engine's way of counting.

    vLLM looks at the top level first and counts layers by their inputs; SGLang and SpecForge look
    into `eagle_config` and count them by their outputs. EAGLE's own code reads neither.
    """
    if layers == _engine_layers(num_layers):
        return {EAGLE_SECTION: {"use_aux_hidden_state": True}}
    outputs = [layer - 1 for layer in layers]
    return {
        LAYER_IDS: list(layers),
        EAGLE_SECTION: {"use_aux_hidden_state": True, LAYER_IDS: outputs},
    }


def _save(to: Engine, folder: Path, tensors: dict[str, Tensor]) -> None:
    if to == "eagle":
        # all versions of EAGLE's loader look for this file, older ones only for this
        torch.save(
            {name: tensor.clone() for name, tensor in tensors.items()}, folder / "pytorch_model.bin"
        )
        return
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _name_for_engines(checked: CheckedChain, name: str) -> str:
    """A verifying member as engines take it: a hub id or a folder."""
    reference = checked.manifest.member(name).reference
    if reference.path is None and reference.source and not reference.source.startswith((".", "/")):
        return reference.source
    return str(checked.members[name])
