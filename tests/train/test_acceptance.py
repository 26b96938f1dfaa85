"""Answers in batches against one token at a time; rounds in batches against one by one."""

import json

import pytest
import torch

from polybasic.chain.errors import UserError
from polybasic.train.acceptance import HeldoutBatch, TreeShape, heldout_batches, simulate
from polybasic.train.chat import encode_prompt
from polybasic.train.head import DraftHead, HeadShape
from polybasic.train.target import LmHead, load_target
from tests.checkpoints import write_family

SHAPE = HeadShape(
    vocab_size=12,
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope={"rope_type": "default", "rope_theta": 100.0},
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
    log_probabilities = lm_head(output).log_softmax(-1)
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


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("tree", [TreeShape(3, 3, 6), TreeShape(4, 2, 16), TreeShape(1, 4, 3)])
def test_simulation_equals_rounds_played_one_by_one(tree, softcap):
    torch.manual_seed(0)
    head = PathHead(SHAPE).double()
    for parameter in head.parameters():
        parameter.requires_grad_(False).mul_(3.0)
    lm_head = LmHead(torch.randn(12, 16, dtype=torch.double), softcap)
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
    found = simulate(Oracle(SHAPE), LmHead(torch.eye(12, 16)), [batch], TreeShape(7, 4, 16))
    assert found.num_rounds == 4
    assert found.accepted_length == 8
    assert found.accepted_by_depth == [1.0] * 7
    shallow = simulate(Oracle(SHAPE), LmHead(torch.eye(12, 16)), [batch], TreeShape(7, 4, 3))
    assert shallow.accepted_by_depth[:3] == [1.0, 1.0, 0.0], "two rows beside the root"


QUESTIONS = ["hi", "the rain in the north is old", "a hat, or the hat that is on the train?"]
CONVERSATIONS = [
    {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "it is"},
        ]
    }
    for question in QUESTIONS
]
ANSWER_TOKENS = 30
"""With the longest prompt more than the families' sliding window of 24."""


def target_of(folder, family, generation_config=None, **changes):
    write_family(folder, family, dtype=torch.float32, **changes)
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if generation_config is not None:
        path.write_text(json.dumps(generation_config))
    return load_target(folder, torch.device("cpu"))


@torch.no_grad()
def answered_alone(target, ends):
    """Prompt and greedy answer of each question, every token from a pass over all before it."""
    sequences = []
    for row in CONVERSATIONS:
        tokens = encode_prompt(target.tokenizer, row["messages"][:1])
        for _ in range(ANSWER_TOKENS):
            logits = target.model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
            if tokens[-1] in ends:
                break
        sequences.append(tokens)
    return sorted(sequences, key=len)


def answered_together(target):
    (batch,) = heldout_batches(target, CONVERSATIONS, 200, ANSWER_TOKENS)
    sequences = [
        row[:length].tolist() for row, length in zip(batch.token_ids, batch.lengths, strict=True)
    ]
    return sorted(sequences, key=len), batch


SAMPLED = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "repetition_penalty": 1.5,
    "max_length": 12,
}


@pytest.mark.parametrize("family", ["llama3", "mistral", "phi3", "gemma2", "gemma3"])
def test_answers_in_a_batch_are_those_of_each_prompt_alone(family, tmp_path):
    target = target_of(tmp_path / family, family, {**SAMPLED, "eos_token_id": [700, 701]})
    ends = {700, 701, target.tokenizer.eos_token_id}
    found, batch = answered_together(target)
    assert found == answered_alone(target, ends)
    assert target.model.generation_config.repetition_penalty == 1.5, "left as it was"
    for row, length in enumerate(batch.lengths):
        alone = target.features(batch.token_ids[row : row + 1, :length])
        torch.testing.assert_close(batch.features[row, :length], alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("where", ["generation config", "config", "tokenizer"])
def test_answers_end_at_each_end_token_wherever_it_is_named(where, tmp_path):
    endless = target_of(tmp_path / "endless", "llama3", {"eos_token_id": None}, eos_token_id=None)
    endless.tokenizer.eos_token = None
    whole, batch = answered_together(endless)
    assert (batch.lengths - batch.prompt_lengths).tolist() == [ANSWER_TOKENS] * 3
    stop = whole[0][-ANSWER_TOKENS + 4]  # among the first tokens of the shortest prompt's answer
    own = {"generation config": {"eos_token_id": [700, stop]}}.get(where, {})
    changes = {"eos_token_id": [stop, 701] if where == "config" else None}
    target = target_of(tmp_path / "ending", "llama3", own, **changes)
    target.tokenizer.eos_token = None
    if where == "tokenizer":
        target.tokenizer.eos_token = target.tokenizer.convert_ids_to_tokens(stop)
    found, batch = answered_together(target)
    assert found == answered_alone(target, {stop})
    shortest = int((batch.lengths - batch.prompt_lengths).min())
    assert shortest <= 5
    assert stop in found[0][-shortest:]


def test_answers_without_two_tokens_are_refused(tmp_path):
    target = target_of(tmp_path / "silent", "llama3")
    with pytest.raises(UserError, match=r"nothing to evaluate on: 3 held-out prompts"):
        heldout_batches(target, CONVERSATIONS, 200, 1)
    with pytest.raises(UserError, match=r"nothing to evaluate on: 0 held-out prompts"):
        heldout_batches(target, CONVERSATIONS, 3, 10)
