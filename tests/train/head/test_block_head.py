"""Block-parallel heads: the training's pass over many anchors is the runtime's over one."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.kernels.executor import Executor, Perturbation
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.head.block import BlockHead, block_mask
from polybasic.train.head.losses import UnrolledLoss
from polybasic.train.head.positions import (
    choose_anchors,
    counted_positions,
    position_counts,
    positions_loss,
)
from polybasic.train.head.served import served_head
from polybasic.train.settings import HeadSettings
from tests.train.counting import SMALL_SHAPE

K, RANK, T = 4, 16, 12
SHAPE = replace(
    SMALL_SHAPE, head_dim=16, kind="block", num_layers=2, num_positions=K, markov_rank=RANK
)
"""That native kernels take where there are any."""
TOP_K, VOCAB = 3, SHAPE.vocab_size


def block_head(rank: int = RANK) -> BlockHead:
    torch.manual_seed(0)
    head = BlockHead(replace(SHAPE, markov_rank=rank))
    for name, parameter in head.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5)
    if head.markov_out is not None:
        head.markov_out.data.normal_(std=0.5)
    return head


@pytest.fixture
def lm_head() -> LmHead:
    return LmHead(torch.randn(VOCAB, SHAPE.hidden_size, generator=torch.Generator().manual_seed(2)))


def conversation() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (1, T), generator=generator)
    return tokens, torch.randn(1, T, SHAPE.hidden_size, generator=generator)


def drafted_states(served: Executor, tokens: Tensor, features: Tensor, anchor: int) -> Tensor:
    """What the runtime's pass gives of an anchor's row and those of the further positions."""
    positions = served.weights.positions
    assert positions is not None
    cache = [torch.zeros(2 * SHAPE.num_kv_heads, 64, SHAPE.head_dim) for _ in range(2)]
    read = positions.with_rows_ahead(features[0, : anchor + 1], K - 1)
    ids = torch.cat([tokens[0, : anchor + 1], tokens[0, anchor].expand(K - 1)])
    states = served.forward(ids, [cache], [consecutive_rows(0, anchor + K)], read)
    return states[anchor:]


def test_the_runtime_computes_what_training_does(lm_head: LmHead) -> None:
    head, (tokens, features) = block_head(), conversation()
    anchors = torch.tensor([[2, 5, 9]])
    drafted = head.predict(tokens, features, anchors)
    served = served_head(head, lm_head, 64)
    for number, anchor in enumerate(anchors[0].tolist()):
        expected = torch.cat([drafted.first[0, anchor, None], drafted.later[0, number]])
        found = drafted_states(served, tokens, features, anchor)
        assert torch.allclose(found, expected, atol=1e-4)
        assert not torch.allclose(found[1], found[2], atol=1e-2)


def test_conversations_of_a_packed_row_do_not_see_each_other() -> None:
    head, (tokens, features) = block_head(), conversation()
    documents = torch.tensor([[0] * 5 + [1] * 7])
    packed = head.predict(tokens, features, torch.tensor([[3, 8]]), documents)
    alone = head.predict(tokens[:, 5:], features[:, 5:], torch.tensor([[3]]))
    assert torch.allclose(packed.later[:, 1:], alone.later, atol=1e-5)
    assert torch.allclose(packed.first[:, 5:], alone.first, atol=1e-5)


@pytest.mark.parametrize("rank", [0, RANK])
@pytest.mark.parametrize("has_noise", [False, True])
def test_drafts_follow_joint_probabilities(lm_head: LmHead, rank: int, has_noise: bool) -> None:
    """The native draft and a plain beam over all tokens of the small vocabulary agree.

    The vocabulary has as many tokens as a bigram corrects, or few more: what differs is tiny.
    """
    head, (tokens, features) = block_head(rank), conversation()
    served = served_head(head, lm_head, 64)
    states = drafted_states(served, tokens, features, T - 1)
    added = torch.randn(K, VOCAB, generator=torch.Generator().manual_seed(5))
    perturbation = Perturbation(0.7, added) if has_noise else None
    scale, noise = (0.7, added) if has_noise else (1.0, torch.zeros(K, VOCAB))
    cache = [torch.zeros(2 * SHAPE.num_kv_heads, 64, SHAPE.head_dim) for _ in range(2)]
    found = served.draft(states, cache, T, K, TOP_K, perturbation=perturbation)
    base = served.logits(states) * scale + noise
    scores, beam = base[0].log_softmax(-1).topk(TOP_K)
    assert torch.allclose(found.scores[:TOP_K], scores, atol=1e-4)
    assert found.tokens[:TOP_K].tolist() == beam.tolist()
    first = TOP_K
    for level in range(1, K):
        rows = []
        for token in beam.tolist():
            logits = base[level].clone()
            if head.markov_in is not None and head.markov_out is not None:
                best = logits.topk(32).indices
                logits[best] += scale * (head.markov_out[best] @ head.markov_in[token])
            rows.append(logits.log_softmax(-1))
        values, ids = torch.stack(rows).topk(TOP_K)
        level_scores = (scores[:, None] + values).flatten()
        end = first + TOP_K**2
        assert torch.allclose(found.scores[first:end], level_scores, atol=1e-3)
        assert found.tokens[first:end].tolist() == ids.flatten().tolist()
        scores, order = level_scores.topk(TOP_K)
        beam, first = ids.flatten()[order], end


def test_anchors_are_rows_that_count_and_follow_the_generator() -> None:
    is_label = torch.zeros(2, T, dtype=torch.bool)
    is_label[0, 2:9], is_label[1, 4:5] = True, True
    chosen = [
        choose_anchors(is_label, 0.5, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    ]
    assert chosen[0].shape == (2, 2)
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])
    assert is_label[0, chosen[0][0]].all()
    assert 4 in chosen[0][1].tolist()


def test_positions_count_as_long_as_the_assistant_speaks() -> None:
    is_label = torch.tensor([[False, True, True, True, False, True, False, False]])
    anchors = torch.tensor([[1, 3, 4, 5]])
    counted = counted_positions(is_label, anchors, K)[0].tolist()
    assert counted == [[True, True, False], [False] * 3, [False] * 3, [False] * 3]
    assert position_counts(is_label, anchors, K).tolist() == [4, 1, 1, 0]


def loss_of(head: BlockHead, lm_head: LmHead, settings: HeadSettings) -> UnrolledLoss:
    tokens, features = conversation()
    is_label, anchors = torch.ones(1, T, dtype=torch.bool), torch.tensor([[1, 6]])
    states = torch.randn(1, T, SHAPE.hidden_size, generator=torch.Generator().manual_seed(8))
    return positions_loss(
        head,
        head.predict(tokens, features, anchors),
        anchors,
        tokens,
        Features(states),
        lm_head,
        is_label,
        settings,
        position_counts(is_label, anchors, K),
    )


def test_the_loss_compares_each_position_with_its_own_token(lm_head: LmHead) -> None:
    settings = HeadSettings(kind="block", feature_loss_weight=0.0, token_loss_weight=1.0)
    head, (tokens, features) = block_head(), conversation()
    drafted = head.predict(tokens, features, torch.tensor([[1, 6]]))
    states = torch.randn(1, T, SHAPE.hidden_size, generator=torch.Generator().manual_seed(8))
    teacher = F.linear(states, lm_head.weight).softmax(-1)

    def cross_entropy(logits: Tensor, row: int) -> Tensor:
        return -(teacher[0, row] * logits.log_softmax(-1)).sum()

    expected = torch.stack([cross_entropy(lm_head(drafted.first[0, r]), r) for r in range(T)])
    total = expected.mean() / 2
    assert head.markov_in is not None
    assert head.markov_out is not None
    for position in range(1, K):
        parts = []
        for number, anchor in enumerate((1, 6)):
            row = anchor + position
            logits = lm_head(drafted.later[0, number, position - 1])
            logits = logits + head.markov_out @ head.markov_in[tokens[0, row]]
            parts.append(cross_entropy(logits, row))
        total = total + torch.stack(parts).mean() / (2 * (K - 1))
    found = loss_of(head, lm_head, settings)
    assert torch.allclose(found.total, total, atol=1e-4)
    head.zero_grad()
    found.total.backward()
    parameters = [pair for pair in head.named_parameters() if pair[1].grad is not None]
    gradients = {
        name: parameter.grad.clone() for name, parameter in parameters if parameter.grad is not None
    }
    head.zero_grad()
    total.backward()
    assert {"markov_in", "markov_out", "place_features"} <= set(gradients)
    for name, parameter in head.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(gradients[name], parameter.grad, atol=1e-4), name


def test_rows_see_their_conversation_and_their_own_block_before_them() -> None:
    mask = block_mask(torch.arange(3), torch.tensor([[0, 2]]), 2)[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 0],
        [1, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 1, 1],
    ]
