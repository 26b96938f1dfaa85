"""The batched simulation against rounds played one by one, without any cache."""

import pytest
import torch

from polybasic.train.acceptance import HeldoutBatch, TreeShape, simulate
from polybasic.train.head import DraftHead, HeadShape

SHAPE = HeadShape(
    vocab_size=12,
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=100.0,
    context_tokens=64,
)


def heldout(lengths, prompt_lengths):
    torch.manual_seed(3)
    width = max(lengths)
    return HeldoutBatch(
        token_ids=torch.randint(12, (len(lengths), width)),
        features=torch.randn(len(lengths), width, 16, dtype=torch.double),
        prompt_lengths=torch.tensor(prompt_lengths),
        lengths=torch.tensor(lengths),
    )


def children(head, lm_head, tokens, features, drafted, top_k):
    """Best continuations of committed tokens plus a drafted path, recomputed from the start."""
    inputs = list(features[: len(tokens) - 1])
    path = tokens + drafted
    for position in range(len(drafted) + 1):
        rows = torch.stack(inputs)[None]
        output = head.unroll_path(torch.tensor([path[1 : len(inputs) + 1]]), rows)
        if position < len(drafted):
            inputs.append(output)
    log_probabilities = (output @ lm_head.T).log_softmax(-1)
    return list(zip(*(each.tolist() for each in log_probabilities.topk(top_k)), strict=True))


def one_round(head, lm_head, tokens, features, answer, tree):
    """Tokens gained by one round, by EAGLE-2's rules over plain lists."""
    beams, pool = [((), 0.0)], []
    for _ in range(tree.depth):
        grown = [
            ((*path, token), score + gain)
            for path, score in beams
            for gain, token in children(head, lm_head, tokens, features, list(path), tree.top_k)
        ]
        pool += grown
        beams = sorted(grown, key=lambda each: -each[1])[: tree.top_k]
    kept = {path for path, _ in sorted(pool, key=lambda each: -each[1])[: tree.rows - 1]}
    accepted = 0
    while accepted < min(tree.depth, len(answer)) and tuple(answer[: accepted + 1]) in kept:
        accepted += 1
    return min(accepted + 1, len(answer))


class PathHead(DraftHead):
    """A head whose rows are all run again, which equals drafting because rows are causal."""

    def unroll_path(self, token_ids, features):
        output, _ = self(token_ids, features, torch.arange(features.shape[1]))
        return output[0, -1]


@pytest.mark.parametrize("tree", [TreeShape(3, 3, 6), TreeShape(4, 2, 16), TreeShape(1, 4, 3)])
def test_simulation_equals_rounds_played_one_by_one(tree):
    torch.manual_seed(0)
    head = PathHead(SHAPE).double()
    for parameter in head.parameters():
        parameter.requires_grad_(False).mul_(3.0)
    lm_head = torch.randn(12, 16, dtype=torch.double)
    batch = heldout([14, 17, 9, 6], [5, 4, 3, 5])
    gained = []
    for row in range(4):
        token_ids = batch.token_ids[row, : batch.lengths[row]].tolist()
        last = int(batch.prompt_lengths[row])
        while last < len(token_ids) - 1:
            tokens, answer = token_ids[: last + 1], token_ids[last + 1 :]
            gained.append(one_round(head, lm_head, tokens, batch.features[row], answer, tree))
            last += gained[-1]
    found = simulate(head, lm_head, [batch], tree)
    assert found.num_rounds == len(gained)
    assert found.accepted_length == pytest.approx(sum(gained) / len(gained))
    assert max(gained) > 1, "the example must accept something"


class Oracle(DraftHead):
    """Predicts that each token is followed by the next in the vocabulary."""

    def forward(self, token_ids, features, positions, past=None, mask=None):
        _, cache = super().forward(token_ids, features, positions, past, mask)
        return torch.nn.functional.one_hot((token_ids + 1) % 12, 16) * 20.0, cache


def test_perfect_head_gains_the_whole_depth_and_the_targets_token():
    torch.manual_seed(0)
    token_ids = (torch.arange(5 + 1 + 4 * 8) % 12)[None]
    batch = HeldoutBatch(token_ids, torch.zeros(1, 38, 16), torch.tensor([5]), torch.tensor([38]))
    found = simulate(Oracle(SHAPE), torch.eye(12, 16), [batch], TreeShape(7, 4, 16))
    assert found.num_rounds == 4
    assert found.accepted_length == 8
    assert found.accepted_by_depth == [1.0] * 7
    shallow = simulate(Oracle(SHAPE), torch.eye(12, 16), [batch], TreeShape(7, 4, 3))
    assert shallow.accepted_by_depth[:3] == [1.0, 1.0, 0.0], "two rows beside the root"
