"""The optimizer of heads that lie whole in each process: whose weights are whose, in float32."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from polybasic.train.head.block import BlockHead
from polybasic.train.head.eagle3 import Eagle3Head
from polybasic.train.head.medusa import HydraHead
from polybasic.train.head_optimizer import HeadOptimizer, matrices_between_states
from polybasic.train.settings import HeadSettings
from tests.train.counting import SMALL_SHAPE

SETTINGS = HeadSettings(
    dtype="float32", optimizer="muon", learning_rate=1e-4, num_steps=10, warmup_steps=0
)
HEADS = {
    "block": (BlockHead, {"num_positions": 4, "markov_rank": 16}),
    "eagle3": (Eagle3Head, {"feature_layers": (0, 1, 2)}),
    "hydra": (HydraHead, {"num_positions": 3, "num_blocks": 1}),
}


@pytest.mark.parametrize("kind", HEADS)
def test_muon_changes_what_maps_states_to_states(kind):
    make, sizes = HEADS[kind]
    head = make(replace(SMALL_SHAPE, kind=kind, **sizes))
    found = {id(each) for each in matrices_between_states(head)}
    for name, weight in head.named_parameters():
        is_map = name.endswith(("_proj.weight", "fc.weight")) or ".layers.0.weight" in name
        is_map |= name.endswith("residual.weight")
        assert (id(weight) in found) == is_map, name
        assert not (id(weight) in found and max(weight.shape) == SMALL_SHAPE.vocab_size)
    assert found


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def changed(matrix, gain, optimizers, num_steps):
    for step in range(num_steps):
        for each in (matrix, gain):
            each.grad = (drawn(*each.shape) + step).to(each.dtype)
        for optimizer in optimizers:
            optimizer.step()
    return matrix.detach(), gain.detach()


def test_each_part_is_pytorchs_own():
    def start():
        return nn.Parameter(drawn(24, 16)), nn.Parameter(drawn(16))

    matrix, gain = start()
    found = changed(matrix, gain, [HeadOptimizer([matrix], [gain], SETTINGS)], 3)
    matrix, gain = start()
    muon = torch.optim.Muon([matrix], lr=0.02, momentum=0.95, weight_decay=0.01, ns_steps=3)
    adamw = torch.optim.AdamW([gain], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01)
    expected = changed(matrix, gain, [muon, adamw], 3)
    assert torch.equal(found[1], expected[1])
    # PyTorch's iterations are in bfloat16
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-3)
    assert not torch.allclose(found[0], drawn(24, 16), rtol=0, atol=1e-3)


def test_steps_too_small_for_bfloat16_add_up():
    settings = SETTINGS.model_copy(update={"optimizer": "adamw", "dtype": "bfloat16"})
    gain = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
    optimizer = HeadOptimizer([], [gain], settings)
    rounded = nn.Parameter(gain.detach().clone())
    plain = torch.optim.AdamW([rounded], lr=settings.learning_rate, weight_decay=0.01)
    for _ in range(100):
        for weight, each in ((gain, optimizer), (rounded, plain)):
            weight.grad = torch.ones_like(weight)
            each.step()
    assert torch.equal(rounded, torch.ones_like(rounded))
    assert torch.allclose(gain.float(), torch.tensor(0.99), atol=4e-3)
    assert gain.dtype == torch.bfloat16
    assert optimizer.learned(gain)[""].dtype == torch.float32
