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


def say(text: str, stream: TextIO | None = None, indent: int = 0) -> None:
    """Print lines for people, on a terminal broken between words.

    A command to go on with, after "next:", is left in one piece on a line of its own.

    Args:
        stream: default: stderr.
        indent: spaces before what is left of a broken line.
    """
    stream = stream or sys.stderr
    if stream.isatty():
        width = os.get_terminal_size(stream.fileno()).columns
        # terminals that do not know their width report 0
        text = broken_between_words(text, width, indent) if width else text
    print(text, file=stream, flush=True)


def broken_between_words(text: str, width: int, indent: int = 0) -> str:
    """`text` with more line feeds, at most `width` characters a line but where a word is longer."""
    lines = text.replace("; next: ", "\nnext: ").split("\n")
    return "\n".join(
        line
        if line.startswith("next: ") or len(line) <= width
        else textwrap.fill(
            line,
            max(width, 1),
            subsequent_indent=indent * " ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines
    )


def as_it_is(stream: TextIO) -> TextIO:
    """The stream below a `ShownStream`, or another stream itself."""
    return stream.stream if isinstance(stream, ShownStream) else stream


def _as_number(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
