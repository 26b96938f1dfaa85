"""Medusa's and Hydra's heads in training: their start, their loss, and what serves them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.kernels.executor import DraftRequest
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.train.data.batches import LocalBatch
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.head.loss_module import LossModule
from polybasic.train.head.losses import UnrolledLoss
from polybasic.train.head.medusa import MedusaHead
from polybasic.train.head.served import served_head
from polybasic.train.head.start import new_head
from polybasic.train.settings import HeadSettings, LoraSettings
from tests.train.counting import SMALL_SHAPE

KINDS, PLACES, DECAY = ("medusa", "hydra"), 3, 0.8
DRAFTED = torch.arange(0, 50, 3)


def settings_of(kind: str, **changes: object) -> HeadSettings:
    given = {"num_positions": PLACES, "step_decay": DECAY, "token_loss_weight": 1.0}
    return HeadSettings(kind=kind, feature_loss_weight=0, dtype="float32", **(given | changes))


def new_of(
    kind: str, drafted: Tensor | None = None, lora: LoraSettings | None = None, num_blocks: int = 1
) -> MedusaHead:
    shape = replace(SMALL_SHAPE, kind=kind, num_positions=PLACES, num_blocks=num_blocks)
    generator = torch.Generator().manual_seed(5)
    embedding, projection = torch.randn(2, 50, 32, generator=generator)
    given = settings_of(kind), 0, None, lora, LmHead(projection), drafted
    head = new_head(shape, embedding, *given)
    assert isinstance(head, MedusaHead)
    return head


def randomized(head: MedusaHead) -> MedusaHead:
    torch.manual_seed(7)
    for parameter in head.parameters():
        parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    return head


def logits_of(head: MedusaHead, place: int, state: Tensor, path: list[int]) -> Tensor:
    """Of a place [V'], one product after the other; the path begins after the state's token."""
    weights = {name: each.detach() for name, each in head.named_parameters()}

    def linear(name: str, x: Tensor) -> Tensor:
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    block, x = f"blocks.{place}", state
    if head.shape.kind == "hydra":
        x = torch.cat([state, *(weights["embed_tokens.weight"][token] for token in path)])
    kept = linear(f"{block}.residual", x) if head.shape.kind == "hydra" else x
    for number in range(head.shape.num_blocks):
        kept = x = kept + F.silu(linear(f"{block}.layers.{number}", x))
    return weights[f"lm_heads.{place}.weight"] @ x


def conversation(length: int = 11) -> tuple[LocalBatch, Features, LmHead]:
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(50, (2, length), generator=generator)
    is_assistant = torch.ones(2, length, dtype=torch.bool)
    is_assistant[:, :3] = False
    is_assistant[0, 6] = False  # two answers
    is_assistant[1, 9:] = False
    features = Features(torch.randn(2, length, 32, generator=generator))
    return (
        LocalBatch(token_ids, is_assistant, range(2)),
        features,
        LmHead(torch.randn(50, 32, generator=generator), softcap=4.0),
    )


def loss_of(head: MedusaHead, counts: list[float], **changes: object) -> UnrolledLoss:
    share, features, lm_head = conversation()
    module = LossModule(head, settings_of(head.shape.kind, **changes))
    noise = torch.zeros(module.noise_shape(features))
    found: UnrolledLoss = module(share, features, lm_head, noise, torch.tensor(counts))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafted", [None, DRAFTED], ids=["all tokens", "trimmed"])
def test_loss_is_the_mean_over_all_positions_of_answers(kind: str, drafted: Tensor | None) -> None:
    head = randomized(new_of(kind, drafted, num_blocks=2))
    share, features, lm_head = conversation()
    rows = slice(None) if drafted is None else drafted
    expected, counts = torch.zeros(PLACES), [0.0] * PLACES
    for row, tokens in enumerate(share.token_ids.tolist()):
        for anchor in range(len(tokens)):
            for place in range(PLACES):
                predicted = slice(anchor + 2, anchor + 3 + place)
                if predicted.stop > len(tokens) or not share.is_assistant[row, predicted].all():
                    continue
                state, path = features.states[row, anchor], tokens[anchor + 1 : predicted.stop - 1]
                given = logits_of(head, place, state, path).log_softmax(-1)
                teacher = lm_head(features.states[row, predicted.stop - 2]).softmax(-1)[rows]
                expected[place] -= (teacher * given).sum()
                counts[place] += 1
    assert counts[0] > counts[1] > counts[2] > 0
    found = loss_of(head, counts)
    weights = torch.tensor([1, DECAY, DECAY**2])
    mean = (expected / torch.tensor(counts) * weights).sum() / weights.sum()
    torch.testing.assert_close(found.total, mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.token, mean, rtol=1e-4, atol=1e-4)
    assert found.agreement.shape == found.acceptance.shape == (PLACES,)
    other = loss_of(head, counts, step_decay=1.0)
    assert not torch.allclose(other.total, mean, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_start_as_the_verifiers_projection(kind: str) -> None:
    head, state = new_of(kind), torch.randn(32)
    for place in range(PLACES):
        weight = head.get_parameter(f"lm_heads.{place}.weight")
        found = logits_of(head, place, state, list(range(place + 1)))
        torch.testing.assert_close(found, weight @ state)
        assert torch.equal(weight, head.get_parameter("lm_heads.0.weight"))
    trimmed = new_of(kind, DRAFTED)
    rows = head.get_parameter("lm_heads.0.weight")[DRAFTED]
    assert torch.equal(trimmed.get_parameter("lm_heads.2.weight"), rows)


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_a_head_is_trained_but_the_embedding(kind: str) -> None:
    head = new_of(kind)
    loss_of(head, [9.0, 5.0, 3.0]).total.backward()
    for name, parameter in head.named_parameters():
        if name == "embed_tokens.weight":
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            assert parameter.grad.abs().sum() > 0, name


def test_a_lora_trains_the_blocks_alone() -> None:
    head = new_of("hydra", lora=LoraSettings(rank=2))
    trained = {name for name, each in head.named_parameters() if each.requires_grad}
    assert all(".lora_" in name for name in trained)
    adapted = {name.split(".lora_")[0] for name in trained}
    blocks = [
        f"blocks.{place}.{part}" for place in range(PLACES) for part in ("layers.0", "residual")
    ]
    assert adapted == set(blocks)


@torch.no_grad()
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, alpha=2)], ids=["whole", "lora"])
@pytest.mark.parametrize("drafted", [None, DRAFTED], ids=["all tokens", "trimmed"])
@pytest.mark.parametrize("kind", KINDS)
def test_served_heads_draft_what_the_module_computes(
    kind: str, drafted: Tensor | None, lora: LoraSettings | None
) -> None:
    """The best path of several sequences, step by step, and the scores along it."""
    head = randomized(new_of(kind, drafted, lora, num_blocks=1 if lora else 2))
    served = served_head(head, LmHead(torch.randn(50, 32)), 9)
    if lora is not None:
        head = head_with_merged_lora(head)
    states, roots = torch.randn(3, 32), torch.tensor([4, 9, 30])
    read = served.forward(roots, [[]], [consecutive_rows(0, 3)], served.features(states))
    requests = [DraftRequest(row[None], [], 0, PLACES, 1) for row in read]
    for candidates, state, root in zip(
        served.drafts(requests), states, roots.tolist(), strict=True
    ):
        path, score = [root], 0.0
        for place in range(PLACES):
            best = logits_of(head, place, state, path).log_softmax(-1).max(-1)
            index = int(best.indices)
            path.append(index if drafted is None else int(drafted[index]))
            score += float(best.values)
            assert candidates.scores[place].item() == pytest.approx(score, rel=1e-4)
        assert candidates.tokens.tolist() == path[1:]


def head_with_merged_lora(head: MedusaHead) -> MedusaHead:
    """Without peft's modules, whose sum this takes itself."""
    plain = new_of(head.shape.kind, head.draft_token_ids)
    named = dict(head.named_parameters())
    for name, parameter in plain.named_parameters():
        stem, _, part = name.rpartition(".")
        base = named.get(f"{stem}.base_layer.{part}", named.get(name))
        assert base is not None
        parameter.copy_(base)
        if part == "weight" and f"{stem}.lora_A.default.weight" in named:
            down, up = (named[f"{stem}.lora_{side}.default.weight"] for side in "AB")
            parameter += up @ down  # alpha is the rank
    return plain
