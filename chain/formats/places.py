"""What is written into a chain names no folder of the machine that it was made on, and no user."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_WITHIN = re.compile(r"(?<=[\s=,'\"\[{(])(?:[~/]|\.\./)[^\s,'\"\]})]*")


def without_places(content: Any) -> Any:
    """JSON content in which each text that is a path from elsewhere is its last name alone.

    These are absolute paths, those of a home, and those with `..`; keys stay as they are.
    """
    if isinstance(content, dict):
        return {key: without_places(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [without_places(value) for value in content]
    return _name(content) if isinstance(content, str) and _leads_elsewhere(content) else content


def command_without_places(words: Sequence[str]) -> str:
    """A command line as one text, paths as of `without_places`: "polybasic bench chain"."""
    return shlex.join(map(_word, words))


def _word(word: str) -> str:
    key, equals, value = word.partition("=")
    if equals and "/" not in key and _leads_elsewhere(value):
        return f"{key}={_name(value)}"
    if _leads_elsewhere(word):
        return _name(word)
    return _WITHIN.sub(lambda found: _name(found[0]), word)


def _leads_elsewhere(text: str) -> bool:
    return text.startswith(("/", "~")) or text.startswith("../") or "/../" in text


def _name(path: str) -> str:
    return Path(path).name or path
