import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from polybasic.chain.formats.checkpoints.awq import QuantizedWeight, dequantize, round_to_nearest
from polybasic.quantize.rounding import RoundedLinear

NUM_OUT, NUM_IN = 16, 256


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_IN, NUM_OUT)


def make(unrounded: Tensor, weight: QuantizedWeight) -> tuple[RoundedLinear, Tensor]:
    """A rounded linear with a bias, and that bias."""
    torch.manual_seed(1)
    model = Model()
    bias = model.linear.bias.detach().clone()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["linear"], init_lora_weights="gaussian")
    inject_adapter_in_model(config, model)
    return RoundedLinear(model.linear, weight, unrounded), bias


@pytest.fixture
def unrounded() -> Tensor:
    return torch.randn(NUM_OUT, NUM_IN, generator=torch.Generator().manual_seed(0))


def move(linear: RoundedLinear, size: float) -> None:
    with torch.no_grad():
        linear.lora.lora_B["default"].weight.normal_(
            std=size, generator=torch.Generator().manual_seed(2)
        )


def test_before_training_it_is_the_packed_linear_bit_for_bit(unrounded):
    weight = round_to_nearest(unrounded)
    x = torch.randn(5, NUM_IN)
    # clipped far away, or of another linear altogether: positions never leave their cells
    for start in (unrounded, 100 * unrounded, unrounded.flip(0)):
        linear, bias = make(start, weight)
        assert torch.equal(linear(x), F.linear(x, dequantize(weight), bias))
        assert torch.equal(linear.merged().codes, weight.codes)


def test_what_is_trained_is_what_is_merged(unrounded):
    linear, bias = make(unrounded, round_to_nearest(unrounded))
    move(linear, 0.5)
    merged, x = linear.merged(), torch.randn(5, NUM_IN)
    assert torch.equal(linear(x), F.linear(x, dequantize(merged), bias))
    assert (merged.codes != linear.quantized.codes).float().mean() > 0.1
    assert merged.zeros is linear.quantized.zeros
    assert merged.scales is linear.quantized.scales


def test_a_plain_lora_mostly_vanishes_in_the_rounding(unrounded):
    """The same deltas, a tenth of a step: added to rounded weights they change no code."""
    weight = round_to_nearest(unrounded)
    changed = []
    for start in (unrounded, dequantize(weight)):
        linear, _ = make(start, weight)
        move(linear, 0.1)
        delta = linear.lora.get_delta_weight("default")
        assert 0.05 < delta.std() < 0.15
        changed.append((linear.merged().codes != weight.codes).float().mean().item())
    assert changed[0] > 0.05
    assert changed[1] == pytest.approx(0, abs=1e-3)


def test_gradients_pass_the_rounding_and_stop_where_codes_end(unrounded):
    linear, _ = make(unrounded, round_to_nearest(unrounded))
    x, upstream = torch.randn(5, NUM_IN), torch.randn(5, NUM_OUT)
    linear(x).backward(upstream)
    by_step = (upstream.t() @ x).unflatten(1, (-1, 128)) * linear.scales
    a = linear.lora.lora_A["default"].weight
    expected = 2 * by_step.flatten(1) @ a.t()  # alpha / rank = 2
    gradient = linear.lora.lora_B["default"].weight.grad
    assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-5)

    linear.lora.lora_B["default"].weight.grad = None
    linear.positions += 100  # all codes are 15, whatever a small delta does
    linear(x).backward(upstream)
    assert linear.lora.lora_B["default"].weight.grad.abs().max() == 0
