"""Held-out answers: judged right exactly where greedy decoding writes them, and their loss."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from polybasic.train.data.tokenizer import train_tokenizer
from polybasic.train.heldout_answers import measure_answers

CONVERSATIONS: list[dict[str, Any]] = [
    {
        "task": "colours",
        "messages": [
            {"role": "user", "content": "Which colour?"},
            {"role": "assistant", "content": "red"},
            {"role": "user", "content": "And now?"},
            {"role": "assistant", "content": "blue and green"},
        ],
    },
    {
        "messages": [
            {"role": "user", "content": "A number, please."},
            {"role": "assistant", "content": "seven"},
        ],
    },
]


class Parrot:
    """Is sure of the next token of the text that it is given, but for some tokens."""

    def __init__(self, unknown: set[int]) -> None:
        self.unknown = unknown

    def __call__(self, input_ids: Tensor, use_cache: bool) -> Any:
        del use_cache
        following = input_ids.roll(-1, dims=1)
        logits = 20.0 * torch.nn.functional.one_hot(following, 600).float()
        for token_id in self.unknown:
            logits[following == token_id] = 0.0
            logits[following == token_id, 599] = 1.0
        return SimpleNamespace(logits=logits)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([row["messages"] for row in CONVERSATIONS], 600, 128)


def measured(tokenizer: PreTrainedTokenizerFast, *unknown: str) -> dict[str, Any]:
    ids = {tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in unknown}
    model: Any = Parrot(ids)
    return measure_answers(model, tokenizer, CONVERSATIONS, 128)


def test_all_answers_are_right(tokenizer: PreTrainedTokenizerFast) -> None:
    found = measured(tokenizer)
    assert found["right_answers_by_task"] == {"colours": 1.0, "other": 1.0}
    assert (found["right_answers"], found["num_answers"]) == (1.0, 3)
    assert found["heldout_loss"] == found["heldout_answer_loss"] == pytest.approx(0, abs=1e-3)


def test_one_wrong_token_makes_an_answer_wrong(tokenizer: PreTrainedTokenizerFast) -> None:
    found = measured(tokenizer, " and")  # inside of one answer of two; no prompt has it
    assert found["right_answers_by_task"] == {"colours": 0.5, "other": 1.0}
    assert found["right_tokens_by_task"]["other"] == 1.0
    assert 0.5 < found["right_tokens_by_task"]["colours"] < found["right_tokens"] < 1.0
    assert found["heldout_answer_loss"] > found["heldout_loss"] > 0.1


def test_what_the_user_writes_is_not_judged(tokenizer: PreTrainedTokenizerFast) -> None:
    found = measured(tokenizer, "Which")
    assert found["right_answers"] == 1.0
    assert found["heldout_loss"] > 0.1 > found["heldout_answer_loss"]


def test_an_end_of_turn_belongs_to_the_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    assert measured(tokenizer, tokenizer.eos_token)["right_answers"] == 0.0


def test_of_nothing_there_is_nothing_to_say(tokenizer: PreTrainedTokenizerFast) -> None:
    model: Any = Parrot(set())
    assert measure_answers(model, tokenizer, [], 128) == {}
