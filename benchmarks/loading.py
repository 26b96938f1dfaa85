"""How much memory loading takes beside the weights that stay loaded, and how long it takes.

    python benchmarks/loading.py [--gigabytes 2] [--cases NAME ...] [--json FILE]

Writes random Llama checkpoints of that size in bfloat16 (and their like in other formats), loads
each in a fresh process, and prints its peak of resident memory over what was resident before.
Weights that stay loaded are those in memory of their own: of the decoder also the embedding, and of
4-bit linears both the codes and the copy in bfloat16. Runs on Linux, on the CPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch
from record import header, print_header, write_record
from safetensors.torch import save_file
from timing import resident
from torch import Tensor

from polybasic.chain.formats.awq import CODES_PER_WORD, GROUP_SIZE, QUANTIZATION_CONFIG
from polybasic.chain.formats.config import read_config
from polybasic.chain.formats.files import write_json
from polybasic.chain.formats.shapes import num_parameters, tensor_headers
from polybasic.chain.model.linear import dense_linear
from polybasic.chain.model.loading import load_decoder
from polybasic.chain.model.reference import load_reference_model

CASES = {
    "decoder": ("safetensors", "bfloat16"),
    "decoder of float16": ("float16", "bfloat16"),
    "decoder of pickles": ("bin", "bfloat16"),
    "decoder of 4 bits": ("awq", "bfloat16"),
    "reference model": ("safetensors", "bfloat16"),
    "reference model of pickles": ("bin", "bfloat16"),
    "reference model in float32": ("safetensors", "float32"),
}
"""Stored as, and computed in. The decoder is what serves, the reference model what transformers
runs."""
SHARD_BYTES = 500_000_000
VALUES_BETWEEN_PAGES = 1024
"""What transformers leaves mapped is resident once it is read: less than a page apart."""
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def linears(config: dict) -> Iterator[tuple[str, int, int]]:
    """Name, out and in features of one layer's linears."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    for name, out_size in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
        yield f"self_attn.{name}_proj", out_size, hidden
    for name in ("gate", "up"):
        yield f"mlp.{name}_proj", inner, hidden
    yield "mlp.down_proj", hidden, inner


def random_tensors(config: dict, layout: str) -> Iterator[tuple[str, Tensor]]:
    """A model's tensors, one after the other."""
    dtype = torch.bfloat16 if layout in ("safetensors", "bin") else torch.float16

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype).normal_(std=0.02)

    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", random(vocabulary, hidden)
    yield "model.norm.weight", random(hidden)
    yield "lm_head.weight", random(vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", random(hidden)
        yield f"{prefix}.post_attention_layernorm.weight", random(hidden)
        for name, out_size, in_size in linears(config):
            if layout != "awq":
                yield f"{prefix}.{name}.weight", random(out_size, in_size)
                continue
            num_groups, num_words = in_size // GROUP_SIZE, out_size // CODES_PER_WORD
            for part, rows in (("qweight", in_size), ("qzeros", num_groups)):
                words = torch.randint(-(2**31), 2**31, (rows, num_words), dtype=torch.int32)
                yield f"{prefix}.{name}.{part}", words
            yield f"{prefix}.{name}.scales", random(num_groups, out_size).abs()


def write_checkpoint(folder: Path, layout: str, config: dict) -> None:
    """Write random tensors in shards with their index, holding one shard at a time."""
    stem, suffix = ("pytorch_model", "bin") if layout == "bin" else ("model", "safetensors")
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def write_shard() -> None:
        name = f"{stem}-{len(set(weight_map.values())) + 1:05d}.{suffix}"
        weight_map.update(dict.fromkeys(shard, name))
        if suffix == "bin":
            torch.save(shard, folder / name)
        else:
            save_file(shard, folder / name, {"format": "pt"})
        shard.clear()

    folder.mkdir()
    for name, tensor in random_tensors(config, layout):
        shard[name] = tensor
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            write_shard()
    write_shard()
    write_json(folder / f"{stem}.{suffix}.index.json", {"metadata": {}, "weight_map": weight_map})
    quantization = {"quantization_config": QUANTIZATION_CONFIG} if layout == "awq" else {}
    write_json(folder / "config.json", config | quantization)


def staying_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Bytes of the weights that stay loaded; 4-bit linears keep codes, scales and a dense copy."""
    headers = tensor_headers(folder)
    staying = num_parameters(headers) * dtype.itemsize
    for name, tensor in headers.items():
        if name.endswith(".qweight"):
            staying += tensor.num_bytes
        elif name.endswith(".scales"):
            staying += 2 * tensor.num_bytes
    return staying


def load(case: str, folder: Path, dtype: torch.dtype) -> object:
    """The model of one case, on the CPU, with all of its pages read."""
    device = torch.device("cpu")
    if not case.startswith("reference"):
        return load_decoder(read_config(folder), dtype, device, CONFIG["max_position_embeddings"])
    model = load_reference_model(folder, dtype, device)
    for parameter in model.parameters():
        parameter.data.flatten()[::VALUES_BETWEEN_PAGES].sum()
    return model


def measure(case: str, folder: Path) -> dict[str, float]:
    """Load in this process; to be called once, in a fresh one."""
    dtype = getattr(torch, CASES[case][1])
    # what a first use of oneDNN and of transformers' model takes is not the checkpoint's
    dense_linear(torch.ones(16, 16, dtype=dtype))(torch.ones(1, 16, dtype=dtype))
    import_module("transformers.models.llama.modeling_llama")
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten (man 5 proc)
    begin = time.perf_counter()
    loaded = load(case, folder, dtype)
    seconds = time.perf_counter() - begin
    staying, peak, after = staying_bytes(folder, dtype), resident("VmHWM"), resident("VmRSS")
    del loaded
    return {
        "staying_bytes": staying,
        "resident_before_bytes": before,
        "peak_bytes": peak - before,
        "resident_after_bytes": after - before,
        "ratio": (peak - before) / staying,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="NAME")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.cases[0], arguments.measure)))
        return
    layer_bytes = 2 * sum(out_size * in_size for _, out_size, in_size in linears(CONFIG))
    outside_bytes = 4 * CONFIG["vocab_size"] * CONFIG["hidden_size"]
    num_layers = max(1, round((1e9 * arguments.gigabytes - outside_bytes) / layer_bytes))
    config = CONFIG | {"num_hidden_layers": num_layers}
    head = header("loading", torch.device("cpu"), {arguments.json: "FILE"})
    print_header(head)
    print(f"{num_layers} layers")
    cases: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as parent:
        for layout in dict.fromkeys(CASES[case][0] for case in arguments.cases):
            folder = Path(parent) / layout
            write_checkpoint(folder, layout, config)
            for case in (name for name in arguments.cases if CASES[name][0] == layout):
                command = [sys.executable, __file__, "--measure", str(folder), "--cases", case]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                found = cases[case] = json.loads(done.stdout)
                print(
                    f"{case:28s} {found['staying_bytes'] / 1e6:6.0f} MB stay, "
                    f"peak {found['peak_bytes'] / 1e6:6.0f} MB over "
                    f"{found['resident_before_bytes'] / 1e6:4.0f} MB, "
                    f"{found['ratio']:.3f}x, {found['seconds']:.1f} s"
                )
            for path in folder.iterdir():
                path.unlink()
    write_record(arguments.json, head, {"config": config, "cases": cases})


if __name__ == "__main__":
    main()
