import math
from math import log
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.head import losses
from polybasic.train.head.losses import TOKEN_LOSSES, step_weights
from polybasic.train.settings import HeadSettings

IS_LABEL = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 1, 1]], dtype=torch.bool)
DRAFTED = torch.tensor([0, 2, 3, 7, 8, 10])


def weighing(token_loss="cross_entropy", token=0.1, feature=1.0, decay=1.0):
    return HeadSettings(
        token_loss=token_loss,
        token_loss_weight=token,
        feature_loss_weight=feature,
        step_decay=decay,
    )


def random_case(num_steps=3, vocab_size=11, hidden_size=6, dtype=torch.float32):
    torch.manual_seed(0)
    lm_head = LmHead(torch.randn(vocab_size, hidden_size).to(dtype))
    states = torch.randn(2, 5, hidden_size).to(dtype)
    outputs = states + torch.randn(num_steps, 2, 5, hidden_size).to(dtype)
    return list(outputs.requires_grad_()), states, lm_head


def test_step_weights_by_hand():
    is_label = torch.tensor([[0, 1, 1, 1, 0, 1, 1]], dtype=torch.bool)
    assert step_weights(is_label, 3).int().tolist() == [
        [[0, 1, 1, 1, 0, 1, 1]],
        [[0, 0, 1, 1, 0, 0, 1]],
        [[0, 0, 0, 1, 0, 0, 0]],
    ]


def unrolled_loss(outputs, states, *arguments, **settings):
    """The loss against the verifier's states."""
    return losses.unrolled_loss(outputs, Features(states), *arguments, **settings)


def test_every_loss_of_the_settings_is_there():
    assert tuple(TOKEN_LOSSES) == get_args(HeadSettings.model_fields["token_loss"].annotation)


def test_loss_of_one_token_by_hand():
    lm_head = LmHead(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    teacher = torch.tensor([[[log(3.0), 0.0]]])  # probabilities 3/4, 1/4
    output = torch.tensor([[[0.0, 0.0]]])  # probabilities 1/2, 1/2
    loss = unrolled_loss(
        [output], teacher, lm_head, lm_head, torch.tensor([[True]]), weighing(token=0.1)
    )
    assert loss.token.item() == pytest.approx(log(2.0))
    distance = log(3.0) - 0.5  # smooth-L1 beyond 1, over two dimensions
    assert loss.feature.item() == pytest.approx(distance / 2)
    assert loss.total.item() == pytest.approx(distance / 2 + 0.1 * log(2.0))
    assert loss.agreement.tolist() == [1.0]
    assert loss.acceptance.tolist() == pytest.approx([0.75])


WHOLE = {  # p = 3/4, 1/4; q = 1/2, 1/2: value and gradient in the head's logits
    "cross_entropy": (log(2), -0.25),
    "forward_kl": (0.75 * log(1.5) + 0.25 * log(0.5), -0.25),
    "reverse_kl": (0.5 * log(2 / 3) + 0.5 * log(2), 0.25 * log(1 / 3)),
    "total_variation": (0.25, -0.25),
}
PART = {  # p = 0.6, (0.25), 0.15, of which the second is not drafted; q = 1/2, 1/2
    "cross_entropy": (0.75 * log(2), -0.225),
    "forward_kl": (0.6 * log(0.6 / 0.375) + 0.15 * log(0.15 / 0.375), -0.225),
    "reverse_kl": (0.5 * log(0.5 / 0.6) + 0.5 * log(0.5 / 0.15), 0.25 * log(0.15 / 0.6)),
    "total_variation": (0.35, -0.25),
}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("part", [False, True])
def test_token_losses_by_hand(name, part, eager):
    probabilities = torch.tensor([0.6, 0.25, 0.15] if part else [0.75, 0.25])
    drafted = torch.tensor([0, 2]) if part else None
    output = torch.zeros(1, 1, 2, requires_grad=True)  # logits, for lm_head is the identity
    teacher = LmHead(probabilities.log()[:, None].repeat(1, 2))  # of state (1, 0)
    loss = unrolled_loss(
        [output],
        torch.tensor([[[1.0, 0.0]]]),
        teacher,
        LmHead(torch.eye(2)),
        torch.tensor([[True]]),
        weighing(name, token=1.0, feature=0.0),
        drafted,
        eager=eager,
    )
    value, slope = (PART if part else WHOLE)[name]
    assert loss.total.item() == pytest.approx(value, abs=1e-6)
    (gradient,) = torch.autograd.grad(loss.total, [output])
    assert gradient[0, 0].tolist() == pytest.approx([slope, -slope], abs=1e-6)
    assert loss.acceptance.item() == pytest.approx(0.65 if part else 0.75)


@pytest.mark.parametrize("eager", [False, True])
def test_least_values_where_the_head_is_as_good_as_its_vocabulary_allows(eager):
    _, states, teacher = random_case()
    probabilities = teacher(states[IS_LABEL]).softmax(-1)
    mass = probabilities[:, DRAFTED].sum(-1)
    student = LmHead(teacher.weight[DRAFTED])
    least = {
        "forward_kl": 0.0,
        "reverse_kl": -mass.log().mean().item(),
        "total_variation": 1 - mass.mean().item(),
    }
    for name, value in least.items():
        arguments = ([states], states, teacher, student, IS_LABEL, weighing(name))
        loss = unrolled_loss(*arguments, DRAFTED, eager=eager)
        assert loss.token.item() == pytest.approx(value, abs=1e-6), name
    assert loss.acceptance.item() == pytest.approx(mass.mean().item())
    is_drafted = torch.isin(probabilities.argmax(-1), DRAFTED).float().mean().item()
    assert 0 < is_drafted < 1, "some best tokens of the verifier cannot be drafted"
    assert loss.agreement.item() == pytest.approx(is_drafted)


@pytest.mark.parametrize(("best", "agreement"), [(0, 0.0), (1, 0.0), (2, 1.0), (3, 0.0)])
def test_a_best_token_that_is_not_drafted_agrees_with_none(best, agreement):
    student = LmHead(torch.tensor([[1.0], [2.0]]))  # of tokens 0 and 2, the latter in front
    teacher = LmHead(F.one_hot(torch.tensor([best]), 4).float().T)
    state = torch.ones(1, 1, 1)
    drafted, is_label = torch.tensor([0, 2]), torch.tensor([[True]])
    loss = unrolled_loss([state], state, teacher, student, is_label, weighing(), drafted)
    assert loss.agreement.tolist() == [agreement]


def test_soft_capped_logits_by_hand():
    lm_head = LmHead(torch.tensor([[3.0], [-3.0], [0.0]]), softcap=2.0)
    capped = 2 * math.tanh(1.5)
    assert lm_head(torch.ones(1, 1))[0].tolist() == pytest.approx([capped, -capped, 0.0])
    assert LmHead(lm_head.weight)(torch.ones(1, 1))[0].tolist() == [3.0, -3.0, 0.0]
    assert lm_head.to(torch.double).softcap == 2.0


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 128])
def test_loss_and_gradient_equal_plain_autograd(monkeypatch, chunk_tokens, softcap, eager):
    monkeypatch.setattr(losses, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(losses, "_CHUNK_TOKENS", chunk_tokens)
    outputs, states, uncapped = random_case()
    lm_head = LmHead(uncapped.weight, softcap)
    total = torch.zeros(())
    for output, counts in zip(outputs, step_weights(IS_LABEL, 3), strict=True):
        chosen, wanted = output[counts], states[counts]
        total = total + F.smooth_l1_loss(chosen, wanted) / 3
        total = total + 0.5 * F.cross_entropy(lm_head(chosen), lm_head(wanted).softmax(-1)) / 3
    expected = torch.autograd.grad(total, outputs)
    arguments = IS_LABEL, weighing(token=0.5)
    loss = unrolled_loss(outputs, states, lm_head, lm_head, *arguments, eager=eager)
    torch.testing.assert_close(loss.total, total)
    for gradient, other in zip(torch.autograd.grad(loss.total, outputs), expected, strict=True):
        torch.testing.assert_close(gradient, other)
    plain = unrolled_loss(outputs, states, uncapped, uncapped, *arguments, eager=eager)
    assert torch.equal(plain.total, loss.total) == (softcap is None)


def value_and_gradients(name, dtype, softcap, drafted, eager):
    """Of a trained student; also of its weight."""
    outputs, states, teacher = random_case(dtype=dtype)
    teacher = LmHead(teacher.weight, softcap)
    num_drafted = 11 if drafted is None else len(drafted)
    weight = torch.randn(num_drafted, 6).to(dtype).requires_grad_()
    loss = unrolled_loss(
        outputs,
        states,
        teacher,
        LmHead(weight, softcap),
        IS_LABEL,
        weighing(name, token=0.5, decay=0.8),
        drafted,
        eager=eager,
    )
    return loss, torch.autograd.grad(loss.total, [*outputs, weight])


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("drafted", [None, DRAFTED])
def test_twins_are_equal_in_value_and_gradient(monkeypatch, name, dtype, softcap, drafted):
    monkeypatch.setattr(losses, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(losses, "_CHUNK_TOKENS", 3)
    loss, gradients = value_and_gradients(name, dtype, softcap, drafted, eager=False)
    expected, expected_gradients = value_and_gradients(name, dtype, softcap, drafted, eager=True)
    for field in ("total", "feature", "token", "agreement", "acceptance"):
        torch.testing.assert_close(getattr(loss, field), getattr(expected, field))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # of the largest entry
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == dtype
        assert (gradient - other).abs().max() <= tolerance * other.abs().max()
        assert other.abs().max() > 1e-3
    another = "reverse_kl" if name == "total_variation" else "total_variation"
    _, others = value_and_gradients(another, dtype, softcap, drafted, eager=False)
    for gradient, other in zip(gradients, others, strict=True):
        assert (gradient - other).abs().max() > 0.05 * other.abs().max(), (
            "another loss, another slope"
        )


def test_gradient_of_the_weight_is_summed_in_float32(monkeypatch):
    """In bfloat16 a sum of equal parts stays where it is after 256 of them."""
    monkeypatch.setattr(losses, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(losses, "_CHUNK_TOKENS", 1)
    outputs, states, teacher = random_case(1, dtype=torch.bfloat16)
    student = LmHead(torch.randn(11, 6).bfloat16().requires_grad_())

    def of(num_tokens):
        output, state = (each[:1, :1].expand(1, num_tokens, 6) for each in (outputs[0], states))
        is_label = torch.ones(1, num_tokens, dtype=torch.bool)
        loss = unrolled_loss([output], state, teacher, student, is_label, weighing())
        return torch.autograd.grad(loss.total, student.weight)[0]

    single = of(1)
    assert (of(600) - single).abs().max() < 0.02 * single.abs().max()


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_all_tokens_as_draft_vocabulary_change_nothing(name):
    outputs, states, lm_head = random_case()
    found = [
        unrolled_loss(outputs, states, lm_head, lm_head, IS_LABEL, weighing(name), drafted)
        for drafted in (None, torch.arange(11))
    ]
    assert torch.equal(found[0].agreement, found[1].agreement)
    for field in ("total", "token", "acceptance"):
        torch.testing.assert_close(getattr(found[0], field), getattr(found[1], field))


class LargestTensor(TorchDispatchMode):
    """How many values the largest result of an operation has, while it is entered."""

    num_values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor):
                self.num_values = max(self.num_values, each.numel())
        return result


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_no_more_than_a_chunk_of_logits_is_held(monkeypatch, name):
    monkeypatch.setattr(losses, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(losses, "_CHUNK_TOKENS", 2)
    outputs, states, lm_head = random_case(vocab_size=500)
    largest = {}
    for eager in (False, True):
        with LargestTensor() as mode:
            unrolled_loss(
                outputs, states, lm_head, lm_head, IS_LABEL, weighing(name), eager=eager
            ).total.backward()
        largest[eager] = mode.num_values
    steps_vocabulary = 3 * 500
    assert largest[False] <= 3 * 2 * steps_vocabulary, "three buffers for two tokens"
    assert largest[True] >= 8 * steps_vocabulary, "all tokens"


@pytest.mark.parametrize("eager", [False, True])
def test_later_steps_weigh_less(eager):
    outputs, states, lm_head = random_case()

    def of(chosen, decay):
        settings = weighing(token=0.5, decay=decay)
        return unrolled_loss(chosen, states, lm_head, lm_head, IS_LABEL, settings, eager=eager)

    even, decayed = of(outputs, 1.0), of(outputs, 0.5)
    first = of(outputs[:1], 0.5)
    two = of(outputs[:2], 1.0)
    second, third = 2 * two.total - first.total, 3 * even.total - 2 * two.total
    expected = (first.total + second / 2 + third / 4) / 1.75
    torch.testing.assert_close(decayed.total, expected)
    assert not torch.isclose(decayed.total, even.total)
    assert torch.equal(decayed.agreement, even.agreement), "metrics are plain means"
    assert even.agreement.min() > 0
    assert torch.equal(decayed.acceptance, even.acceptance)


@pytest.mark.parametrize("eager", [False, True])
def test_what_is_weighted_0_has_no_gradient(eager):
    outputs, states, teacher = random_case()
    student = LmHead(teacher.weight.clone().requires_grad_())
    arguments = outputs, states, teacher, student, IS_LABEL
    both = unrolled_loss(*arguments, weighing(), eager=eager)
    feature = unrolled_loss(*arguments, weighing(token=0.0), eager=eager)
    token = unrolled_loss(*arguments, weighing(token=1.0, feature=0.0), eager=eager)
    of_outputs, of_weight = torch.autograd.grad(
        feature.total, [outputs[0], student.weight], allow_unused=True
    )
    assert of_weight is None
    assert of_outputs.abs().max() > 0
    assert feature.total == feature.feature == both.feature
    assert feature.token == token.token == both.token, "still reported"
    assert torch.equal(feature.acceptance, both.acceptance)
    assert token.total == token.token
    assert (token.feature, both.feature > 0) == (0.0, True)


def test_only_assistant_tokens_count():
    torch.manual_seed(0)
    lm_head = LmHead(torch.randn(11, 6))
    states, output = torch.randn(1, 4, 6), torch.randn(1, 4, 6)
    is_label = torch.tensor([[False, True, True, False]])

    def total():
        return unrolled_loss([output], states, lm_head, lm_head, is_label, weighing()).total

    before = total()
    output[:, 0] += 1
    assert total() == before
    output[:, 1] += 1
    assert total() != before


@pytest.mark.parametrize("name", ["cross_entropy", "total_variation"])
def test_shares_of_a_batch_average_to_the_batch(name):
    torch.manual_seed(0)
    teacher, states = LmHead(torch.randn(11, 6)), torch.randn(3, 5, 6)
    student = LmHead(torch.randn(11, 6, requires_grad=True))
    outputs = [torch.randn(3, 5, 6, requires_grad=True) for _ in range(2)]
    is_label = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    counts = step_weights(is_label, 2).sum(dim=(1, 2)) / 3
    settings = weighing(name, token=0.5, decay=0.8)

    def share(rows, counts=None):
        return unrolled_loss(
            [output[rows] for output in outputs],
            states[rows],
            teacher,
            student,
            is_label[rows],
            settings,
            token_counts=counts,
        )

    whole = share(slice(None))
    shares = [share(slice(row, row + 1), counts) for row in range(3)]
    assert shares[2].total == 0, "a share without an assistant's token adds nothing"
    nothing = torch.autograd.grad(shares[2].total, [*outputs, student.weight], retain_graph=True)
    assert all(each.abs().max() == 0 for each in nothing)
    mean = sum(each.total for each in shares) / 3
    torch.testing.assert_close(mean, whole.total)
    for field in ("agreement", "acceptance"):
        parts = [getattr(each, field) for each in shares]
        torch.testing.assert_close(sum(parts) / 3, getattr(whole, field))
    learned = [*outputs, student.weight]
    expected = torch.autograd.grad(whole.total, learned)
    for gradient, other in zip(torch.autograd.grad(mean, learned), expected, strict=True):
        torch.testing.assert_close(gradient, other)
    alone = sum(share(slice(row, row + 1)).total for row in range(3)) / 3
    assert not torch.isclose(alone, whole.total), "means of shares by themselves are another loss"


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("drafted", [None, DRAFTED], ids=["all tokens", "trimmed"])
@pytest.mark.parametrize("name", ["cross_entropy", "forward_kl", "total_variation"])
def test_most_probable_tokens_stand_for_the_distribution(name, drafted, eager):
    outputs, states, lm_head = random_case()
    student = lm_head if drafted is None else LmHead(lm_head.weight[drafted])
    log_probs = lm_head(states).log_softmax(-1)
    settings = weighing(name, token=1.0, feature=0.0)

    def told(num):
        best, token_ids = log_probs.topk(num)
        taught = Features(states, None, token_ids.int(), best)
        found = losses.unrolled_loss(
            outputs, taught, lm_head, student, IS_LABEL, settings, drafted, eager=eager
        )
        return found, torch.autograd.grad(found.total, outputs)

    def close(given, expected):
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)

    vocab_size = log_probs.shape[-1]
    whole = losses.unrolled_loss(
        outputs, Features(states), lm_head, student, IS_LABEL, settings, drafted, eager=eager
    )
    found, gradients = told(vocab_size)
    close(found.total, whole.total)
    close(found.acceptance, whole.acceptance)
    close(found.agreement, whole.agreement)
    for given, expected in zip(gradients, torch.autograd.grad(whole.total, outputs), strict=True):
        close(given, expected)
    few, _ = told(2)
    assert torch.equal(few.agreement, whole.agreement)
    assert (few.acceptance < whole.acceptance).all()


def test_distances_are_taken_in_units_of_the_channels():
    lm_head = LmHead(torch.eye(2))
    states, scales = torch.tensor([[[1000.0, 1.0]]]), torch.tensor([500.0, 0.5])
    arguments = lm_head, lm_head, torch.tensor([[True]]), weighing(token=0.0)
    output = torch.zeros(1, 1, 2, requires_grad=True)
    loss = unrolled_loss([output], states, *arguments, scales=scales)
    assert loss.feature.item() == pytest.approx(1.5)  # smooth-L1 of 2, in both channels
    (slope,) = torch.autograd.grad(loss.total, [output])
    assert slope[0, 0].tolist() == pytest.approx([-1 / 1000, -1.0])
