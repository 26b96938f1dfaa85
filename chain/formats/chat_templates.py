"""Chat templates are programs of others: rendered in Jinja's sandbox, within limits.

The sandbox keeps a template from files and code. It does not keep it from looping or from filling
the memory; that is done here.
"""

import ctypes
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jinja2

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.vocabulary import is_tokenizer_failure

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

try:
    import resource
except ImportError:  # there is none on Windows: no limit of memory there
    resource = None  # type: ignore[assignment]

RENDER_SECONDS = 10.0
"""For one conversation. Templates take less than a millisecond for a turn."""
_MEMORY_BYTES = 1 << 32
"""That one rendering may add to what the process has mapped."""
_TEXT_CHARACTERS = 1 << 26
"""Of a rendered conversation: ten million words, more than any context."""
_STATM = Path("/proc/self/statm")

_LOOK_SECONDS = 0.5

_ROLES = {"system", "developer", "user", "assistant", "tool"}

_one_at_a_time = threading.Lock()
_latest_watch: "_Watch | None" = None

Rendered = TypeVar("Rendered")


class RejectedMessages(Exception):
    """A chat template does not take these messages, for this reason in one line."""


class _OutOfTime(BaseException):
    """Raised in the thread that renders; no `except Exception` of a library keeps it."""


def rendered_messages(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[dict[str, str]], **options: Any
) -> str:
    """Messages as text, by the tokenizer's own chat template.

    Args:
        tokenizer: has a chat template.
        messages: with role and content.
        options: of transformers' `apply_chat_template`.

    Raises:
        RejectedMessages, UserError: as `rendered`.
    """

    def render() -> Any:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)

    name = tokenizer.name_or_path or "the tokenizer"
    return str(rendered(f"{tokenizer.chat_template}", name, render))


def token_ids_of(
    tokenizer: "PreTrainedTokenizerBase", text: str, add_special_tokens: bool = True
) -> list[int]:
    """The token ids of a text of any length.

    Raises:
        UserError: the tokenizer fails on it.
    """
    try:
        # the engine refuses what is too long; transformers would only warn
        encoded = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    except BaseException as error:
        if not is_tokenizer_failure(error):
            raise
        raise UserError(
            "tokenizer fails on a text",
            f"{tokenizer.name_or_path} ({error or type(error).__name__})",
            "take the tokenizer that belongs to the target",
        ) from error
    return list(encoded["input_ids"])


def prompt_token_ids(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[dict[str, str]],
    takes_control_tokens: bool = True,
    continues: bool = False,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of messages with the template's opening of the assistant's next turn.

    Args:
        tokenizer: has a chat template.
        messages: with role and content.
        takes_control_tokens: whether contents may spell the tokenizer's special tokens. If not,
            such text becomes other tokens: nobody who writes a message forges turns by it.
        continues: leave the last message, which is the assistant's, open instead.
        options: what the template reads beside the messages, as JSON, such as enable_thinking.

    Raises:
        RejectedMessages: as `rendered`; or a role is not one of the usual ones, and the template
            does not name it.
        UserError: as `rendered` and `token_ids_of`.
    """
    template = f"{tokenizer.chat_template}"
    for role in {each["role"] for each in messages} - _ROLES:
        if f"'{role}'" not in template and f'"{role}"' not in template:
            known = ", ".join(sorted(_ROLES))
            raise RejectedMessages(f"there is no role {role[:100]!r}; there are {known}")
    spelled = [] if takes_control_tokens else _control_tokens(tokenizer)
    options = dict(options or {})
    texts = list(_texts_of([*messages, options]))
    found = [token for token in spelled if any(token in text for text in texts)]
    # characters of a private use area, that no message has
    free = (chr(code) for code in range(0xF0000, 0xFFFFE))
    used = set().union(*texts) if found else set()
    stand_ins = dict(
        zip((character for character in free if character not in used), found, strict=False)
    )
    for stand_in, token in stand_ins.items():
        messages = _replaced(list(messages), token, stand_in)
        options = _replaced(options, token, stand_in)
    opening = {"add_generation_prompt": not continues, "continue_final_message": continues}
    text = rendered_messages(tokenizer, messages, **opening, **options)
    token_ids: list[int] = []
    for part in re.split(f"([{''.join(stand_ins)}])", text) if found else [text]:
        # cut in two, no part of it is a special token
        pieces = [part] if part not in stand_ins else _apart(stand_ins[part], spelled)
        for piece in filter(None, pieces):
            token_ids += token_ids_of(tokenizer, piece, add_special_tokens=False)
    return token_ids


def _texts_of(value: Any) -> Iterator[str]:
    """All texts in a value of JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts_of([*value, *value.values()])
    elif isinstance(value, list):
        for item in value:
            yield from _texts_of(item)


def _replaced(value: Any, old: str, new: str) -> Any:
    """A value of JSON in all of whose texts `old` is `new`."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, dict):
        return {name: _replaced(item, old, new) for name, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, old, new) for item in value]
    return value


def _control_tokens(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """How special tokens are spelled, the longest first: one may be a part of another."""
    special = [each.content for each in tokenizer.added_tokens_decoder.values() if each.special]
    return sorted(filter(None, special), key=len, reverse=True)


def _apart(token: str, spelled: Sequence[str]) -> list[str]:
    """Pieces of a special token, none of which is or holds one where it has two characters."""
    first, rest = token[:1], token[1:]
    if any(other in rest for other in spelled):
        return [first, *_apart(rest, spelled)]
    return [first, rest]


def rendered(template: str, name: str, render: Callable[[], Rendered]) -> Rendered:
    """What `render` makes of messages by a chat template.

    Args:
        template: the text of it.
        name: says whose it is, in errors.
        render: calls transformers.

    Raises:
        RejectedMessages: the template refuses the messages or fails on them.
        UserError: it takes too much time or memory, or may.
    """
    if product := _unbounded_product(template):
        raise _beyond(name, f"{product}, which may be any number")
    try:
        with _one_at_a_time, _limited_memory(), _watch().limited_time():
            made = render()
    except _OutOfTime:
        raise _beyond(name, f"more than {RENDER_SECONDS:g} s") from None
    except MemoryError:
        raise _beyond(name, f"more than {_MEMORY_BYTES >> 20} MiB of memory") from None
    except Exception as error:  # a template can raise anything that Python's operations do
        raise RejectedMessages(
            " ".join(f"{error or type(error).__name__}".split())[:500]
        ) from error
    if isinstance(made, str) and len(made) > _TEXT_CHARACTERS:
        raise _beyond(name, f"a text of {len(made):,} characters")
    return made


@lru_cache(maxsize=16)
def _unbounded_product(template: str) -> str | None:
    """A power, or a product of two variables, that a template computes.

    Numbers of a million digits hold a thread for hours, and nothing can interrupt it.
    """
    try:
        lexed = list(jinja2.Environment().lex(template))
    except jinja2.TemplateError:
        return None  # rendering tells what is wrong
    tokens = [(kind, value) for _, kind, value in lexed if kind != "whitespace"]
    for before, (kind, value), after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        is_unpacking = before[1] in ("(", ",")
        if kind != "operator" or value not in ("*", "**") or is_unpacking:
            continue
        if value == "**" or not {"integer", "string"} & {before[0], after[0]}:
            return f"{before[1]} {value} {after[1]}"
    return None


class _Watch(threading.Thread):
    """Looks now and then at the thread that renders, and raises `_OutOfTime` in it."""

    def __init__(self) -> None:
        super().__init__(name="polybasic-chat-templates", daemon=True)
        self._lock = threading.Lock()
        self._rendering: tuple[int, float] | None = None

    def run(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            with self._lock:
                if self._rendering is None:
                    continue
                thread, since = self._rendering
                if time.monotonic() - since > RENDER_SECONDS:
                    self._rendering = None
                    raised = ctypes.py_object(_OutOfTime)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)

    @contextmanager
    def limited_time(self) -> Iterator[None]:
        """Of what this thread does now."""
        with self._lock:
            self._rendering = threading.get_ident(), time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                was_over, self._rendering = self._rendering is None, None
            if was_over:
                time.sleep(0.1)  # what is raised in this thread arrives here at the latest


def _watch() -> _Watch:
    """The one of this process; a process that was forked has none yet."""
    global _latest_watch
    if _latest_watch is None or not _latest_watch.is_alive():
        _latest_watch = _Watch()
        _latest_watch.start()
    return _latest_watch


@contextmanager
def _limited_memory() -> Iterator[None]:
    """On Linux, refuse what would map more than `_MEMORY_BYTES` beyond what is mapped now."""
    if resource is None or not _STATM.is_file():
        yield
        return
    mapped = int(_STATM.read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [mapped + _MEMORY_BYTES, *(each for each in (soft, hard) if each >= 0)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _beyond(name: str, what: str) -> UserError:
    return UserError(
        "chat template beyond its limits",
        f"{name} ({what})",
        "use another template: this one suits no conversation",
    )
