"""What engines make of an exported head: its config, and the parameters that its tensors fill."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

# hf_to_vllm_mapper of vLLM's LlamaModel, stacked_params_mapping of SGLang's LlamaForCausalLM
STACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def loaded(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the engines' parameters after their loaders have renamed and stacked."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == "t2d":
            continue
        if "lm_head" not in name and name != "d2t":
            name = f"model.{name}".replace("midlayer.", "layers.0.")
        name = name.replace("d2t", "draft_id_to_target_id")
        for part, whole in STACKED.items():
            name = name.replace(f".{part}.", f".{whole}.")
        rows = shapes[name][0] if name in shapes else 0
        shapes[name] = (rows + tensor.shape[0], *tensor.shape[1:])
    return shapes


def content_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content
