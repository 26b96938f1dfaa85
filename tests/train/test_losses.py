import math

import pytest
import torch
import torch.nn.functional as F

from polybasic.train import losses
from polybasic.train.losses import step_weights, unrolled_loss
from polybasic.train.target import LmHead


def test_step_weights_by_hand():
    is_label = torch.tensor([[0, 1, 1, 1, 0, 1, 1]], dtype=torch.bool)
    assert step_weights(is_label, 3).int().tolist() == [
        [[0, 1, 1, 1, 0, 1, 1]],
        [[0, 0, 1, 1, 0, 0, 1]],
        [[0, 0, 0, 1, 0, 0, 0]],
    ]


def test_loss_of_one_token_by_hand():
    lm_head = LmHead(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    teacher = torch.tensor([[[math.log(3.0), 0.0]]])  # probabilities 3/4, 1/4
    output = torch.tensor([[[0.0, 0.0]]])  # probabilities 1/2, 1/2
    loss = unrolled_loss([output], teacher, lm_head, torch.tensor([[True]]), 1.0, 0.1)
    assert loss.token.item() == pytest.approx(math.log(2.0))
    distance = math.log(3.0) - 0.5  # smooth-L1 beyond 1, over two dimensions
    assert loss.feature.item() == pytest.approx(distance / 2)
    assert loss.total.item() == pytest.approx(distance / 2 + 0.1 * math.log(2.0))
    assert loss.agreement.tolist() == [1.0]


def test_soft_capped_logits_by_hand():
    lm_head = LmHead(torch.tensor([[3.0], [-3.0], [0.0]]), softcap=2.0)
    capped = 2 * math.tanh(1.5)
    assert lm_head(torch.ones(1, 1))[0].tolist() == pytest.approx([capped, -capped, 0.0])
    assert LmHead(lm_head.weight)(torch.ones(1, 1))[0].tolist() == [3.0, -3.0, 0.0]
    assert lm_head.to(torch.double).softcap == 2.0


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 128])
def test_loss_and_gradient_equal_plain_autograd(monkeypatch, chunk_tokens, softcap):
    monkeypatch.setattr(losses, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(losses, "_CHUNK_TOKENS", chunk_tokens)
    torch.manual_seed(0)
    lm_head, teachers = LmHead(torch.randn(11, 6), softcap), torch.randn(2, 5, 6)
    outputs = [torch.randn(2, 5, 6, requires_grad=True) for _ in range(3)]
    is_label = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 1, 1]], dtype=torch.bool)
    total = torch.zeros(())
    for output, counts in zip(outputs, step_weights(is_label, 3), strict=True):
        chosen, wanted = output[counts], teachers[counts]
        total = total + F.smooth_l1_loss(chosen, wanted) / 3
        total = total + 0.5 * F.cross_entropy(lm_head(chosen), lm_head(wanted).softmax(-1)) / 3
    expected = torch.autograd.grad(total, outputs)
    loss = unrolled_loss(outputs, teachers, lm_head, is_label, 1.0, 0.5)
    torch.testing.assert_close(loss.total, total)
    for one, other in zip(torch.autograd.grad(loss.total, outputs), expected, strict=True):
        torch.testing.assert_close(one, other)
    uncapped = unrolled_loss(outputs, teachers, LmHead(lm_head.weight), is_label, 1.0, 0.5)
    assert torch.equal(uncapped.total, loss.total) == (softcap is None)


def test_only_assistant_tokens_count():
    torch.manual_seed(0)
    lm_head = LmHead(torch.randn(11, 6))
    teachers, output = torch.randn(1, 4, 6), torch.randn(1, 4, 6)
    is_label = torch.tensor([[False, True, True, False]])
    before = unrolled_loss([output], teachers, lm_head, is_label, 1.0, 0.1).total
    output[:, 0] += 1
    assert unrolled_loss([output], teachers, lm_head, is_label, 1.0, 0.1).total == before
    output[:, 1] += 1
    assert unrolled_loss([output], teachers, lm_head, is_label, 1.0, 0.1).total != before


def test_shares_of_a_batch_average_to_the_batch():
    torch.manual_seed(0)
    lm_head, teachers = LmHead(torch.randn(11, 6)), torch.randn(3, 5, 6)
    outputs = [torch.randn(3, 5, 6, requires_grad=True) for _ in range(2)]
    is_label = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    counts = step_weights(is_label, 2).sum(dim=(1, 2)) / 3

    def share(row, counts):
        rows = [output[row : row + 1] for output in outputs]
        label = is_label[row : row + 1]
        return unrolled_loss(rows, teachers[row : row + 1], lm_head, label, 1.0, 0.5, counts)

    whole = unrolled_loss(outputs, teachers, lm_head, is_label, 1.0, 0.5)
    shares = [share(row, counts) for row in range(3)]
    assert shares[2].total == 0, "a share without an assistant's token adds nothing"
    mean = sum(each.total for each in shares) / 3
    torch.testing.assert_close(mean, whole.total)
    torch.testing.assert_close(sum(each.agreement for each in shares) / 3, whole.agreement)
    expected = torch.autograd.grad(whole.total, outputs)
    for one, other in zip(torch.autograd.grad(mean, outputs), expected, strict=True):
        torch.testing.assert_close(one, other)
    alone = sum(share(row, None).total for row in range(3)) / 3
    assert not torch.isclose(alone, whole.total), "means of shares by themselves are another loss"
