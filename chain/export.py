"""A chain's draft head, written as EAGLE's own code, vLLM or SGLang reads it.

What each of them reads was taken from its loader: SafeAILab/EAGLE cb7e084 (eagle/model/ea_model.py
and cnets1.py), vLLM 0.33.0 (vllm/model_executor/models/llama_eagle.py and llama.py,
vllm/transformers_utils/configs/eagle.py), SGLang 0.5.23 (sglang/srt/models/llama_eagle.py,
llama.py and qwen2_eagle.py).
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from polybasic.chain.checkpoint import load_tensors
from polybasic.chain.config import DecoderConfig, head_config, read_decoder_config
from polybasic.chain.eagle_config import eagle_config
from polybasic.chain.eagle_import import FC_BIAS, QKV_BIASES, ROPE_THETA
from polybasic.chain.errors import UserError
from polybasic.chain.files import read_json, whole_folder, write_json
from polybasic.chain.lineage import ORIGIN_KEY
from polybasic.chain.manifest import Manifest, Member
from polybasic.chain.verify import CheckedChain, check_chain, read_config

Engine = Literal["eagle", "vllm", "sglang"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
EXPORTED_TO_KEY = "exported_to"
_NAMES: dict[Engine, str] = {"eagle": "EAGLE", "vllm": "vLLM", "sglang": "SGLang"}
_FILES = {"config.json", "model.safetensors", "pytorch_model.bin"}


@dataclass(frozen=True)
class Exported:
    """What was written and what it goes with.

    Attributes:
        folder: the exported head.
        member: the head's name in the chain.
        model: what the head drafts for, as an engine is given it: a folder or a hub id.
        four_bit_copies: folders of its copies in 4 bits, which the head drafts for too.
        warnings: one line each, of what the engine's code will stop at.
    """

    folder: Path
    member: str
    model: str
    four_bit_copies: tuple[Path, ...]
    warnings: tuple[str, ...] = ()


def export_head(chain: Path, to: Engine, member: str | None, out: Path | None) -> Exported:
    """Write one of a chain's draft heads as a folder that an engine loads.

    Weights and their dtype are kept; `fc.bias` is always written, because SGLang leaves it random
    without (and EAGLE's older loader refuses the file), and must be zero for vLLM, which drops it.

    Args:
        chain: folder of the chain.
        to: the engine.
        member: the head's name; default: the only head of the chain.
        out: folder to write, whole; default: member and engine, in the current folder. An export
            that is there is replaced.

    Raises:
        UserError: a broken chain, no such head, a head or target that the engine does not compute,
            something else at `out`, or a full disk.
    """
    checked = check_chain(chain)
    head = _find_head(checked.manifest, member)
    folder = out or Path(f"{head.name}-{to}")
    _refuse_replacing(folder)
    source = checked.members[head.name]
    tensors = load_tensors(source)
    tensors.setdefault(
        FC_BIAS, torch.zeros_like(tensors["layers.0.post_attention_layernorm.weight"])
    )
    config = read_config(source)
    shape = head_config(config, f"{source / 'config.json'}")
    model, *copies = head.drafts_for
    _check_computes(to, head.name, tensors, checked.members[model])
    four_bit_copies = [name for name in copies if checked.manifest.member(name).kind == "awq"]
    origin = dict(config.get(ORIGIN_KEY, {})) | {EXPORTED_TO_KEY: to}
    with whole_folder(folder) as partial:
        write_json(
            partial / "config.json",
            _config(to, shape, tensors) | {ORIGIN_KEY: origin},
        )
        _save(to, partial, tensors)
    return Exported(
        folder,
        head.name,
        _name_for_engines(checked, model),
        tuple(checked.members[name] for name in four_bit_copies),
        _warnings(to, shape),
    )


def launch_command(to: Engine, model: str, head: Path) -> str:
    """What runs `model` with the exported head: a shell command, for EAGLE a line of Python."""
    if to == "eagle":
        return (
            f"EaModel.from_pretrained(base_model_path={model!r}, ea_model_path={str(head)!r}, "
            "use_eagle3=False)"
        )
    if to == "vllm":
        options = {"method": "eagle", "model": str(head), "num_speculative_tokens": 5}
        return shlex.join(["vllm", "serve", model, "--speculative-config", json.dumps(options)])
    options = {"num-steps": 5, "eagle-topk": 4, "num-draft-tokens": 16}
    return shlex.join(
        [
            *("python", "-m", "sglang.launch_server", "--model-path", model),
            *("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(head)),
            *(
                part
                for key, value in options.items()
                for part in (f"--speculative-{key}", f"{value}")
            ),
        ]
    )


def _find_head(manifest: Manifest, name: str | None) -> Member:
    heads = {member.name: member for member in manifest.members if member.kind == "eagle2"}
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


def _check_computes(to: Engine, name: str, tensors: dict[str, Tensor], target: Path) -> None:
    """That the engine computes with head and target what this runtime does."""
    if to == "eagle":
        return
    if read_decoder_config(target).embedding_scale is not None:
        model_type = read_config(target)["model_type"]
        raise _not_computed(
            to, f"{name} drafts for {target} of model_type {model_type}, its EAGLE class is Llama's"
        )
    if to == "vllm" and tensors[FC_BIAS].any():
        raise _not_computed(to, f"fc.bias of {name} is not zero, and its EAGLE class drops it")


def _warnings(to: Engine, shape: DecoderConfig) -> tuple[str, ...]:
    """What EAGLE's own code, which others follow in the layout only, stops at when it loads."""
    if to != "eagle":
        return ()
    warnings = []
    if shape.head_dim * shape.num_heads != shape.hidden_size:
        sizes = f"{shape.num_heads} heads of {shape.head_dim} for hidden_size {shape.hidden_size}"
        warnings.append(f"EAGLE's own code does not load {sizes}: it divides the one by the other")
    rope_type, theta = shape.rope["rope_type"], shape.rope["rope_theta"]
    if rope_type != "default" and not _is_eagle_linear(shape.rope):
        warnings.append(
            f"EAGLE's own code does not compute rope_type {rope_type} with rope_theta {theta:g}"
        )
    return tuple(warnings)


def _is_eagle_linear(rope: dict[str, Any]) -> bool:
    """Scaled as EAGLE's code scales: it takes no other base beside a factor."""
    return rope["rope_type"] == "linear" and rope["rope_theta"] == ROPE_THETA


def _not_computed(to: Engine, where: str) -> UserError:
    return UserError(
        f"{_NAMES[to]} does not compute this head",
        where,
        "run the chain here, or export it --to eagle for other readers",
    )


def _config(to: Engine, shape: DecoderConfig, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The config.json that the engine reads.

    `bias` is that of fc for EAGLE; vLLM and SGLang read it as biases on the attention projections,
    which then hold whatever memory did. `qkv_bias` is read by EAGLE and vLLM; SGLang has another
    class for heads that have them.
    """
    has_qkv_bias = QKV_BIASES[0] in tensors
    architecture, model_type = "LlamaForCausalLM", "llama"
    if to == "sglang":
        architecture = "LlamaForCausalLMEagle"
        if has_qkv_bias:
            architecture, model_type = "Qwen2ForCausalLMEagle", "qwen2"
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    config = eagle_config(shape, has_qkv_bias, dtype)
    if to == "eagle" and _is_eagle_linear(shape.rope):
        # its config class takes these two keys and no others
        config["rope_scaling"] = {"type": "linear", "factor": shape.rope["factor"]}
    return {
        **config,
        "architectures": [architecture],
        "model_type": model_type,
        "bias": to == "eagle",
        "attention_bias": False,
        "hidden_act": shape.activation,
    }


def _save(to: Engine, folder: Path, tensors: dict[str, Tensor]) -> None:
    if to == "eagle":
        # all versions of EAGLE's loader look for this file, the older ones for no other
        torch.save(
            {name: tensor.clone() for name, tensor in tensors.items()}, folder / "pytorch_model.bin"
        )
        return
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _name_for_engines(checked: CheckedChain, name: str) -> str:
    """A verifying member as an engine is given it."""
    reference = checked.manifest.member(name).reference
    if reference.path is None and reference.source and not reference.source.startswith((".", "/")):
        return reference.source
    return str(checked.members[name])
