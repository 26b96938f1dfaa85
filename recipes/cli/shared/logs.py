"""What is logged, by options of the whole command line: they may stand anywhere in it."""

from collections.abc import Sequence
from typing import Annotated

import typer

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.logs import LEVELS, Level, LogSettings

_VERBOSE, _LEVEL, _JSON = ("-v", "--verbose"), "--log-level", "--log-json"

VerboseOption = Annotated[
    bool, typer.Option(*_VERBOSE, help="Say what is loaded and chosen: --log-level info.")
]
LogLevelOption = Annotated[
    str | None,
    typer.Option(
        _LEVEL,
        metavar="LEVEL",
        help="Least level that is logged on stderr: debug, info, warning or error.  "
        "[default: warning; info with --log-json]",
    ),
]
LogJsonOption = Annotated[
    bool,
    typer.Option(
        _JSON, help="On stderr one JSON object a line, progress and errors included; no bars."
    ),
]


def without_log_options(words: Sequence[str]) -> tuple[list[str], LogSettings]:
    """A command line without these options, before the command or behind it, and what they say.

    Raises:
        UserError: no level, or an unknown one.
    """
    left: list[str] = []
    level: Level | None = None
    is_verbose = as_json = False
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if word in _VERBOSE:
            is_verbose = True
        elif word == _JSON:
            as_json = True
        elif name == _LEVEL:
            level = _known(value if equals else next(rest, ""))
        elif word == "--":
            left += [word, *rest]
        else:
            left.append(word)
    return left, LogSettings(level or ("info" if is_verbose else None), as_json)


def _known(name: str) -> Level:
    for level in LEVELS:
        if name == level:
            return level
    raise UserError("unknown level", f"{_LEVEL} {name}", f"use one of {', '.join(LEVELS)}")
