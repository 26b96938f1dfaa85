"""What a process says on stderr: lines for people, or an object of JSON a line for a collector."""

import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, TextIO, get_args

from polybasic.chain.base.terminal import as_it_is, escaped

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)

_ROOT = "polybasic"
"""Logger of all that is ours, and of what is printed."""
_LEVEL_OF_START = {
    "warning: ": logging.WARNING,
    "interrupted by ": logging.WARNING,
    "error: ": logging.ERROR,
    "failed: ": logging.ERROR,
}
_COLOURS_AND_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

_OWN = frozenset(vars(logging.makeLogRecord({})))
"""What every record has; the rest was given with the message."""

_IN_MESSAGE = ("method", "path", "status")
"""Of a request's record, what its message says already."""


class LogSettings(NamedTuple):
    """What a process is asked to say, and how.

    Attributes:
        level: the least that is logged; None is info in JSON, else warning, as Python has it.
        as_json: an object a line, of everything that would be printed on stderr, and no bars.
    """

    level: Level | None = None
    as_json: bool = False


class JsonFormatter(logging.Formatter):
    """An object a line: time, level, logger, message, and what was given with it."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_given(record),
        }
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


class TextFormatter(logging.Formatter):
    """A line for people, a stack trace on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, message, and what was given with it."""
        time = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        given = " ".join(
            f"{name}={value}" for name, value in _given(record).items() if name not in _IN_MESSAGE
        )
        line = f"{time} {record.levelname.lower():7} {record.getMessage()} {given}".rstrip()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return escaped(line)


class JsonLines:
    """A text stream that writes an object of JSON for each text that is printed to it.

    A text of several lines that is printed at once is one object. It is no terminal, so that
    progress comes in lines; of a bar that a library draws all the same its last state is left.

    Attributes:
        stream: the stream below.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = as_it_is(stream)
        self._begun = threading.local()

    def write(self, text: str) -> int:
        begun = getattr(self._begun, "text", "") + text
        if begun.endswith("\n"):
            self._begun.text = ""
            self._say(begun)
        else:
            self._begun.text = begun.rpartition("\r")[2]
        return len(text)

    def isatty(self) -> bool:
        return False

    def _say(self, text: str) -> None:
        lines = [line.rpartition("\r")[2] for line in _COLOURS_AND_MOVES.sub("", text).split("\n")]
        message, given = "\n".join(lines).strip("\n"), {}
        before, _, last = message.rpartition("\n")
        if before and last.startswith("failed: "):
            message, given = last, {"traceback": before}
        found = (level for start, level in _LEVEL_OF_START.items() if message.startswith(start))
        level = next(found, logging.INFO)
        if message and logging.getLogger(_ROOT).isEnabledFor(level):
            name = logging.getLevelName(level)
            said = {"name": _ROOT, "levelno": level, "levelname": name, "msg": message, **given}
            self.stream.write(JsonFormatter().format(logging.makeLogRecord(said)) + "\n")
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _StderrHandler(logging.StreamHandler):
    """Writes to what stderr is when a record comes: processes may be silent."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr.stream if isinstance(sys.stderr, JsonLines) else sys.stderr


@contextmanager
def logging_as(settings: LogSettings) -> Iterator[None]:
    """Log and print so while a `with` block runs; nothing is changed where nothing is asked."""
    global _settings
    if settings == LogSettings():
        yield
        return
    root, own = logging.getLogger(), logging.getLogger(_ROOT)
    before = root.handlers[:], root.level, own.level, _settings
    _settings = settings
    lines: Any = JsonLines(sys.stderr) if settings.as_json else sys.stderr
    with redirect_stderr(lines):
        own.setLevel((settings.level or "info").upper())
        log_to_stderr("text")
        root.setLevel(max(own.level, logging.WARNING))
        logging.captureWarnings(settings.as_json)
        try:
            yield
        finally:
            root.handlers[:] = before[0]
            root.setLevel(before[1])
            own.setLevel(before[2])
            _settings = before[3]
            logging.captureWarnings(capture=False)


def log_settings() -> LogSettings:
    """Of the `logging_as` block that runs."""
    return _settings


def log_to_stderr(form: Literal["json", "text"]) -> None:
    """Send the log of this process to stderr; in JSON where all of stderr is."""
    is_json = form == "json" or isinstance(sys.stderr, JsonLines)
    handler = _StderrHandler()
    handler.setFormatter(JsonFormatter() if is_json else TextFormatter())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _given(record: logging.LogRecord) -> dict[str, Any]:
    """Of libraries that add fields of their own to every record, as Ray does, nothing."""
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _OWN
        and name not in ("message", "asctime", "color_message", "taskName")
        and not name.startswith("_")
    }


_settings = LogSettings()
