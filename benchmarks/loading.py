"""How much memory loading takes beside the weights that stay loaded, and how long it takes.

    python benchmarks/loading.py [--gigabytes 2] [--cases NAME ...] [--record FILE]

Writes random Llama checkpoints of that size in bfloat16 (and their like in other formats), loads
each in a fresh process on the CPU, and prints its peak of resident memory over what was resident
before. Weights that stay loaded are those in memory of their own: of the decoder also the
embedding, and of 4-bit linears both the codes and the copy in bfloat16.
"""

import json
import tempfile
import time
from importlib import import_module
from pathlib import Path

import torch
from command import begin, in_a_process, options, run
from safetensors.torch import save_file
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.quantization import GROUP_SIZE, quantization_config
from polybasic.chain.formats.checkpoints.shapes import (
    expected_shapes,
    num_parameters,
    tensor_headers,
)
from polybasic.chain.formats.files import write_json
from polybasic.chain.kernels.selection import backend_for
from polybasic.chain.model.loading import load_decoder
from polybasic.chain.model.reference import load_reference_model
from polybasic.deploy.runtime.hardware import forget_peak, usage

CPU = torch.device("cpu")
CASES = {
    "decoder": ("safetensors", torch.bfloat16),
    "decoder of float16": ("float16", torch.bfloat16),
    "decoder of pickles": ("bin", torch.bfloat16),
    "decoder of 4 bits": ("awq", torch.bfloat16),
    "reference model": ("safetensors", torch.bfloat16),
    "reference model of pickles": ("bin", torch.bfloat16),
    "reference model in float32": ("safetensors", torch.float32),
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
LAYER_BYTES, OUTSIDE_BYTES = 88_080_384, 262_144_000
"""In bfloat16: a layer of that config, and embedding with output projection."""


def write_checkpoint(folder: Path, layout: str, num_layers: int) -> None:
    """Write random tensors in shards with their index, holding one shard at a time."""
    is_int4, suffix = layout == "awq", "bin" if layout == "bin" else "safetensors"
    stem = "pytorch_model" if suffix == "bin" else "model"
    quantization = {"quantization_config": quantization_config()} if is_int4 else {}
    folder.mkdir()
    write_json(folder / "config.json", {**CONFIG, "num_hidden_layers": num_layers, **quantization})
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

    config, kind = read_config(folder).decoder, "awq" if is_int4 else "decoder"
    group_size = GROUP_SIZE if is_int4 else None
    dtype = torch.bfloat16 if layout in ("safetensors", "bin") else torch.float16
    for name, shape in expected_shapes(kind, config, group_size, frozenset()):
        shard[name] = random_tensor(name, shape, dtype)
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            write_shard()
    write_shard()
    write_json(folder / f"{stem}.{suffix}.index.json", {"metadata": {}, "weight_map": weight_map})


def random_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Codes, positive scales, or a weight."""
    if name.endswith((".qweight", ".qzeros")):
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)
    weight = torch.empty(shape, dtype=dtype).normal_(std=0.02)
    return weight.abs() if name.endswith(".scales") else weight


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
    if not case.startswith("reference"):
        return load_decoder(read_config(folder), dtype, CPU, CONFIG["max_position_embeddings"])
    model = load_reference_model(folder, dtype, CPU)
    for parameter in model.parameters():
        parameter.data.flatten()[::VALUES_BETWEEN_PAGES].sum()
    return model


def measure(case: str, folder: Path) -> list[str]:
    """A line of the table; to be called once, in a fresh process."""
    _, dtype = CASES[case]
    # what a first use of oneDNN and of transformers' model takes is not the checkpoint's
    linear = backend_for(CPU, dtype).dense(torch.ones(16, 16, dtype=dtype))
    linear(torch.ones(1, 16, dtype=dtype))
    import_module("transformers.models.llama.modeling_llama")
    forget_peak(CPU)
    before = usage(CPU)
    begun = time.perf_counter()
    loaded = load(case, folder, dtype)
    seconds = time.perf_counter() - begun
    staying, after = staying_bytes(folder, dtype), usage(CPU)
    del loaded
    if before is None or after is None:
        raise UserError("no resident memory", "/proc/self/status", "run on Linux")
    peak = after.peak - before.now
    sizes = (staying, before.now, peak, after.now - before.now)
    megabytes = (f"{size / 1e6:.1f}" for size in sizes)
    return [case, *megabytes, f"{peak / staying:.3f}", f"{seconds:.2f}"]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="NAME")
    parser.add_argument("--measure", type=Path, help="a checkpoint; for the script itself")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.cases[0], arguments.measure)))
        return
    report = begin(__file__, __doc__, arguments)
    num_layers = max(1, round((1e9 * arguments.gigabytes - OUTSIDE_BYTES) / LAYER_BYTES))
    report.say(f"{num_layers} layers of width {CONFIG['hidden_size']}.")
    rows = []
    for layout in dict.fromkeys(CASES[case][0] for case in arguments.cases):
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / layout
            write_checkpoint(folder, layout, num_layers)
            cases = (case for case in arguments.cases if CASES[case][0] == layout)
            rows += [
                in_a_process(__file__, ["--measure", str(folder), "--cases", case])
                for case in cases
            ]
    columns = ["case", "staying", "before", "peak", "after", "peak/staying", "seconds"]
    report.table("Megabytes: weights, resident before, and over that", columns, rows)
    report.write(arguments.record)


if __name__ == "__main__":
    run(main)
