"""A base checkpoint and a LoRA adapter of it, merged into one checkpoint."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import (
    TOKENIZER_FILES,
    checkpoint_files,
    copy_files,
    model_files,
    read_tensors,
)
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.files import read_json, sha256_of_file, whole_folder
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.model.reference import load_reference_model, quiet_transformers

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_SHARD_SIZE = "5GB"
_UNMERGEABLE = ("layer_replication", "alora_invocation_tokens", "arrow_config", "megatron_config")
"""Settings of a LoRA that make of it more than sums with the base's weights."""
_ENDS = ("embed_tokens", "lm_head")


def merge_adapter(base: Path, adapter: Path, out: Path) -> dict[str, Any]:
    """Write the checkpoint that `base` is with `adapter`, whole, in the base's dtype.

    Config and generation config are the base's own files, the tokenizer's are the adapter's if
    it has a tokenizer.

    Args:
        base: folder of a transformers checkpoint that is not quantized.
        adapter: folder of a peft LoRA adapter: adapter_config.json and adapter_model.safetensors
            or .bin, which is read as tensors only.
        out: folder to write.

    Returns:
        adapter (the folder), adapter_sha256 (of its weights), rank, num_adapted (matrices),
        base_sha256.

    Raises:
        UserError: a quantized base, an adapter of another kind than LoRA, for another base, that
            changes the vocabulary or holds more than tensors, or a full disk.
    """
    config = _read_config(base, adapter)
    weights_file = _weights_file(adapter)
    tensors = _read_weights(weights_file)
    model = load_reference_model(base, "auto")
    merged, num_adapted = _merge(model, tensors, adapter)
    # transformers refuses to write what many have (a temperature without sampling); theirs is kept
    merged.generation_config = GenerationConfig()
    with whole_folder(out) as partial:
        with quiet_transformers():
            merged.save_pretrained(partial, max_shard_size=_SHARD_SIZE)
        _copy_beside_weights(base, adapter, partial)
    return {
        "adapter": str(adapter),
        "adapter_sha256": sha256_of_file(weights_file),
        "rank": config["r"],
        "num_adapted": num_adapted,
        "base_sha256": weights_digest(base),
    }


def _read_config(base: Path, adapter: Path) -> dict[str, Any]:
    path = adapter / _CONFIG
    config = read_json(path, "adapter config")
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise UserError(
            "adapter that is no LoRA", f"{path} peft_type {kind!r}", "merge it with its own tool"
        )
    for name in _UNMERGEABLE:
        if config.get(name):
            raise UserError(
                "adapter that does not merge",
                f"{path} {name} {json.dumps(config[name])}",
                "use an adapter that only adds to the base's weights",
            )
    for name in sorted(config.keys() - LoraConfig.__dataclass_fields__):
        if config[name]:
            raise UserError(
                "adapter of another version of peft",
                f"{path} {name} {json.dumps(config[name])}",
                "upgrade peft, or save the adapter with the installed one",
            )
    base_config = read_config(base)
    if base_config.content.get("quantization_config"):
        raise UserError(
            "base is quantized",
            f"{base_config.path} has a quantization_config",
            "name the checkpoint that it was quantized from",
        )
    # what the file leaves out is the family's default: Gemma ties
    if base_config.decoder.tie_word_embeddings:
        _refuse_one_tied_end(config, path)
    named = str(config.get("base_model_name_or_path") or "").rstrip("/").split("/")[-1]
    if named and not any(part.endswith(named) for part in base.absolute().parts):
        print(f"{path} names {named} as its base, and is merged into {base}", file=sys.stderr)
    return config


def _refuse_one_tied_end(config: dict[str, Any], path: Path) -> None:
    """One table serves as embedding and lm_head: an update of either would change the other."""
    targets = config.get("target_modules") or []
    names = [targets] if isinstance(targets, str) else list(targets)
    for name in (*names, *(config.get("modules_to_save") or [])):
        if name.split(".")[-1] in _ENDS:
            raise UserError(
                "adapter changes a tied embedding",
                f"{path} {name}",
                "use an adapter of the layers alone, or untie the base and its adapter",
            )


def _weights_file(adapter: Path) -> Path:
    for name in _WEIGHTS:
        if (adapter / name).is_file():
            return adapter / name
    raise UserError(
        "adapter without weights",
        f"{adapter} holds neither {' nor '.join(_WEIGHTS)}",
        "download the adapter again or name another folder",
    )


def _read_weights(path: Path) -> dict[str, Tensor]:
    tensors = read_tensors(path)
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError("adapter is not finite", f"{name} in {path}", "train it again")
    return tensors


@torch.no_grad()
def _merge(
    model: PreTrainedModel, tensors: dict[str, Tensor], adapter: Path
) -> tuple[PreTrainedModel, int]:
    """The model with the adapter in its weights, and how many matrices were changed."""
    num_adapted = sum(name.endswith(("lora_A.weight", "lora_embedding_A")) for name in tensors)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = PeftModel(model, LoraConfig.from_pretrained(str(adapter)))
            _require_same_shapes(adapted, tensors, adapter)
            found: Any = set_peft_model_state_dict(adapted, tensors)
    except (ValueError, RuntimeError) as error:
        raise _does_not_fit(adapter, " ".join(str(error).split())[:200]) from error
    for name in found.unexpected_keys:
        raise _does_not_fit(adapter, f"the base has no place for {name}")
    for name in found.missing_keys:
        if ".default" in name:
            raise _does_not_fit(adapter, f"no weight for {name}")
    # safe_merge would round the update before the sum
    return adapted.merge_and_unload(safe_merge=False), num_adapted


def _require_same_shapes(adapted: PeftModel, tensors: dict[str, Tensor], adapter: Path) -> None:
    """Tell a changed vocabulary apart from an adapter of another model."""
    shapes = {
        name.replace(".default", "").replace(".modules_to_save", ""): tensor.shape
        for name, tensor in adapted.state_dict().items()
    }
    for name, tensor in tensors.items():
        expected = shapes.get(name)
        if expected is None or expected == tensor.shape:
            continue
        difference = f"{name} is {list(tensor.shape)}, not {list(expected)}"
        if any(f".{end}." in name for end in _ENDS) and expected[1:] == tensor.shape[1:]:
            raise UserError(
                "adapter changes the vocabulary",
                f"{adapter} ({difference})",
                "use an adapter that leaves embedding and lm_head at their size",
            )
        raise _does_not_fit(adapter, difference)


def _does_not_fit(adapter: Path, reason: str) -> UserError:
    return UserError(
        "adapter does not fit its base", f"{adapter} ({reason})", "name the base it was trained for"
    )


def _copy_beside_weights(base: Path, adapter: Path, out: Path) -> None:
    """Config, generation config and licences of the base, and the tokenizer."""
    (out / "generation_config.json").unlink(missing_ok=True)  # what transformers makes of it
    configs = [name for name in model_files(base) if name.endswith("config.json")]
    licences = set(checkpoint_files(base)) - set(model_files(base)) - set(TOKENIZER_FILES)
    copy_files(base, out, [*configs, *sorted(licences)])
    has_own = any((adapter / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    source = adapter if has_own else base
    copy_files(source, out, [name for name in TOKENIZER_FILES if (source / name).is_file()])
