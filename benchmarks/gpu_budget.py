"""Time that is shared out in advance: parts end when theirs is over, and a record loses nothing."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polybasic.chain.formats.files import write_json

DONE, PARTLY, FAILED, ENDED, LEFT_OUT = "done", "partly", "failed", "ended", "left out"
"""What became of a part: `PARTLY` lacks what it names, `ENDED` was ended from outside."""


@dataclass
class Allowance:
    """The time of one part.

    Attributes:
        until: when it is over, in seconds of `time.time`, which all processes share.
        save: writes the record as it stands.
        left_out: what the part had no time for, or what failed, with the reason.
    """

    until: float
    save: Callable[[], None] = lambda: None
    left_out: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Left of it."""
        return self.until - time.time()

    def allows(self, what: str, seconds: float = 0.0) -> bool:
        """Whether there is time for something; else it is noted as left out.

        Args:
            seconds: that it takes.
        """
        if self.seconds > seconds:
            return True
        self.left_out.append(what)
        return False

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Note what fails inside as left out, and go on behind it; then save."""
        try:
            yield
        except Exception as error:  # whatever it is, what comes next may be whole
            reason = str(error).strip().partition("\n")[0]
            self.left_out.append(f"{what}: {type(error).__name__}: {reason}")
        self.save()


class Record:
    """A record on its way: what every part found so far, written whole again and again.

    Args:
        path: of the file.
        head: what every record holds beside its figures.
    """

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {**head, "parts": {}}

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        """By name: `status`, `seconds`, `left_out`, `error` and what was `found`."""
        parts: dict[str, dict[str, Any]] = self.content["parts"]
        return parts

    def found(self, part: str) -> dict[str, Any]:
        """What a part found; empty where it was not run."""
        found: dict[str, Any] = self.parts.get(part, {}).get("found", {})
        return found

    def save(self) -> None:
        """Write it whole."""
        write_json(self.path, self.content)
