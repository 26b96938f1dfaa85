"""A link between two hosts: its times, and the bytes of the messages on it. No torch in here."""

import math
import re
from dataclasses import dataclass

TOKEN_BYTES = 4
"""Of a token id in a message."""
MESSAGE_BYTES = 256
"""Of a message but for its token ids, at most, with those of TCP and IP."""
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_PREFIXES = {"k": 1e3, "M": 1e6, "G": 1e9}
_NUMBER = r"([0-9]{1,6}(?:\.[0-9]{1,6})?)"
_LINK = re.compile(rf"{_NUMBER}(us|ms|s)(?:,{_NUMBER}([kMG])bit)?")


@dataclass(frozen=True)
class Link:
    """What was measured of a link.

    Attributes:
        round_trip_seconds: of a message and an answer without content.
        bytes_per_second: towards the target.
    """

    round_trip_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: int) -> float:
        """Of a message of so many bytes and its answer, without the work in between."""
        return self.round_trip_seconds + num_bytes / self.bytes_per_second

    @classmethod
    def of(cls, text: str) -> "Link":
        """The link that a text such as "20ms,100Mbit" names; without a rate, of any.

        Raises:
            ValueError: it names none.
        """
        match = _LINK.fullmatch(text)
        if match is None:
            raise ValueError("write a round trip, and bits a second: 20ms or 0.1s,100Mbit")
        number, unit, rate, prefix = match.groups()
        bits = float(rate) * _PREFIXES[prefix] if rate else float("inf")
        if not bits:
            raise ValueError("a link of no bits a second has no answers")
        return cls(float(number) * _UNITS[unit], bits / 8)

    def __str__(self) -> str:
        """What `of` reads."""
        shown = f"{_trimmed(1e3 * self.round_trip_seconds)}ms"
        if math.isinf(self.bytes_per_second):
            return shown
        return f"{shown},{_trimmed(8e-6 * self.bytes_per_second)}Mbit"


def _trimmed(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def verify_bytes(num_tokens: int) -> int:
    """Of a message that has a block of so many tokens verified, or reads a prompt."""
    return MESSAGE_BYTES + TOKEN_BYTES * num_tokens


def answer_bytes() -> int:
    """Of the answer: how many tokens were kept, and the one that follows them."""
    return MESSAGE_BYTES
