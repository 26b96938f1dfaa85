"""Every family of checkpoints that people have, quantized, and what must hold for each."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.quantization import GROUP_SIZE
from polybasic.quantize.awq import quantize_target
from polybasic.quantize.models import load_dequantized, load_target
from polybasic.quantize.quality import measure_quality
from polybasic.quantize.settings import QuantizeSettings
from tests.checkpoints import DISTINCT, VOCAB_SIZE, write_family

SETTINGS = QuantizeSettings(num_calibration_samples=6, calibration_tokens=48)
"""Samples twice as long as the sliding windows of these checkpoints."""
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TIED = ("llama32", "qwen25", "gemma2", "gemma3")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def token_rows(num_rows: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(num_rows)]


@pytest.fixture(scope="module", params=DISTINCT)
def models(request, tmp_path_factory) -> tuple[str, Path, Path]:
    """Name of the family, target, intermediate."""
    folder = tmp_path_factory.mktemp(request.param)
    write_family(folder / "target", request.param)
    quantize_target(folder / "target", token_rows(6, 0), SETTINGS, 0, folder / "intermediate")
    return request.param, folder / "target", folder / "intermediate"


def write_changed(source: Path, out: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = {name: tensor.clone() for name, tensor in load_tensors(source).items()}
    change(tensors)
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text((source / "config.json").read_text())
    return out


def test_it_is_close_to_the_target(models, tmp_path):
    _, target, intermediate = models
    rows = token_rows(4, 1)

    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.qzeros"] ^= 0x44444444

    quality = measure_quality(target, intermediate, rows, 200)
    damaged = measure_quality(
        target, write_changed(intermediate, tmp_path / "d", damage), rows, 200
    )
    assert 0 < quality["mean_kl"] < 0.2
    assert damaged["mean_kl"] > 2 * quality["mean_kl"]
    assert damaged["acceptance"] < quality["acceptance"] - 0.03
    assert quality["acceptance"] > 0.75


def test_it_holds_what_the_target_holds(models):
    """Linears of the layers are packed with their biases; all else is there in float16."""
    family, target, intermediate = models
    exact, packed = load_tensors(target), load_tensors(intermediate)
    linears = FUSED if family == "phi3" else LINEARS
    weights = {name for name in exact if name.split(".")[-2] in linears and ".weight" in name}
    assert len(weights) == 3 * len(linears)
    parts = {
        f"{name.removesuffix('weight')}{part}"
        for name in weights
        for part in ("qweight", "qzeros", "scales")
    }
    tied = {"lm_head.weight"} if family in TIED else set()
    assert set(packed) == set(exact) - tied - weights | parts
    assert {str(tensor.dtype) for tensor in packed.values()} == {"torch.int32", "torch.float16"}
    biases = {name for name in packed if name.endswith(".bias")}
    assert len(biases) == (9 if family in ("qwen2", "qwen25") else 0)
    head_norms = {name for name in packed if "q_norm" in name or "k_norm" in name}
    assert len(head_norms) == (6 if family in ("qwen3", "gemma3") else 0)
    for name in [*biases, *head_norms, "model.norm.weight", "model.embed_tokens.weight"]:
        assert torch.equal(packed[name], exact[name].half())


def test_loading_it_gives_every_tensor_and_ties_what_was_tied(models):
    family, _, intermediate = models
    model = load_dequantized(intermediate)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == (family in TIED)
    packed = load_tensors(intermediate)
    for name, parameter in model.named_parameters():
        if name in packed:
            assert torch.equal(parameter, packed[name].float()), name
        else:
            scales = packed[name.removesuffix("weight") + "scales"]
            assert parameter.shape == (scales.shape[1], scales.shape[0] * GROUP_SIZE)


def test_keys_and_values_stay_on_the_targets_scale(models, tmp_path):
    """They share the target's cache; the control divides the values as AWQ itself would."""
    _, target, intermediate = models

    def scale(tensors: dict[str, Tensor]) -> None:
        for name in ("v_proj", "qkv_proj"):
            scales = tensors.get(f"model.layers.0.self_attn.{name}.scales")
            if scales is not None:
                scales[:, -8:] /= 2

    scaled = write_changed(intermediate, tmp_path / "scaled", scale)
    assert cache_error(target, intermediate) < 0.12
    assert cache_error(target, scaled) > 0.12


def cache_error(target: Path, intermediate: Path) -> float:
    """Largest relative difference of keys or values that layer 0 makes of the same embeddings."""
    outputs = []
    for model in (load_target(target), load_dequantized(intermediate)):
        layer, token_ids = model.model.layers[0], torch.tensor(token_rows(1, 2))
        x = layer.input_layernorm(model.model.embed_tokens(token_ids))
        attention, config = layer.self_attn, model.config
        if hasattr(attention, "qkv_proj"):
            size = config.num_key_value_heads * attention.head_dim
            outputs.append(attention.qkv_proj(x)[..., -2 * size :].split(size, dim=-1))
        else:
            outputs.append((attention.k_proj(x), attention.v_proj(x)))
    pairs = zip(*outputs, strict=True)
    return max(((rounded - exact).norm() / exact.norm()).item() for exact, rounded in pairs)
