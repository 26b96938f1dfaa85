"""Batches over conversations of which the chat template refuses some."""

import pytest
from datasets import Dataset

from polybasic.train.batches import BatchStream
from polybasic.train.chat import RefusedConversation
from tests.checkpoints import byte_level_tokenizer

PICKY = (
    "{% for message in messages %}"
    "{% if 'FORBIDDEN' in message.content %}{{ raise_exception('not this one') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


FORBIDDEN_LETTER = byte_level_tokenizer().convert_tokens_to_ids("F")
"""Only refused conversations have it."""


def stream(*questions: str) -> BatchStream:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = PICKY
    rows = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": "yes"}]
        for question in questions
    ]
    return BatchStream(Dataset.from_dict({"messages": rows}), tokenizer, 2, 64, seed=0)


def test_a_refused_conversation_is_left_out_and_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    batches = stream("is it so?", "FORBIDDEN?", "why?")
    for step in range(24):
        batch = batches.batch(step)
        assert batch.is_assistant.any(dim=1).all()
        forbidden = batch.token_ids[batch.token_ids == FORBIDDEN_LETTER]
        assert not len(forbidden)
    told = capsys.readouterr().err
    assert told.count("conversations that the chat template refuses are left out") == 1
    assert "not this one" in told


def test_a_template_that_refuses_all_stops_the_run() -> None:
    with pytest.raises(RefusedConversation, match="not this one"):
        stream("FORBIDDEN", "also FORBIDDEN").batch(0)
