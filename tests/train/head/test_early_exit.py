"""Early exits in training: their start, their loss, and that what serves them computes the same."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polybasic.train.data.batches import LocalBatch
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.head.early_exit import EarlyExit
from polybasic.train.head.loss_module import LossModule
from polybasic.train.head.losses import UnrolledLoss
from polybasic.train.head.start import new_head
from polybasic.train.settings import HeadSettings
from tests.train.counting import SMALL_SHAPE

DRAFTED = torch.arange(0, 50, 3)
SETTINGS = HeadSettings(
    kind="early_exit", feature_loss_weight=0, token_loss_weight=1, dtype="float32"
)


def new_exit(rank: int = 16, drafted: Tensor | None = None) -> EarlyExit:
    shape = replace(
        SMALL_SHAPE, kind="early_exit", feature_layers=(2,), exit_layer=2, adapter_rank=rank
    )
    head = new_head(shape, torch.randn(50, 32), SETTINGS, 0, None, None, draft_token_ids=drafted)
    assert isinstance(head, EarlyExit)
    return head


def conversation() -> tuple[LocalBatch, Features, LmHead]:
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(50, (2, 9), generator=generator)
    is_assistant = torch.ones(2, 9, dtype=torch.bool)
    is_assistant[:, :3] = False
    is_assistant[1, 7:] = False
    states, layers = torch.randn(2, 2, 9, 32, generator=generator)
    return (
        LocalBatch(token_ids, is_assistant, range(2)),
        Features(states, layers),
        LmHead(torch.randn(50, 32, generator=generator), softcap=4.0),
    )


def loss_of(head: EarlyExit, features: Features | None = None) -> UnrolledLoss:
    share, given, lm_head = conversation()
    features, module = features or given, LossModule(head, SETTINGS)
    noise = torch.zeros(module.noise_shape(features))
    count = share.is_assistant[:, 2:].sum()[None]
    found: UnrolledLoss = module(share, features, lm_head, noise, count)
    return found


@pytest.mark.parametrize("drafted", [None, DRAFTED], ids=["all tokens", "trimmed"])
@pytest.mark.parametrize("rank", [0, 16])
def test_loss_is_the_mean_over_the_tokens_of_answers(rank: int, drafted: Tensor | None) -> None:
    head = new_exit(rank, drafted)
    torch.manual_seed(3)
    for parameter in head.parameters():
        parameter.data.normal_()
    share, features, lm_head = conversation()
    assert features.layers is not None
    weights = {name: each.detach() for name, each in head.named_parameters()}
    rows, total, count = slice(None) if drafted is None else drafted, torch.zeros(()), 0
    for row, place in share.is_assistant.nonzero().tolist():
        x = features.layers[row, place - 1]
        if rank:
            x = x + weights["adapter.up.weight"] @ weights["adapter.down.weight"] @ x
        normed = x / (x.square().mean() + SMALL_SHAPE.rms_norm_eps).sqrt() * weights["norm.weight"]
        given = lm_head(normed)[rows].log_softmax(-1)
        teacher = lm_head(features.states[row, place - 1]).softmax(-1)[rows]
        total, count = total - (teacher * given).sum(), count + 1
    found = loss_of(head)
    torch.testing.assert_close(found.total, total / count, rtol=1e-4, atol=1e-5)
    moved = Features(features.states, features.layers.roll(1, 1))
    assert not torch.allclose(loss_of(head, moved).total, total / count, rtol=1e-2)


def test_the_exit_alone_is_trained_and_begins_as_a_norm() -> None:
    head = new_exit()
    layers = torch.randn(3, 32)
    assert torch.equal(head(layers), head.norm(layers))
    torch.nn.init.ones_(head.get_parameter("adapter.up.weight"))
    loss_of(head).total.backward()
    trained = {name for name, each in head.named_parameters() if each.grad is not None}
    assert trained == {"norm.weight", "adapter.down.weight", "adapter.up.weight"}
    assert all(head.get_parameter(name).grad.abs().sum() > 0 for name in trained)  # type: ignore[union-attr]
