"""The tokenizer that is trained beside a scratch target."""

from pathlib import Path

import jinja2
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from polybasic.train.data.tokenizer import BEGIN, END, PAD, ROLE_TOKENS, train_tokenizer

MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "How many apples are 12 + 7?"},
    {"role": "assistant", "content": "12 + 7 = 19 apples."},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "content": "You are welcome."},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([MESSAGES] * 3, vocab_size=400, context_tokens=128)


@pytest.mark.parametrize(
    "text",
    [
        "plain words",
        "Grüße aus Köln",
        "你好，世界",
        "🎉 tab\tnew\nline  two  spaces ",
        "\x00\x7f",
        " ",
    ],
)
def test_any_text_comes_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


def test_digits_stand_alone() -> None:
    messages = [{"role": "user", "content": "2024 apples in 2024"}]
    tokenizer = train_tokenizer([messages] * 3, vocab_size=400, context_tokens=128)
    tokens = [tokenizer.decode([token]) for token in tokenizer.encode("2024 apples in 2024")]
    assert tokens == ["2", "0", "2", "4", " apples", " in", " 2", "0", "2", "4"]


def test_vocabulary_is_bounded_and_ends_turns_with_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) <= 400
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == (PAD, BEGIN, END)
    assert tokenizer.model_max_length == 128
    specials = [PAD, BEGIN, END, *ROLE_TOKENS.values()]
    assert [tokenizer.encode(token) for token in specials] == [[index] for index in range(6)]


def test_template_by_hand(tokenizer: PreTrainedTokenizerFast) -> None:
    text = tokenizer.apply_chat_template(MESSAGES[:2], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin|><|system|>You are a helpful assistant.<|end|>"
        "<|user|>How many apples are 12 + 7?<|end|><|assistant|>"
    )


def test_prompt_is_a_prefix_of_the_conversation(tokenizer: PreTrainedTokenizerFast) -> None:
    whole = tokenizer.apply_chat_template(MESSAGES, return_dict=False)
    for num_messages in (2, 4):
        prompt = tokenizer.apply_chat_template(
            MESSAGES[:num_messages], add_generation_prompt=True, return_dict=False
        )
        assert whole[: len(prompt)] == prompt
        assert len(prompt) < len(whole)


def test_assistant_mask_covers_answers_and_their_end(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = tokenizer.apply_chat_template(
        MESSAGES, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = list(zip(encoded["input_ids"], encoded["assistant_masks"], strict=True))
    assert tokenizer.decode([token for token, is_assistant in pairs if is_assistant]) == (
        "12 + 7 = 19 apples.<|end|>You are welcome.<|end|>"
    )


def test_unknown_role_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(jinja2.TemplateError, match="unknown role tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])


def test_saved_tokenizer_is_the_same(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.is_fast
    assert loaded.apply_chat_template(MESSAGES, return_dict=False) == (
        tokenizer.apply_chat_template(MESSAGES, return_dict=False)
    )
    assert loaded.eos_token == END


def test_training_is_deterministic() -> None:
    first, second = (train_tokenizer([MESSAGES] * 3, 350, 64).get_vocab() for _ in range(2))
    assert first == second
