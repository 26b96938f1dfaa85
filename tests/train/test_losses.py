import math

import pytest
import torch
import torch.nn.functional as F

from polybasic.train import losses
from polybasic.train.losses import step_weights, unrolled_loss


def test_step_weights_by_hand():
    is_label = torch.tensor([[0, 1, 1, 1, 0, 1, 1]], dtype=torch.bool)
    assert step_weights(is_label, 3).int().tolist() == [
        [[0, 1, 1, 1, 0, 1, 1]],
        [[0, 0, 1, 1, 0, 0, 1]],
        [[0, 0, 0, 1, 0, 0, 0]],
    ]


def test_loss_of_one_token_by_hand():
    lm_head = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    teacher = torch.tensor([[[math.log(3.0), 0.0]]])  # probabilities 3/4, 1/4
    output = torch.tensor([[[0.0, 0.0]]])  # probabilities 1/2, 1/2
    loss = unrolled_loss([output], teacher, lm_head, torch.tensor([[True]]), 1.0, 0.1)
    assert loss.token.item() == pytest.approx(math.log(2.0))
    distance = math.log(3.0) - 0.5  # smooth-L1 beyond 1, over two dimensions
    assert loss.feature.item() == pytest.approx(distance / 2)
    assert loss.total.item() == pytest.approx(distance / 2 + 0.1 * math.log(2.0))
    assert loss.agreement.tolist() == [1.0]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 128])
def test_loss_and_gradient_equal_plain_autograd(monkeypatch, chunk_tokens):
    monkeypatch.setattr(losses, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(losses, "_CHUNK_TOKENS", chunk_tokens)
    torch.manual_seed(0)
    lm_head, teachers = torch.randn(11, 6), torch.randn(2, 5, 6)
    outputs = [torch.randn(2, 5, 6, requires_grad=True) for _ in range(3)]
    is_label = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 1, 1]], dtype=torch.bool)
    total = torch.zeros(())
    for output, counts in zip(outputs, step_weights(is_label, 3), strict=True):
        chosen, wanted = output[counts], teachers[counts]
        total = total + F.smooth_l1_loss(chosen, wanted) / 3
        total = (
            total + 0.5 * F.cross_entropy(chosen @ lm_head.T, (wanted @ lm_head.T).softmax(-1)) / 3
        )
    expected = torch.autograd.grad(total, outputs)
    loss = unrolled_loss(outputs, teachers, lm_head, is_label, 1.0, 0.5)
    torch.testing.assert_close(loss.total, total)
    for one, other in zip(torch.autograd.grad(loss.total, outputs), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_only_assistant_tokens_count():
    torch.manual_seed(0)
    lm_head, teachers, output = torch.randn(11, 6), torch.randn(1, 4, 6), torch.randn(1, 4, 6)
    is_label = torch.tensor([[False, True, True, False]])
    before = unrolled_loss([output], teachers, lm_head, is_label, 1.0, 0.1).total
    output[:, 0] += 1
    assert unrolled_loss([output], teachers, lm_head, is_label, 1.0, 0.1).total == before
    output[:, 1] += 1
    assert unrolled_loss([output], teachers, lm_head, is_label, 1.0, 0.1).total != before
