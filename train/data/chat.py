"""A conversation as token ids, and which of them the assistant wrote."""

import bisect
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.chat_templates import (
    RejectedMessages,
    rendered,
    rendered_messages,
    token_ids_of,
)

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_STAND_IN = "\ue000"  # of the private use area
_PROBE = [
    {"role": role, "content": f"{role} {number}"}
    for number in ("one", "two")
    for role in ("user", "assistant")
]

Messages = Sequence[dict[str, str]]
Span = tuple[int, int]


class EncodedConversation(NamedTuple):
    """Token ids and, beside each, whether it is the assistant's (its end of turn included)."""

    input_ids: list[int]
    is_assistant: list[bool]


class RefusedConversation(UserError):
    """What is wrong with one conversation under a chat template that suits others."""


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, max_tokens: int
) -> EncodedConversation:
    """Encode by the tokenizer's own chat template, cut to `max_tokens`.

    The assistant's text is what stands between `{% generation %}` and `{% endgeneration %}` where
    the template has them. Otherwise it is found by rendering parts of the conversation: each turn
    goes from the end of its prompt to the end of turn after its content. A token that is only in
    part the assistant's counts as the prompt's.

    Raises:
        UserError: no chat template, or a tokenizer without character offsets.
        RefusedConversation: the template rejects the messages, or it renders them so that the
            assistant's text cannot be found for sure.
    """
    if not tokenizer.is_fast:
        raise UserError(
            "tokenizer without character offsets",
            tokenizer.name_or_path,
            "save it as a fast tokenizer (tokenizer.json)",
        )
    text, spans = _text_and_spans(tokenizer, messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoded["offset_mapping"][:max_tokens]
    return EncodedConversation(list(encoded["input_ids"][:max_tokens]), _inside(offsets, spans))


def encode_accepted(
    tokenizer: PreTrainedTokenizerBase, conversations: Iterable[Messages], max_tokens: int
) -> tuple[list[EncodedConversation], RefusedConversation | None]:
    """Encode the conversations that the chat template accepts.

    Returns:
        Them in order, and the refusal of the last one that was left out.

    Raises:
        UserError: as `encode_conversation`, where it is not about one conversation alone.
    """
    encoded, refusal = [], None
    for messages in conversations:
        try:
            encoded.append(encode_conversation(tokenizer, messages, max_tokens))
        except RefusedConversation as error:
            refusal = error
    return encoded, refusal


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """Token ids of `messages` with the template's opening of the assistant's next turn.

    Raises:
        UserError: no chat template.
        RefusedConversation: the template rejects the messages.
    """
    chat_template(tokenizer)
    text = _render(tokenizer, messages, add_generation_prompt=True)
    return token_ids_of(tokenizer, text, add_special_tokens=False)


class UserTurn(NamedTuple):
    """Where a user's turn opens, and how it closes.

    Attributes:
        token_ids: of all before the user's text.
        closing: what follows that text, up to the end of a line; empty where it is a token.
        stop_tokens: a control token that follows it.
    """

    token_ids: list[int]
    closing: str
    stop_tokens: tuple[int, ...]

    def content_of(self, written: str) -> str:
        """The user's text in what a model wrote from the opening on."""
        return (written.split(self.closing)[0] if self.closing else written).strip()


def user_turn(tokenizer: PreTrainedTokenizerBase, messages: Messages = ()) -> UserTurn:
    """How the chat template opens the user's turn after `messages`, without a system message of
    ours.

    Raises:
        UserError: no chat template, or one that does not write the user's text as it is.
        RefusedConversation: the template rejects these messages with a user's turn behind them.
    """
    chat_template(tokenizer)
    opened = [*messages, {"role": "user", "content": _STAND_IN}]
    before, *after = _render(tokenizer, opened, add_generation_prompt=True).split(_STAND_IN)
    if not before or len(after) != 1:
        raise UserError(
            "chat template without an opening of the user's turn",
            tokenizer.name_or_path,
            "set data.self_prompted to null, or mend target.chat_template",
        )
    rest = after[0].strip()
    first = token_ids_of(tokenizer, rest, add_special_tokens=False)[:1]
    controls = tuple(token for token in first if token in tokenizer.added_tokens_decoder)
    closing = "" if controls else rest.partition("\n")[0]
    token_ids = token_ids_of(tokenizer, before, add_special_tokens=False)
    return UserTurn(token_ids, closing, controls)


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
            "set target.chat_template, add chat_template.jinja to the target's folder, or use a "
            "chat model",
        )
    return template


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Find the assistant's text in two rounds of plain words: a template that fails suits nothing.

    Raises:
        UserError: as `encode_conversation`, or the template marks other text than the assistant's.
    """
    text, spans = _text_and_spans(tokenizer, _PROBE)
    found = [text[start:end] for start, end in spans]
    for message in _PROBE:
        is_found = any(message["content"] in part for part in found)
        if is_found != (message["role"] == "assistant"):
            raise UserError(
                "chat template marks other text than the assistant's",
                f"{tokenizer.name_or_path} ({found})",
                "put {% generation %} around the assistant's text in the template, or nowhere",
            )


def _text_and_spans(
    tokenizer: PreTrainedTokenizerBase, messages: Messages
) -> tuple[str, list[Span]]:
    """The whole conversation as text, and where in it the assistant's turns lie."""
    template = chat_template(tokenizer)
    if _GENERATION.search(template):
        return _marked_spans(tokenizer, template, messages)
    return _unmarked_spans(tokenizer, messages)


def _marked_spans(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: Messages
) -> tuple[str, list[Span]]:
    """The whole text, and what lies between the template's marks."""
    render: Any = render_jinja_template  # declared to return a text alone

    def render_marked() -> Any:
        return render(
            [list(messages)],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )

    try:
        [text], [spans] = rendered(template, str(tokenizer.name_or_path), render_marked)
    except RejectedMessages as error:
        raise _rejection(tokenizer, str(error)) from error
    return text, spans


def _unmarked_spans(
    tokenizer: PreTrainedTokenizerBase, messages: Messages
) -> tuple[str, list[Span]]:
    """The whole text, and where the assistant's turns lie in it by what else is rendered."""
    text = _render(tokenizer, messages)
    indices = [index for index, each in enumerate(messages) if each["role"] == "assistant"]
    spans = [_turn(tokenizer, messages, index, text) for index in indices]
    for index, (before, after) in zip(indices[1:], itertools.pairwise(spans), strict=True):
        if after[0] < before[1]:
            raise _unclear(tokenizer, messages, index, "its prompt lacks the turn before")
    return text, spans


def _turn(tokenizer: PreTrainedTokenizerBase, messages: Messages, index: int, text: str) -> Span:
    """Where the assistant's message `index` lies in `text`, the rendering of all messages.

    A stand-in for its content shows what follows that, and what would follow if it were the last.
    """
    content = messages[index]["content"]
    prompt = _render(tokenizer, messages[:index], add_generation_prompt=True)
    if not text.startswith(prompt):
        raise _unclear(tokenizer, messages, index, "the text before it differs from its prompt")
    stand_in = _STAND_IN
    while stand_in in text:
        stand_in += _STAND_IN
    cut = [*messages[:index], {"role": "assistant", "content": stand_in}]
    rest = messages[index + 1 :]
    after = _text_after(tokenizer, [*cut, *rest], stand_in)
    if_last = _text_after(tokenizer, cut, stand_in) if rest else after
    if after is None or if_last is None or not text.endswith(after):
        raise _unclear(tokenizer, messages, index, "its content changes what follows")
    start, content_end = len(prompt), len(text) - len(after)
    answer = text[start:content_end]
    if content_end < start or not answer.rstrip().endswith(content.strip()):
        raise _unclear(tokenizer, messages, index, "its content is rewritten")
    num_ending = _end_of_turn(tokenizer, after, if_last)
    if num_ending is None:
        raise _unclear(tokenizer, messages, index, "its end depends on what follows")
    return start, content_end + num_ending


def _text_after(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, stand_in: str
) -> str | None:
    _, *after = _render(tokenizer, messages).split(stand_in)
    return after[0] if len(after) == 1 else None


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, after: str, if_last: str) -> int | None:
    """How many characters of `after` end the turn, None if that is unclear.

    That is all that follows an answer which is the last one. Some templates (Phi-3's) end the whole
    conversation there too; then it is up to the last control token that both texts have, with the
    white space after it.
    """
    if after.startswith(if_last):
        return len(if_last)
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(after, if_last, strict=False))
    common = "".join(character for character, _ in pairs)
    controls = [token for token in tokenizer.get_added_vocab() if token in common]
    if not controls:
        return None
    end = max(common.rindex(token) + len(token) for token in controls)
    return len(common) - len(common[end:].lstrip())


def _inside(places: list[Span], spans: list[Span]) -> list[bool]:
    """For each of `places` whether it lies in one of `spans`, which are in order."""
    ends = [end for _, end in spans]
    found = []
    for first, last in places:
        index = bisect.bisect_left(ends, last)
        start, end = spans[index] if index < len(spans) else (last, last)
        # some tokenizers give white space no width
        found.append(start <= first < last or start < first == last < end)
    return found


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, add_generation_prompt: bool = False
) -> str:
    if not messages:
        raise _rejection(tokenizer, "no message before the assistant's")
    try:
        return rendered_messages(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    except RejectedMessages as error:
        raise _rejection(tokenizer, str(error)) from error


def _rejection(tokenizer: PreTrainedTokenizerBase, reason: str) -> RefusedConversation:
    return RefusedConversation(
        "chat template rejects the messages",
        f"{tokenizer.name_or_path} ({reason})",
        "leave such conversations out, or mend the template",
    )


def _unclear(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, index: int, reason: str
) -> RefusedConversation:
    return RefusedConversation(
        "chat template does not tell the assistant's text",
        f"{tokenizer.name_or_path}, message {index + 1} of {len(messages)} ({reason})",
        "leave such conversations out, or mark that text with {% generation %} in the template",
    )
