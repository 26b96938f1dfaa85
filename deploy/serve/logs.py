"""The log of a server: a line of JSON or of text for each request, with its id."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

from polybasic.chain.terminal import escaped

_OWN = frozenset(vars(logging.makeLogRecord({})))
"""What every record has; the rest was given with the message."""

_IN_MESSAGE = ("method", "path", "status")
"""Of a request's record, what its message says already."""


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


def log_to_stderr(form: Literal["json", "text"]) -> None:
    """Send the log of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _given(record: logging.LogRecord) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _OWN and name not in ("message", "asctime", "color_message", "taskName")
    }
