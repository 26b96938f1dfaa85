"""The text of an answer while its tokens arrive, and the stop strings that end it."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from polybasic.chain.errors import UserError

_INCOMPLETE = "\ufffd"  # how tokenizers decode bytes that are not a whole character


class AnswerText:
    """Decodes tokens one by one and finds the first one that completes a stop string.

    The text ends before the stop string. The answer's token ids end with the token that completed
    it, so decoding them may give the stop string and more. Special tokens have no text.

    Args:
        tokenizer: of the answer's tokens.
        stop: the stop strings.

    Attributes:
        text: all complete characters, up to a stop string.
        has_stopped: whether a stop string was found.

    Raises:
        UserError: an empty stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        if "" in stop:
            raise UserError("empty stop string", f"stop={list(stop)}", "give it a character")
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.text, self.has_stopped = "", False
        # Recent tokens. Those before `_num_context` are in `text` already; they are kept because
        # some tokenizers decode a token differently at the start of a text.
        self._window: list[int] = []
        self._num_context = 0
        self._num_taken = 0

    def cut(self, tokens: list[int]) -> int | None:
        """Read the answer's next tokens.

        Returns:
            How many of them belong to the answer if a stop string ends it, else None.
        """
        for index, token in enumerate(tokens):
            begin = max(0, len(self.text) - max(map(len, self.stop), default=0) + 1)
            incomplete = self._read(token)
            found = [(self.text + incomplete).find(string, begin) for string in self.stop]
            if positions := [position for position in found if position >= 0]:
                self.text = (self.text + incomplete)[: min(positions)]
                self.has_stopped = True
                return index + 1
        return None

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

    def _read(self, token: int) -> str:
        """Add a token to `text` if it completes characters, else return the incomplete text."""
        self._window.append(token)
        added = self._text_after_context()
        if added.endswith(_INCOMPLETE):
            return added
        if added:
            self.text += added
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
        return ""

    def _text_after_context(self) -> str:
        context = self.tokenizer.decode(self._window[: self._num_context])
        return self.tokenizer.decode(self._window)[len(context) :]

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that is the start of a stop string."""
        lengths = [
            length
            for string in self.stop
            for length in range(1, len(string))
            if self.text.endswith(string[:length])
        ]
        return max(lengths, default=0)
