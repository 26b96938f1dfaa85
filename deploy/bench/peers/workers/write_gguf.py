"""Writes a Llama checkpoint as GGUF: python -m workers.write_gguf CHECKPOINT FILE --type BF16.

Names of tensors and keys, and the order in which llama.cpp wants the rows of queries and keys, are
those of its own converter (`conversion/llama.py` of llama.cpp).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TYPES = ("BF16", "F16", "F32", "Q4_0")


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Tensors of a checkpoint as float32."""
    found: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header_size = int.from_bytes(path.open("rb").read(8), "little")
        data = np.memmap(path, np.uint8, "r")
        header = json.loads(bytes(data[8 : 8 + header_size]))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = (8 + header_size + one for one in entry["data_offsets"])
            raw = np.array(data[start:end])
            found[name] = _as_float32(raw, entry["dtype"]).reshape(entry["shape"])
    return found


def _as_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view({"F16": np.float16, "F32": np.float32}[dtype]).astype(np.float32)


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows in the order of llama.cpp's rotary embedding, which turns neighbours."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def llama3_divisors(head_dim: int, theta: float, scaling: dict[str, Any]) -> np.ndarray:
    """What the rotary frequencies of Llama 3.1 are divided by: `factor` where they are low."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 / (kept + (1 - kept) / scaling["factor"])).astype(np.float32)


def write_gguf(checkpoint: Path, path: Path, kind: str, stop: list[int]) -> None:
    """Write a checkpoint.

    Where ids alone are asked for, `stop` makes it independent of the kind of the vocabulary.

    Args:
        checkpoint: folder of a Llama with `tokenizer.json`.
        kind: one of `TYPES`, of all matrices; norms stay in float32.
        stop: ids that end an answer; the texts of tokens are then numbers. Empty for the
            checkpoint's own vocabulary.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        sys.exit(f"only Llamas without biases are written as GGUF, this is {config['model_type']}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(checkpoint.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    scaling = rope if "rope_type" in rope else config.get("rope_scaling") or {}
    kind_of_rope = scaling.get("rope_type", scaling.get("type", "default"))
    if kind_of_rope == "llama3":
        theta = rope.get("rope_theta", 10000.0)
        writer.add_tensor("rope_freqs.weight", llama3_divisors(head_dim, theta, scaling))
    elif kind_of_rope != "default":
        sys.exit(f"rotary scaling {kind_of_rope} is not written as GGUF")
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}" if kind != "F32" else "ALL_F32"])
    _add_vocabulary(writer, checkpoint, config, stop)
    for name, tensor in read_tensors(checkpoint).items():
        target = _name_of(name)
        if target.endswith(("attn_q.weight", "attn_k.weight")):
            tensor = interleaved(tensor, heads if "attn_q" in target else kv_heads)
        if tensor.ndim == 1:
            writer.add_tensor(target, tensor)
        else:
            quantized = gguf.GGMLQuantizationType[kind]
            data = gguf.quants.quantize(tensor, quantized)
            writer.add_tensor(target, data, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name_of(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    number, part = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{number}.{NAMES[part.removesuffix('.weight')]}.weight"


def _vocabulary(checkpoint: Path, config: dict[str, Any]) -> tuple[list[str], list[int], list[str]]:
    """Texts, types and merges of byte-level BPE; ids without a token stand for nothing."""
    content = json.loads((checkpoint / "tokenizer.json").read_text())
    if content["model"]["type"] != "BPE":
        sys.exit(f"only BPE vocabularies are written as GGUF, this is {content['model']['type']}")
    tokens = [f"[unused {number}]" for number in range(config["vocab_size"])]
    types = [gguf.TokenType.UNUSED] * len(tokens)
    for token, number in content["model"]["vocab"].items():
        tokens[number], types[number] = token, gguf.TokenType.NORMAL
    for added in content["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], gguf.TokenType.CONTROL
    merges = [one if isinstance(one, str) else " ".join(one) for one in content["model"]["merges"]]
    return tokens, types, merges


def _numbers(config: dict[str, Any]) -> tuple[list[str], list[int], list[str]]:
    """A vocabulary in which each id is a text that ends nothing and waits for no other."""
    tokens = [f"t{number}" for number in range(config["vocab_size"])]
    return tokens, [gguf.TokenType.NORMAL] * len(tokens), ["t 0"]


def _add_vocabulary(
    writer: gguf.GGUFWriter, checkpoint: Path, config: dict[str, Any], stop: list[int]
) -> None:
    tokens, types, merges = _numbers(config) if stop else _vocabulary(checkpoint, config)
    ends = stop or config["eos_token_id"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", choices=TYPES, default="BF16")
    parser.add_argument(
        "--stop", nargs="*", type=int, default=[], help="ids; texts are then numbers"
    )
    arguments = parser.parse_args()
    write_gguf(arguments.checkpoint, arguments.file, arguments.type, arguments.stop)


if __name__ == "__main__":
    main()
