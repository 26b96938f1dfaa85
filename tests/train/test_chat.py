import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from polybasic.chain.errors import UserError
from polybasic.train.chat import encode_conversation, encode_prompt

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{%- generation -%}{{ m.content }}<|im_end|>{%- endgeneration -%}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content | upper }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = "{{ raise_exception('no system role') }}"

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say hello, Größe — 你好!"},
    {"role": "assistant", "content": "Hello, Größe — 你好!"},
    {"role": "user", "content": "Again"},
    {"role": "assistant", "content": "Hello"},
]


@pytest.fixture
def tokenizer():
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["Hello, say hello again and again."], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")


def assistant_text(tokenizer, encoded):
    picked = [
        token
        for token, is_assistant in zip(encoded.input_ids, encoded.is_assistant, strict=True)
        if is_assistant
    ]
    return tokenizer.decode(picked)


def test_generation_marks_give_answers_with_their_end(tokenizer):
    tokenizer.chat_template = MARKED
    encoded = encode_conversation(tokenizer, MESSAGES, 4096)
    assert assistant_text(tokenizer, encoded) == "Hello, Größe — 你好!<|im_end|>Hello<|im_end|>"
    assert encoded.input_ids == tokenizer.apply_chat_template(MESSAGES)["input_ids"]


def test_prefix_differences_agree_with_marks_but_for_the_text_after_the_end(tokenizer):
    tokenizer.chat_template = MARKED
    marked = encode_conversation(tokenizer, MESSAGES, 4096)
    tokenizer.chat_template = PLAIN
    plain = encode_conversation(tokenizer, MESSAGES, 4096)
    assert plain.input_ids == marked.input_ids
    text = assistant_text(tokenizer, plain)
    assert text == "Hello, Größe — 你好!<|im_end|>\nHello<|im_end|>\n"


def test_prompt_is_where_the_answer_starts(tokenizer):
    tokenizer.chat_template = PLAIN
    prompt = encode_prompt(tokenizer, MESSAGES[:2])
    encoded = encode_conversation(tokenizer, MESSAGES, 4096)
    assert encoded.input_ids[: len(prompt)] == prompt
    assert encoded.is_assistant.index(True) == len(prompt)


def test_long_conversations_are_cut(tokenizer):
    tokenizer.chat_template = MARKED
    whole = encode_conversation(tokenizer, MESSAGES, 4096)
    cut = encode_conversation(tokenizer, MESSAGES, 20)
    assert cut.input_ids == whole.input_ids[:20]
    assert cut.is_assistant == whole.is_assistant[:20]


def test_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(UserError, match=r"rewrites earlier turns: .* message 3 of 5"):
        encode_conversation(tokenizer, MESSAGES, 4096)


def test_missing_and_failing_templates_are_refused(tokenizer):
    with pytest.raises(UserError, match="tokenizer without a chat template"):
        encode_conversation(tokenizer, MESSAGES, 4096)
    tokenizer.chat_template = STRICT
    with pytest.raises(UserError, match=r"rejects the messages: .*no system role"):
        encode_conversation(tokenizer, MESSAGES, 4096)
