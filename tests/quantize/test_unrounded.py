import pytest
import torch

from polybasic.chain.formats.checkpoints.awq import QuantizedWeight, packed_weight
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.quantize import search
from polybasic.quantize.awq import quantize_target
from polybasic.quantize.models import load_dequantized, load_target
from polybasic.quantize.settings import QuantizeSettings
from polybasic.quantize.unrounded import unrounded_weights
from tests.checkpoints import write_family

ROWS = [[(7 * row + 3 * token * token) % 250 for token in range(48)] for row in range(4)]
ADAPTED = {"self_attn.q_proj", "self_attn.o_proj"} | {
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
}
FUSED = {"self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}


@pytest.mark.parametrize("family", ["llama2", "qwen2", "phi3", "gemma2", "gemma3"])
def test_they_are_the_weights_that_awq_had_scaled(tmp_path, monkeypatch, family):
    monkeypatch.setattr(search._Quantizer, "_apply_quant", lambda *_: None)
    monkeypatch.setattr(search._Quantizer, "_search_best_clip", lambda *_: [])
    write_family(tmp_path, family)
    exact, scaled = load_target(tmp_path), load_target(tmp_path)
    search.search_and_round(scaled, ROWS, 128)
    for before, after in zip(exact.model.layers, scaled.model.layers, strict=True):
        found = dict(unrounded_weights(before, after))
        assert set(found) == (FUSED if family == "phi3" else ADAPTED)
        for name, weight in found.items():
            scaled_weight = after.get_submodule(name).weight
            assert torch.allclose(weight, scaled_weight, rtol=1e-3, atol=1e-5), name
            is_scaled = not torch.allclose(before.get_submodule(name).weight, scaled_weight)
            assert is_scaled == (name != "self_attn.o_proj")


@pytest.mark.parametrize("family", ["llama2", "phi3", "gemma3"])
def test_they_round_to_the_codes_that_were_written(tmp_path, family):
    write_family(tmp_path / "target", family)
    settings = QuantizeSettings(num_calibration_samples=4, calibration_tokens=48)
    quantize_target(tmp_path / "target", ROWS, settings, 0, tmp_path / "intermediate")
    tensors = load_tensors(tmp_path / "intermediate")
    exact, rounded = load_target(tmp_path / "target"), load_dequantized(tmp_path / "intermediate")
    for name, weight in unrounded_weights(exact.model.layers[1], rounded.model.layers[1]):
        quantized = packed_weight(tensors, f"model.layers.1.{name}")
        assert share_of_equal_codes(weight, quantized) > 0.97
        if name != "self_attn.o_proj":  # the control: the target's weights without the scales
            unscaled = exact.model.layers[1].get_submodule(name).weight
            assert share_of_equal_codes(unscaled, quantized) < 0.96


def share_of_equal_codes(weight: torch.Tensor, quantized: QuantizedWeight) -> float:
    groups = weight.unflatten(1, (-1, 128)) / quantized.scales.float().unsqueeze(2)
    codes = (groups + quantized.zeros.float().unsqueeze(2)).round().clamp(0, 15)
    return (codes.flatten(1) == quantized.codes.float()).float().mean().item()
