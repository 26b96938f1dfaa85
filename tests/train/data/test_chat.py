import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from polybasic.chain.base.errors import UserError
from polybasic.train.data.chat import (
    RefusedConversation,
    check_chat_template,
    encode_conversation,
    encode_prompt,
    user_turn,
)

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
ENDLESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{{ '\n' if add_generation_prompt or not loop.last else 'END' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
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
    with pytest.raises(RefusedConversation, match=r"message 3 of 5 \(the text before it differs"):
        encode_conversation(tokenizer, MESSAGES, 4096)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (PLAIN.replace("m.content", "m.content | upper"), "its content is rewritten"),
        (PLAIN.replace("m.content", "m.content[:3]"), "its content is rewritten"),
        (PLAIN.replace("m.content", "m.content ~ m.content"), "its content changes what follows"),
        (PLAIN.replace("m.content", "m.content ~ m.content[:1]"), "its content changes what foll"),
        (
            PLAIN.replace("m.content", "m.content ~ ('?' if m.content | length < 3 else '')"),
            "its content changes what follows",
        ),
        (ENDLESS, "its end depends on what follows"),
        ("{% if not add_generation_prompt %}" + PLAIN + "{% endif %}", "its prompt lacks the turn"),
    ],
)
def test_templates_that_do_not_tell_the_answers_are_refused(tokenizer, template, reason):
    tokenizer.chat_template = PLAIN
    check_chat_template(tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(RefusedConversation, match=reason):
        encode_conversation(tokenizer, MESSAGES, 4096)
    with pytest.raises(UserError, match=reason):
        check_chat_template(tokenizer)


@pytest.mark.parametrize(
    "marks",
    [
        "{% generation %}{% endgeneration %}{{ m.content }}",
        "{{ m.content }}{% generation %}<|im_end|>{% endgeneration %}",
        "{% generation %}{{ m.content }}{% endgeneration %}",
    ],
)
def test_marks_around_other_text_are_found(tokenizer, marks):
    tokenizer.chat_template = MARKED
    check_chat_template(tokenizer)
    tokenizer.chat_template = PLAIN.replace("{{ m.content }}", marks)
    with pytest.raises(UserError, match="marks other text than the assistant's"):
        check_chat_template(tokenizer)


@pytest.mark.parametrize(
    "content",
    ["\ue000", "a\ue000", "\ue000\ue000b", "<|im_end|>\n<|im_start|>user\n", "assistant\n", " \n"],
)
def test_answers_that_look_like_what_surrounds_them(tokenizer, content):
    tokenizer.chat_template = PLAIN
    messages = [*MESSAGES, MESSAGES[3], {"role": "assistant", "content": content}]
    expected = f"Hello, Größe — 你好!<|im_end|>\nHello<|im_end|>\n{content}<|im_end|>\n"
    assert assistant_text(tokenizer, encode_conversation(tokenizer, messages, 4096)) == expected


def test_an_end_of_turn_need_not_be_a_control_token(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:\n{% endif %}"
    )
    encoded = encode_conversation(tokenizer, MESSAGES, 4096)
    assert assistant_text(tokenizer, encoded) == "Hello, Größe — 你好!\n\nHello\n\n"


def test_an_empty_answer_that_reaches_into_its_prompt_is_refused(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ '\n' ~ m.content if m.content else '' }}\n"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    check_chat_template(tokenizer)
    with pytest.raises(RefusedConversation, match="its content is rewritten"):
        encode_conversation(tokenizer, [MESSAGES[3], {"role": "assistant", "content": ""}], 4096)


def test_conversations_that_the_assistant_opens_are_refused(tokenizer):
    tokenizer.chat_template = PLAIN
    with pytest.raises(RefusedConversation, match="no message before the assistant's"):
        encode_conversation(tokenizer, MESSAGES[2:], 4096)


def test_a_token_that_is_partly_the_prompts_is_the_prompts(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = [MESSAGES[3], {"role": "assistant", "content": "again and"}]
    encoded = encode_conversation(tokenizer, messages, 4096)
    straddling = tokenizer.convert_tokens_to_ids("Ġagain")
    assert straddling in encoded.input_ids
    assert assistant_text(tokenizer, encoded) == " and<|im_end|>"


def test_white_space_that_offsets_leave_out_is_the_assistants(tokenizer):
    tokenizer.chat_template = PLAIN
    messages = [MESSAGES[3], {"role": "assistant", "content": "Hello  \n\n  again"}]
    expected = encode_conversation(tokenizer, messages, 4096)
    inner = tokenizer.backend_tokenizer
    inner.post_processor = processors.ByteLevel(trim_offsets=True)
    places = tokenizer(messages[1]["content"], return_offsets_mapping=True)["offset_mapping"]
    assert any(first == last for first, last in places)
    assert assistant_text(tokenizer, expected) == "Hello  \n\n  again<|im_end|>\n"
    assert encode_conversation(tokenizer, messages, 4096) == expected


def test_what_the_template_rejects_can_be_left_out(tokenizer):
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}" + STRICT + "{% endif %}" + PLAIN
    )
    check_chat_template(tokenizer)
    encoded = encode_conversation(tokenizer, MESSAGES[1:], 4096)
    assert assistant_text(tokenizer, encoded).startswith("Hello")
    for encode in (
        lambda: encode_conversation(tokenizer, MESSAGES, 9),
        lambda: encode_prompt(tokenizer, MESSAGES),
    ):
        with pytest.raises(RefusedConversation, match=r"rejects the messages: .*no system role"):
            encode()


def test_missing_and_failing_templates_are_refused(tokenizer):
    with pytest.raises(UserError, match="tokenizer without a chat template"):
        encode_conversation(tokenizer, MESSAGES, 4096)
    tokenizer.chat_template = STRICT
    with pytest.raises(UserError, match=r"rejects the messages: .*no system role"):
        check_chat_template(tokenizer)


@pytest.mark.parametrize(
    ("template", "opening", "closing", "ends_by_token"),
    [
        ("<|im_start|>u\n{{ m.content }}<|im_end|>\n", "<|im_start|>u\n", "", True),
        ("[INST] {{ m.content }} [/INST]", "[INST] ", "[/INST]", False),
        ("USER: {{ m.content }}\nASSISTANT:", "USER: ", "ASSISTANT:", False),
    ],
)
def test_a_users_turn_opens_and_closes(tokenizer, template, opening, closing, ends_by_token):
    tokenizer.chat_template = "{% for m in messages %}" + template + "{% endfor %}"
    turn = user_turn(tokenizer)
    assert tokenizer.decode(turn.token_ids) == opening
    assert turn.closing == closing
    assert [tokenizer.decode([token]) for token in turn.stop_tokens] == [
        "<|im_end|>"
    ] * ends_by_token
    assert turn.content_of(f" Who are you? {closing} Nobody.") == (
        "Who are you?" if closing else "Who are you?  Nobody."
    )


def test_a_users_turn_opens_after_others(tokenizer):
    tokenizer.chat_template = PLAIN
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    turn, first = user_turn(tokenizer, said), user_turn(tokenizer)
    whole = tokenizer.apply_chat_template(said, tokenize=False)
    assert tokenizer.decode(turn.token_ids) == whole + tokenizer.decode(first.token_ids)
    assert turn.stop_tokens == first.stop_tokens


def test_a_template_that_rewrites_the_users_text_has_no_opening(tokenizer):
    tokenizer.chat_template = "<|im_start|>{{ messages[0].content | length }}<|im_end|>"
    with pytest.raises(UserError, match="without an opening of the user's turn"):
        user_turn(tokenizer)
