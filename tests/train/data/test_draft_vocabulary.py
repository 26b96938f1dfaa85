"""The most frequent tokens of the assistant's answers."""

import pytest
import torch
from datasets import Dataset

from polybasic.chain.base.errors import UserError
from polybasic.train.data import draft_vocabulary
from polybasic.train.data.chat import encode_conversation
from polybasic.train.data.draft_vocabulary import (
    choose_draft_vocabulary,
    count_answer_tokens,
    coverage,
)
from polybasic.train.settings import DataSettings
from tests.checkpoints import byte_level_tokenizer

TEXTS = [("what is a bird", "a bird is a bird"), ("and rain", "rain is rain"), ("x", "a a a")]
ROWS = [
    {
        "id": str(number),
        "task": None,
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ],
    }
    for number, (question, answer) in enumerate(TEXTS)
]
DATA = DataSettings(max_tokens=400)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer()


def counted(tokenizer, rows=ROWS, data=DATA, seed=0):
    return count_answer_tokens(Dataset.from_list(rows), tokenizer, 320, data, seed)


def test_answers_alone_are_counted_with_the_end_of_each_turn(tokenizer):
    halves = counted(tokenizer)
    assert halves.shape == (2, 320)
    assert halves.any(dim=1).all()
    counts = halves.sum(dim=0)
    expected = torch.zeros(320, dtype=torch.long)
    for row in ROWS:
        encoded = encode_conversation(tokenizer, row["messages"], 400)
        for token_id, is_answer in zip(*encoded, strict=True):
            expected[token_id] += is_answer
    assert torch.equal(counts, expected)
    assert counts[tokenizer.eos_token_id] == 3
    (what,) = tokenizer.encode("w")
    assert counts[what] == 0, "a letter of a question"


def test_most_frequent_tokens_in_order_of_their_ids(tokenizer):
    counts = torch.tensor([[0, 5, 0, 0, 2, 3, 2, 0], [0, 0, 2, 0, 3, 4, 0, 0]])
    tokenizer = type("Tokenizer", (), {"eos_token_id": 3})()
    assert choose_draft_vocabulary(counts, tokenizer, 4).tolist() == [1, 3, 4, 5]
    assert choose_draft_vocabulary(counts, tokenizer, 5).tolist() == [1, 2, 3, 4, 5]
    tokenizer.eos_token_id = None
    assert choose_draft_vocabulary(counts, tokenizer, 4).tolist() == [1, 2, 4, 5]
    assert choose_draft_vocabulary(counts, tokenizer, 8).tolist() == list(range(8))
    with pytest.raises(UserError, match=r"train.draft_vocab_size = 9, the target has 8 tokens"):
        choose_draft_vocabulary(counts, tokenizer, 9)


def test_coverage_is_the_share_of_tokens():
    counts = torch.tensor([[1, 2, 2, 0], [0, 3, 0, 0]])
    assert coverage(counts, torch.tensor([1, 3])) == 5 / 8
    assert coverage(counts, torch.arange(4)) == 1.0


def test_a_draw_of_conversations_is_a_function_of_the_seed(tokenizer, monkeypatch):
    monkeypatch.setattr(draft_vocabulary, "MAX_CONVERSATIONS", 1)
    draws = [counted(tokenizer, seed=seed) for seed in range(8)]
    assert torch.equal(draws[0], counted(tokenizer))
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) > 1
    alone = [counted(tokenizer, [row]) for row in ROWS]
    assert all(any(torch.equal(draw, each) for each in alone) for draw in draws)


def test_answers_that_are_cut_off_are_an_error(tokenizer):
    silent = [
        {**ROWS[0], "messages": [{"role": "user", "content": "a " * 40}, ROWS[0]["messages"][1]]}
    ]
    with pytest.raises(UserError, match=r"1 conversations cut at data.max_tokens = 16"):
        counted(tokenizer, silent, DataSettings(max_tokens=16))


def test_a_share_is_covered_of_answers_that_were_not_counted(monkeypatch):
    tokenizer = type("Tokenizer", (), {"eos_token_id": None})()
    # the order of one half is 5, 1, 2, 0, 3; of the other it covers 4, 7, 8, 9 and 10 of 10
    counts = torch.tensor([[0, 3, 2, 0, 0, 9], [1, 3, 1, 1, 0, 4]])
    monkeypatch.setattr(draft_vocabulary, "MULTIPLE", 1)
    for share, expected in (
        (0.4, [5]),
        (0.41, [1, 5]),
        (0.8, [1, 2, 5]),
        (0.9, [0, 1, 2, 5]),
        (0.91, [0, 1, 2, 3, 5]),
    ):
        assert choose_draft_vocabulary(counts, tokenizer, share).tolist() == expected
    monkeypatch.setattr(draft_vocabulary, "MULTIPLE", 4)
    assert choose_draft_vocabulary(counts, tokenizer, 0.4).tolist() == [0, 1, 2, 5]
    assert choose_draft_vocabulary(counts, tokenizer, 0.91).tolist() == [0, 1, 2, 3, 4, 5]
