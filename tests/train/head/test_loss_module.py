"""From features to the loss: what is read, which rows count, and packed rows."""

from dataclasses import replace

import pytest
import torch

from polybasic.train.data.batches import LocalBatch
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.head.eagle2 import Eagle2Head
from polybasic.train.head.eagle3 import Eagle3Head
from polybasic.train.head.loss_module import LossModule
from polybasic.train.head.medusa import HydraHead, MedusaHead
from polybasic.train.settings import HeadSettings
from tests.train.counting import SMALL_SHAPE

DRAFTED = torch.arange(0, 50, 2)
LENGTHS = (9, 6)


def head_of(kind, draft_token_ids=None):
    torch.manual_seed(0)
    num = None if draft_token_ids is None else len(draft_token_ids)
    shape = replace(SMALL_SHAPE, kind=kind, draft_vocab_size=num)
    if kind == "eagle3":
        return Eagle3Head(replace(shape, feature_layers=(0, 1, 2)), None, draft_token_ids).double()
    if kind in ("medusa", "hydra"):
        by_place = replace(shape, num_positions=3, num_blocks=1)
        heads = MedusaHead if kind == "medusa" else HydraHead
        return heads(by_place, None, draft_token_ids).double()
    return Eagle2Head(shape, None, draft_token_ids).double()


def module_of(kind, draft_token_ids=None, **changes):
    weight = 1.0 if kind == "eagle2" else 0.0
    settings = HeadSettings(kind=kind, feature_loss_weight=weight, num_positions=3, **changes)
    return LossModule(head_of(kind, draft_token_ids), settings)


def conversations():
    """Token ids, marks and features of two conversations."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.double)

    found = []
    for length in LENGTHS:
        token_ids = torch.randint(50, (1, length), generator=generator)
        is_assistant = torch.arange(length)[None] >= length // 3
        features = Features(random(1, length, 32), random(1, length, 96))
        found.append((token_ids, is_assistant, features))
    return found


def loss_of(module, share, features, counts, noise=None):
    lm_head = LmHead(torch.randn(50, 32, generator=torch.Generator().manual_seed(2)).double())
    noise = torch.zeros(module.noise_shape(features)) if noise is None else noise
    module.zero_grad()
    loss = module(share, features, lm_head, noise, torch.tensor(counts))
    loss.total.backward()
    total = loss.total.item()
    gradients = {
        name: each.grad.clone() for name, each in module.named_parameters() if each.requires_grad
    }
    return total, gradients


@pytest.mark.parametrize("kind", ["eagle2", "eagle3", "medusa", "hydra"])
@pytest.mark.parametrize("draft_token_ids", [None, DRAFTED], ids=["all tokens", "trimmed"])
def test_packed_conversations_have_the_loss_of_each_alone(kind, draft_token_ids):
    module, parts = module_of(kind, draft_token_ids), conversations()
    counts = [8.0, 6.0, 4.0]
    alone = [
        loss_of(module, LocalBatch(ids, marks, range(1)), features, counts)
        for ids, marks, features in parts
    ]
    token_ids, marks = (torch.cat([part[number] for part in parts], dim=1) for number in (0, 1))
    marks[:, LENGTHS[0] : LENGTHS[0] + 2] = False
    features = Features(
        torch.cat([part[2].states for part in parts], dim=1),
        torch.cat([part[2].layers for part in parts], dim=1),
    )
    documents = torch.tensor([[0] * LENGTHS[0] + [1] * LENGTHS[1]])
    packed = LocalBatch(token_ids, marks, range(1), documents)
    loss, gradients = loss_of(module, packed, features, counts)
    assert loss == pytest.approx(sum(each for each, _ in alone))
    for name, gradient in gradients.items():
        expected = sum(each[name] for _, each in alone)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
    if kind in ("medusa", "hydra"):  # whose drafts see no row but their own
        packed = replace(packed, is_assistant=torch.ones_like(marks))
    unaware, _ = loss_of(module, replace(packed, document_ids=None), features, counts)
    assert unaware != pytest.approx(loss, rel=1e-4)


def test_each_kind_reads_and_is_noisy_where_its_features_come_from():
    (token_ids, marks, features), _ = conversations()
    share = LocalBatch(token_ids, marks, range(1))
    for kind, width in (("eagle2", 32), ("eagle3", 96)):
        module = module_of(kind)
        assert module.noise_shape(features) == (1, LENGTHS[0] - 2, width)
        noise = 0.5 * torch.randn(1, LENGTHS[0] - 2, width, dtype=torch.double)
        source = features.states if kind == "eagle2" else features.layers
        source = source.clone()
        source[:, :-2] += noise
        noisy, _ = loss_of(module, share, features, [3.0] * 3, noise)
        plain, _ = loss_of(module, share, features, [3.0] * 3)
        assert noisy != plain
        if kind == "eagle3":  # its layers are not what it is held against
            expected, _ = loss_of(module, share, Features(features.states, source), [3.0] * 3)
            assert noisy == pytest.approx(expected)


def test_what_is_trained_of_each_kind():
    (token_ids, marks, features), _ = conversations()
    for kind in ("eagle2", "eagle3"):
        module = module_of(kind, DRAFTED, unroll_steps=2, token_loss="total_variation")
        _, gradients = loss_of(module, LocalBatch(token_ids, marks, range(1)), features, [3.0, 3.0])
        assert all(gradient.abs().sum() > 0 for gradient in gradients.values())
        assert ("head.lm_head.weight" in gradients) == (kind == "eagle3")
        assert "head.embed_tokens.weight" not in gradients
