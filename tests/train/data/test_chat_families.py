"""Assistant masks under the chat templates that the families' own checkpoints ship.

Most are read from trl, which stores them as published, some beside a version that marks the
assistant's text with {% generation %}. Those of Llama 2, Vicuna and Mistral are written here from
the documented formats.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from polybasic.train.data.chat import (
    RefusedConversation,
    check_chat_template,
    encode_conversation,
    encode_prompt,
)
from tests.checkpoints import gemma_tokenizer, sentencepiece_tokenizer

# [INST] <<SYS>> of the first user turn, each round between its own <s> and </s>, contents trimmed:
# chat_completion in https://github.com/meta-llama/llama/blob/main/llama/generation.py
LLAMA2 = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set turns = messages[1:] if system else messages %}"
    "{% for turn in turns %}"
    "{% if (turn.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate: user, assistant, ...') }}{% endif %}"
    "{% if turn.role == 'user' %}{{ bos_token + '[INST] ' }}"
    "{% if loop.first and system %}{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}"
    "{{ turn.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + turn.content | trim + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
# ADD_COLON_TWO with " " and "</s>" as separators, vicuna_v1.1:
# https://github.com/lm-sys/FastChat/blob/main/fastchat/conversation.py
VICUNA = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + ' ' }}"
    "{% set messages = messages[1:] %}{% else %}{{ 'A user talks with an assistant. ' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{{ 'USER: ' + message.content + ' ' }}"
    "{% elif message.role == 'assistant' %}{{ 'ASSISTANT: ' + message.content + eos_token }}"
    "{% else %}{{ raise_exception('unknown role') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# one <s> alone, each answer closed by </s>: "Instruction format" of the model card
# https://huggingface.co/mistralai/Mistral-7B-Instruct-v0.2
MISTRAL = (
    "{{ bos_token }}"
    "{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% set turns = messages[1:] if system else messages %}"
    "{% for turn in turns %}"
    "{% if (turn.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate: user, assistant, ...') }}{% endif %}"
    "{% if turn.role == 'user' %}"
    "{{ '[INST] ' + (system if loop.first else '') + turn.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + turn.content + eos_token }}{% endif %}"
    "{% endfor %}"
)

SYSTEM = [{"role": "system", "content": "Be brief."}]
ROUND = [
    {"role": "user", "content": " Say hello, Größe — 你好! "},
    {"role": "assistant", "content": " \nHello, Größe — 你好!\n "},
]
ROUNDS = [
    *ROUND,
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": ""},
]


def stored(name: str) -> str:
    """A template of trl's; the package itself is not imported."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return (folder / f"{name}.jinja").read_text("utf-8")


def byte_level(
    bos: str | None, eos: str, *controls: str, rstrip: bool = False
) -> PreTrainedTokenizerBase:
    """A byte-level BPE with control tokens; with `rstrip` they swallow white space, as Phi-3's."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["Hello, say hello again and again."], trainer)
    names = [name for name in (bos, eos, *controls) if name is not None]
    inner.add_special_tokens(
        [AddedToken(name, rstrip=rstrip and name in controls, normalized=False) for name in names]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token=eos)


def llama3() -> PreTrainedTokenizerBase:
    controls = ("<|start_header_id|>", "<|end_header_id|>")
    return byte_level("<|begin_of_text|>", "<|eot_id|>", *controls)


def qwen() -> PreTrainedTokenizerBase:
    return byte_level(None, "<|im_end|>", "<|im_start|>", "<think>", "</think>")


def phi3() -> PreTrainedTokenizerBase:
    controls = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    return byte_level("<s>", "<|endoftext|>", *controls, rstrip=True)


@dataclass(frozen=True)
class Format:
    """How a family writes conversations.

    Attributes:
        template: its chat template.
        tokenizer: with its control tokens.
        before: what the assistant writes before its content.
        after: what ends its turn.
        last_before: as `before`, for the last message.
        last_after: as `after`, for the last message.
        content: what it makes of contents.
        takes_system: system turns are rendered.
    """

    template: str
    tokenizer: Callable[[], PreTrainedTokenizerBase]
    before: str = ""
    after: str = ""
    last_before: str | None = None
    last_after: str | None = None
    content: Callable[[str], str] = str
    takes_system: bool = True

    def turns(self, messages: list[dict[str, str]]) -> list[str]:
        """What the assistant wrote, turn by turn."""
        contents = [each["content"] for each in messages if each["role"] == "assistant"]
        contents = [self.content(content) for content in contents]
        turns = [self.before + content + self.after for content in contents]
        before = self.before if self.last_before is None else self.last_before
        after = self.after if self.last_after is None else self.last_after
        return [*turns[:-1], before + contents[-1] + after]


FORMATS = {
    "llama2": Format(LLAMA2, sentencepiece_tokenizer, " ", " </s>", content=str.strip),
    "vicuna": Format(VICUNA, sentencepiece_tokenizer, " ", "</s>"),
    "mistral": Format(MISTRAL, sentencepiece_tokenizer, " ", "</s>"),
    "llama3": Format(stored("llama3"), llama3, after="<|eot_id|>", content=str.strip),
    "llama3.1": Format(stored("llama3_1"), llama3, after="<|eot_id|>", content=str.strip),
    "llama3.2": Format(stored("llama3_2"), llama3, after="<|eot_id|>", content=str.strip),
    "qwen2.5": Format(stored("qwen2_5"), qwen, after="<|im_end|>\n"),
    "qwen3": Format(
        stored("qwen3"), qwen, after="<|im_end|>\n", last_before="<think>\n\n</think>\n\n"
    ),
    "qwen3-2507": Format(stored("qwen3_instruct_2507"), qwen, after="<|im_end|>\n"),
    "phi3": Format(
        stored("phi3"),
        phi3,
        after="<|end|>\n",
        last_after="<|end|>\n<|endoftext|>",
        content=str.lstrip,
    ),
    "phi3.5": Format(
        stored("phi3_5"),
        phi3,
        after="<|end|>\n",
        last_after="<|end|>\n<|endoftext|>",
        content=str.lstrip,
    ),
    "gemma": Format(
        stored("gemma"),
        gemma_tokenizer,
        after="<end_of_turn>\n",
        content=str.strip,
        takes_system=False,
    ),
    "gemma3": Format(stored("gemma3"), gemma_tokenizer, after="<end_of_turn>\n", content=str.strip),
}
# what is rendered alike by a template and by its version with marks; Qwen3's marks an empty
# thought in each turn, so that only a single round is the same text
MARKED = {
    "llama3": ("llama3_training", ROUNDS),
    "qwen2.5": ("qwen2_5_training", ROUNDS),
    "qwen3": ("qwen3_training", ROUND),
    "qwen3-2507": ("qwen3_instruct_2507_training", ROUNDS),
    "phi3": ("phi3_training", ROUNDS),
    "phi3.5": ("phi3_5_training", ROUNDS),
    "gemma": ("gemma_training", ROUNDS),
    "gemma3": ("gemma3_training", ROUNDS),
}


@pytest.fixture
def tokenizer(family: str) -> PreTrainedTokenizerBase:
    made = FORMATS[family].tokenizer()
    made.chat_template = FORMATS[family].template
    return made


def assistant_runs(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> list[tuple[int, str]]:
    """Each run of the assistant's tokens: where it starts, and the text that it covers."""
    encoded = encode_conversation(tokenizer, messages, 4096)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert encoded.input_ids == whole["input_ids"]
    runs = []
    for is_assistant, group in groupby(
        range(len(encoded.input_ids)), key=lambda index: encoded.is_assistant[index]
    ):
        if is_assistant:
            indices = list(group)
            first, last = whole["offset_mapping"][indices[0]], whole["offset_mapping"][indices[-1]]
            runs.append((indices[0], text[first[0] : last[1]]))
    return runs


@pytest.mark.parametrize("system", [[], SYSTEM], ids=["plain", "system"])
@pytest.mark.parametrize("messages", [ROUND, ROUNDS], ids=["one", "three"])
@pytest.mark.parametrize("family", FORMATS)
def test_masks_cover_the_answers_with_their_ends(
    family: str,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    system: list[dict[str, str]],
) -> None:
    check_chat_template(tokenizer)
    if system and not FORMATS[family].takes_system:
        with pytest.raises(RefusedConversation, match=r"rejects the messages: .*System role not"):
            encode_conversation(tokenizer, system + messages, 4096)
        return
    found = [text for _, text in assistant_runs(tokenizer, system + messages)]
    assert found == FORMATS[family].turns(messages)


@pytest.mark.parametrize("family", FORMATS)
def test_turns_start_where_serving_starts_them(
    family: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    encoded = encode_conversation(tokenizer, ROUNDS, 4096)
    starts = [start for start, _ in assistant_runs(tokenizer, ROUNDS)]
    for index, start in zip((1, 3, 5), starts, strict=True):
        prompt = encode_prompt(tokenizer, ROUNDS[:index])
        served = tokenizer.apply_chat_template(ROUNDS[:index], add_generation_prompt=True)
        assert prompt == served["input_ids"] == encoded.input_ids[:start]


@pytest.mark.parametrize("family", FORMATS)
def test_no_start_token_is_added_to_the_templates_own(
    family: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    num_written = int("bos_token" in FORMATS[family].template)
    input_ids = encode_conversation(tokenizer, ROUND, 4096).input_ids
    bos_token_id = tokenizer.bos_token_id
    assert input_ids.count(bos_token_id) == encode_prompt(tokenizer, ROUND[:1]).count(bos_token_id)
    assert input_ids.count(bos_token_id) == num_written


@pytest.mark.parametrize("family", MARKED)
def test_masks_are_those_of_the_same_template_with_marks(
    family: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    name, messages = MARKED[family]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    unmarked = encode_conversation(tokenizer, messages, 4096)
    runs = [run for _, run in assistant_runs(tokenizer, messages)]
    tokenizer.chat_template = stored(name)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text
    if family == "qwen2.5":
        # its marks begin before the line break that ends the prompt
        marked_runs = [run for _, run in assistant_runs(tokenizer, messages)]
        assert marked_runs == ["\n" + run for run in runs]
    else:
        assert encode_conversation(tokenizer, messages, 4096) == unmarked
    check_chat_template(tokenizer)


@pytest.mark.parametrize("family", ["qwen3"])
def test_thoughts_count_where_they_are_rendered(
    family: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    thinking = {"role": "assistant", "content": "<think>\nfirst this\n</think>\n\nHello"}
    [run] = assistant_runs(tokenizer, [ROUND[0], thinking])
    assert run[1] == thinking["content"] + "<|im_end|>\n"
    # of an earlier turn the template drops what the model would have thought
    with pytest.raises(RefusedConversation, match=r"message 2 of 6 \(its content is rewritten\)"):
        encode_conversation(tokenizer, [ROUND[0], thinking, *ROUNDS[2:]], 4096)


@pytest.mark.parametrize("family", ["llama2", "mistral", "gemma", "gemma3"])
def test_turns_that_do_not_alternate_are_rejected(
    family: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(RefusedConversation, match=r"rejects the messages: .*alternate"):
        encode_conversation(tokenizer, [ROUND[0], *ROUND], 4096)


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "qwen3_5_nothink", "nemotron_3_nano"])
def test_templates_whose_prompts_go_on_otherwise_are_refused(name: str) -> None:
    """Their prompts open a thought that answered turns do not show."""
    tokenizer = qwen()
    tokenizer.chat_template = stored(name)
    with pytest.raises(RefusedConversation, match=r"message 2 of 4 \(the text before it differs"):
        check_chat_template(tokenizer)
    tokenizer.chat_template = stored("qwen3")
    check_chat_template(tokenizer)
