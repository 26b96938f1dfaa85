"""A conversation as token ids, and which of them the assistant wrote."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase

from polybasic.chain.errors import UserError

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class EncodedConversation(NamedTuple):
    """Token ids and, beside each, whether it is the assistant's (its end of turn included)."""

    input_ids: list[int]
    is_assistant: list[bool]


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], max_tokens: int
) -> EncodedConversation:
    """Encode by the tokenizer's own chat template, cut to `max_tokens`.

    The assistant's tokens are those between `{% generation %}` and `{% endgeneration %}` where
    the template has them. Otherwise they are the text that each answer adds to the prompt
    before it, which is refused where a prompt is not a prefix of what follows.

    Raises:
        UserError: no chat template, one that rejects the messages or that rewrites earlier turns,
            or a tokenizer without character offsets.
    """
    template = chat_template(tokenizer)
    if not tokenizer.is_fast:
        raise UserError(
            "tokenizer without character offsets",
            tokenizer.name_or_path,
            "save it as a fast tokenizer (tokenizer.json)",
        )
    if _GENERATION.search(template):
        encoded = _render(
            tokenizer, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        input_ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    else:
        input_ids, mask = _by_prefixes(tokenizer, list(messages))
    return EncodedConversation(
        list(input_ids[:max_tokens]), [bool(value) for value in mask[:max_tokens]]
    )


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]
) -> list[int]:
    """Token ids of `messages` with the template's opening of the assistant's next turn.

    Raises:
        UserError: no chat template, or one that rejects the messages.
    """
    chat_template(tokenizer)
    text = _render(tokenizer, messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's default chat template.

    Raises:
        UserError: it has none.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise UserError(
            "tokenizer without a chat template",
            tokenizer.name_or_path or type(tokenizer).__name__,
            "add chat_template.jinja to the target's folder, or use a chat model",
        )
    return template


def _by_prefixes(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> tuple[list[int], list[bool]]:
    text = _render(tokenizer, messages, tokenize=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = _render(
                tokenizer, messages[:index], tokenize=False, add_generation_prompt=True
            )
            answered = _render(tokenizer, messages[: index + 1], tokenize=False)
            if not (answered.startswith(prompt) and text.startswith(answered)):
                raise UserError(
                    "chat template rewrites earlier turns",
                    f"{tokenizer.name_or_path}, message {index + 1} of {len(messages)}",
                    "mark the assistant's text with {% generation %} in the template",
                )
            spans.append((len(prompt), len(answered)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [
        any(start <= first and last <= end and first < last for start, end in spans)
        for first, last in encoded["offset_mapping"]
    ]
    return encoded["input_ids"], mask


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], **options: Any
) -> Any:
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except jinja2.TemplateError as error:
        raise UserError(
            "chat template rejects the messages",
            f"{tokenizer.name_or_path} ({error})",
            "leave such conversations out, or mend the template",
        ) from error
