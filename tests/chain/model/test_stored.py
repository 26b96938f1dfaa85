"""Tensors are taken one by one, converted, and nothing of their files stays in memory."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.awq import dequantize, round_to_nearest
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.config import decoder_config, read_config
from polybasic.chain.formats.checkpoints.shapes import expected_shapes
from polybasic.chain.kernels.selection import backend_for
from polybasic.chain.kernels.torch import backends
from polybasic.chain.model import loading
from polybasic.chain.model.stored import StoredTensors

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
IN_SIZE, OUT_SIZES = 256, {"q": 64, "k": 32, "v": 32}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def write_shards(folder: Path, tensors: dict[str, Tensor], suffix: str = "safetensors") -> None:
    """Tensors in turn over two files, with an index."""
    folder.mkdir(exist_ok=True)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    weight_map: dict[str, str] = {}
    for number, names in enumerate((list(tensors)[::2], list(tensors)[1::2]), 1):
        name = f"{stem}-{number:05d}-of-00002.{suffix}"
        weight_map |= dict.fromkeys(names, name)
        part = {name: tensors[name].contiguous() for name in names}
        (save_file if suffix == "safetensors" else torch.save)(part, folder / name)
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def random_linears(with_bias: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(size, IN_SIZE) for name, size in OUT_SIZES.items()}
    if with_bias:
        tensors |= {f"{name}.bias": torch.randn(size) for name, size in OUT_SIZES.items()}
    return tensors


def mapped_files(folder: Path) -> list[str]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if str(folder) in line]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_one_tensor(tmp_path: Path, suffix: str) -> None:
    tensors = random_linears(with_bias=True)
    write_shards(tmp_path, tensors, suffix)
    weights = StoredTensors(tmp_path, torch.bfloat16, CPU)
    assert "q.weight" in weights
    assert "o.weight" not in weights
    for name, tensor in tensors.items():
        assert weights.stored(name).equal(tensor)
        assert weights.dense(name).dtype == torch.bfloat16
        assert weights.dense(name).equal(tensor.bfloat16())
    with pytest.raises(UserError, match=r"^weight missing: o.weight in .*; export"):
        weights.dense("o.weight")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_no_file_stays_mapped(tmp_path: Path, suffix: str, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in random_linears(True).items()}
    write_shards(tmp_path, tensors, suffix)
    weights = StoredTensors(tmp_path, dtype, CPU)
    backend = backend_for(CPU, dtype)
    kept = [
        weights.dense("q.weight"),
        weights.linear(backend, "q"),
        weights.linear(backend, "q", "k", "v"),
    ]
    assert mapped_files(tmp_path) == []
    view = weights.stored("q.weight")
    assert len(mapped_files(tmp_path)) == 1
    assert kept[0].equal(view)


@pytest.mark.parametrize("stored_as", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_dense_linears(
    tmp_path: Path, stored_as: torch.dtype, dtype: torch.dtype, with_bias: bool
) -> None:
    names = ("q", "k", "v") if with_bias == (stored_as == dtype) else ("q",)
    tensors = random_linears(with_bias)
    write_shards(tmp_path, {name: tensor.to(stored_as) for name, tensor in tensors.items()})
    x = torch.randn(3, IN_SIZE).to(dtype)
    expected = [
        F.linear(
            x,
            tensors[f"{name}.weight"].to(stored_as).to(dtype),
            tensors[f"{name}.bias"].to(stored_as).to(dtype) if with_bias else None,
        )
        for name in names
    ]
    found = StoredTensors(tmp_path, dtype, CPU).linear(backend_for(CPU, dtype), *names)(x)
    assert found.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.3  # sums of 256 products of unit normals
    torch.testing.assert_close(found, torch.cat(expected, -1), rtol=0, atol=tolerance)


@pytest.mark.parametrize("num_rows", [1, 1 + backends.CPU_INT4_MAX_ROWS])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linears_of_four_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int, with_bias: bool
) -> None:
    monkeypatch.setattr(backends, "WEIGHTS_AT_ONCE", 5 * IN_SIZE)
    stored, expected = {}, []
    tensors = random_linears(with_bias)
    x = torch.randn(num_rows, IN_SIZE)
    for name in OUT_SIZES:
        weight, bias = round_to_nearest(tensors[f"{name}.weight"]), tensors.get(f"{name}.bias")
        packed = zip(("qweight", "qzeros", "scales"), weight.pack(), strict=True)
        stored |= {f"{name}.{part}": tensor for part, tensor in packed}
        expected.append(F.linear(x, dequantize(weight), bias))
    write_shards(tmp_path, stored | {n: t for n, t in tensors.items() if n.endswith("bias")})
    weights = StoredTensors(tmp_path, torch.float32, CPU)
    found = weights.linear(backend_for(CPU, torch.float32), *OUT_SIZES)(x)
    assert found.dtype == torch.float32
    # rows are rounded to bytes: sums of 256 products of unit normals and such errors
    torch.testing.assert_close(found, torch.cat(expected, -1), rtol=0, atol=0.5)
    for dtype in DTYPES:
        dense = backends._dequantized(weights._quantized("q"), dtype, CPU)
        assert dense.equal(dequantize(weights._quantized("q")).to(dtype))


def test_a_bias_of_some_is_refused(tmp_path: Path) -> None:
    tensors = random_linears(with_bias=True)
    del tensors["k.bias"]
    write_shards(tmp_path, tensors)
    weights = StoredTensors(tmp_path, torch.float32, CPU)
    backend = backend_for(CPU, torch.float32)
    weights.linear(backend, "k")
    with pytest.raises(UserError, match=r"^weight missing: k.bias in "):
        weights.linear(backend, "q", "k", "v")


class HeldTensors(StoredTensors):
    """As `StoredTensors`, with all files mapped as long as it lives."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(folder, dtype, device)
        self.tensors = load_tensors(folder)

    def _read(self, names: Sequence[str]) -> list[Tensor]:
        return [self.tensors[name] for name in names]


def peak_over_weights(warm_up: str, large: str, holds_files: bool) -> float:
    """Peak of resident memory while a folder is loaded, over the bytes of its weights."""
    if holds_files:
        loading.StoredTensors = HeldTensors  # type: ignore[misc]
    folder = Path(large)
    loading.load_decoder(read_config(Path(warm_up)), torch.bfloat16, CPU, 64)

    def resident(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))

    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten (man 5 proc)
    decoder = loading.load_decoder(read_config(folder), torch.bfloat16, CPU, 64)
    peak = resident("VmHWM") - before
    del decoder
    return peak / sum(tensor.nbytes for tensor in load_tensors(folder).values())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_little_besides_the_weights(tiny_target: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_target / "config.json").read_text())
    config |= {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 34}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    tensors = {
        name: torch.full(shape, 0.01, dtype=torch.bfloat16)
        for name, shape in expected_shapes("decoder", decoder_config(config, "here"), None, set())
    }
    assert sum(tensor.nbytes for tensor in tensors.values()) > 64e6
    for suffix in ("safetensors", "bin"):
        write_shards(tmp_path / suffix, tensors, suffix)
        (tmp_path / suffix / "config.json").write_text(json.dumps(config))
    # each measured in a process of its own, all forked from one that has imported what they need
    code = (
        "import sys; from multiprocessing import get_context; from pathlib import Path;"
        "from tests.chain.model.test_stored import peak_over_weights as peak;"
        "pool = get_context('fork').Pool(1, maxtasksperchild=1);"
        "warm, safe, pickled = sys.argv[1:];"
        "cases = [(warm, safe, False), (warm, pickled, False), (warm, safe, True)];"
        "print(*pool.starmap(peak, cases, chunksize=1))"
    )
    folders = [tiny_target, tmp_path / "safetensors", tmp_path / "bin"]
    command = [sys.executable, "-c", code, *map(str, folders)]
    # glibc raises this threshold as blocks are freed, and those between blocks that stay are then
    # kept: up to a seventh of the weights, another part of them in each run
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    of_safetensors, of_pickles, with_files_held = map(float, done.stdout.split())
    assert max(of_safetensors, of_pickles) < 1.15
    assert with_files_held > 1.6
