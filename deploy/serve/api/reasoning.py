"""An answer's text parted into what the model thinks and what it says, as it grows.

Templates of models that think name the mark that ends a thought. A thought begins with the answer's
first mark, or in the prompt where the template opens it there.
"""

OPENING, CLOSING = "<think>", "</think>"


class Reasoning:
    """Parts one answer. Newlines around a thought belong to neither part.

    Args:
        is_open: whether the prompt has begun a thought.
    """

    def __init__(self, is_open: bool) -> None:
        self._held, self._has_begun = "", is_open
        self._is_thinking, self._is_at_start = is_open, is_open

    def add(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """What a further text adds to the thought and to what is said.

        Args:
            text: the next part of the answer; may be empty.
            is_last: nothing comes any more, so nothing is held back.
        """
        self._held += text
        thought = ""
        if not self._has_begun:
            begin = self._held.lstrip()
            if OPENING.startswith(begin) and len(begin) < len(OPENING) and not is_last:
                return "", ""
            self._has_begun = True
            if begin.startswith(OPENING):
                self._is_thinking = self._is_at_start = True
                self._held = begin[len(OPENING) :]
        if self._is_thinking:
            before, mark, after = self._held.partition(CLOSING)
            if mark:
                thought = self._given(before.rstrip("\n"))
                self._is_thinking, self._is_at_start, self._held = False, True, after
            else:
                num = len(before) if is_last else _num_sure(before)
                thought, self._held = self._given(before[:num]), before[num:]
                return thought, ""
        said, self._held = self._given(self._held), ""
        return thought, said

    def _given(self, text: str) -> str:
        """A further text of the present part, without the newlines before it."""
        if self._is_at_start:
            text = text.lstrip("\n")
            self._is_at_start = not text
        return text


def _num_sure(text: str) -> int:
    """Characters that belong to the thought whatever follows: behind them the closing mark, or
    newlines before it, may have begun."""
    num = len(text)
    begun = max(size for size in range(len(CLOSING)) if text.endswith(CLOSING[:size]))
    return len(text[: num - begun].rstrip("\n"))
