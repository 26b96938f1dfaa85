"""Where an answer ends, and why; and its text while its tokens arrive."""

from collections.abc import Collection, Sequence
from typing import Literal

from tokenizers import Tokenizer

from polybasic.chain.base.errors import UserError

StoppedBy = Literal["stop", "stop_string", "length"]
"""What ended an answer: a stop token that was drawn, a stop string, or the number of its tokens."""
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
"""Of one stop string. All of them are looked for at each token, and text that may begin one is held
back. Servers take four short ones."""
_INCOMPLETE = "\ufffd"  # how tokenizers decode bytes that are not a whole character


def cut_at_end(
    tokens: list[int], limit: int, stop_tokens: Collection[int], text: "AnswerText | None" = None
) -> tuple[list[int], StoppedBy | None]:
    """The tokens that belong to an answer, or to what a stage proposes, and what ends it with them.

    All that ends one is decided here. Only a walk on a device ends by itself, by the same rules,
    and what it gained comes through here unchanged.

    Args:
        tokens: the next ones, at least one.
        limit: the most that may follow.
        stop_tokens: ids that end an answer, which keeps them.
        text: of the answer, which the tokens continue; None where no stop string is looked for.

    Returns:
        Leading tokens, and None if more may follow them.
    """
    for number, token in enumerate(tokens[:limit], 1):
        if text is not None and text.read(token):
            return tokens[:number], "stop_string"
        if token in stop_tokens:
            return tokens[:number], "stop"
    return tokens[:limit], "length" if len(tokens) >= limit else None


class AnswerText:
    """Decodes tokens one by one and finds the first one that completes a stop string.

    The text ends before the stop string. The answer's token ids end with the token that completed
    it, so decoding them may give the stop string and more. Special tokens have no text.

    Args:
        tokenizer: of the answer's tokens.
        stop: the stop strings, or the only one.

    Attributes:
        text: all complete characters, up to a stop string.
        has_stopped: whether a stop string was found.

    Raises:
        UserError: an empty stop string, one that is too long, or too many.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in self.stop:
            raise UserError("empty stop string", f"stop={list(self.stop)}", "give it a character")
        longest = max(map(len, self.stop), default=0)
        if len(self.stop) > MAX_STOP_STRINGS or longest > MAX_STOP_CHARACTERS:
            raise UserError(
                "too many or too long stop strings",
                f"stop of {len(self.stop):,} strings, the longest of {longest:,} characters",
                f"give {MAX_STOP_STRINGS} of {MAX_STOP_CHARACTERS:,} characters at most",
            )
        self.text, self.has_stopped = "", False
        # Recent tokens. Those before `_num_context` are in `text` already; they are kept because
        # some tokenizers decode a token differently at the start of a text.
        self._window: list[int] = []
        self._num_context = 0
        self._num_taken = 0

    def read(self, token: int) -> bool:
        """Read the answer's next token; whether it completes a stop string."""
        begin = max(0, len(self.text) - max(map(len, self.stop), default=0) + 1)
        text = self._text_with(token)
        found = [text.find(string, begin) for string in self.stop]
        if positions := [position for position in found if position >= 0]:
            self.text, self.has_stopped = text[: min(positions)], True
        return self.has_stopped

    def take(self) -> str:
        """The text since the last call, except an end that may begin a stop string."""
        end = len(self.text) if self.has_stopped else len(self.text) - self._num_held_back()
        taken, self._num_taken = self.text[self._num_taken : end], end
        return taken

    def finish(self) -> str:
        """The remaining text once the answer has ended, incomplete characters included."""
        if not self.has_stopped:
            self.text += self._text_after_context()
            self._window, self._num_context = [], 0
        taken, self._num_taken = self.text[self._num_taken :], len(self.text)
        return taken

    def _text_with(self, token: int) -> str:
        """The text with a token, which is added to `text` if it completes characters."""
        self._window.append(token)
        added = self._text_after_context()
        if added.endswith(_INCOMPLETE):
            return self.text + added
        if added:
            self.text += added
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
        return self.text

    def _text_after_context(self) -> str:
        context = self.tokenizer.decode(self._window[: self._num_context])
        return self.tokenizer.decode(self._window)[len(context) :]

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that is the start of a stop string."""
        return max((_overlap(self.text, string) for string in self.stop), default=0)


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that is a start of `string` and not the whole of it."""
    end = text[max(0, len(text) - len(string) + 1) :]
    begin = end.find(string[0])
    while begin >= 0:
        if string.startswith(end[begin:]):
            return len(end) - begin
        begin = end.find(string[0], begin + 1)
    return 0
