"""What files, servers and models say, on its way to a terminal that shows it and obeys nothing."""

import os
import re
import sys
import textwrap
from typing import Any, TextIO

_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f"
_DIRECTIONS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_BREAKS_AND_HALVES = "\u2028\u2029\ud800-\udfff"
_ESCAPED = re.compile(f"[{_CONTROLS}{_DIRECTIONS}{_BREAKS_AND_HALVES}]")
_ESCAPED_BESIDE_BARS = re.compile(rf"(?!\r|\x1b\[A){_ESCAPED.pattern}")


def escaped(text: str) -> str:
    r"""`text` with controls, marks of direction and lone surrogates as \u and four digits.

    Line feeds and tabs stay. JSON means the same afterwards.
    """
    return _ESCAPED.sub(_as_number, text)


class ShownStream:
    r"""A text stream to which everything is written escaped.

    Progress bars of libraries stay: the two things that they send, \r and a step up, pass.

    Attributes:
        stream: the stream below, which takes text as it is.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(_ESCAPED_BESIDE_BARS.sub(_as_number, text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def say(line: str) -> None:
    """Print a line for people on stderr, on a terminal broken between words.

    A command to go on with, after "next:", is left in one piece on a line of its own.
    """
    if sys.stderr.isatty():
        width = os.get_terminal_size(sys.stderr.fileno()).columns
        # terminals that do not know their width report 0
        line = broken_between_words(line, width) if width else line
    print(line, file=sys.stderr, flush=True)


def broken_between_words(line: str, width: int) -> str:
    """`line` with line feeds, at most `width` characters in each but where a word is longer."""
    text, next_, command = line.partition("; next: ")
    if not line.startswith("next: "):
        text = textwrap.fill(text, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return f"{text}\nnext: {command}" if next_ else text


def as_it_is(stream: TextIO) -> TextIO:
    """The stream below a `ShownStream`, or another stream itself."""
    return stream.stream if isinstance(stream, ShownStream) else stream


def _as_number(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
