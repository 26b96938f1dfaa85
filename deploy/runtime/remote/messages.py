"""Messages between the stages near a user and a target that runs elsewhere.

A frame is four bytes with the length of a message (big endian), the message in the safetensors
format, whose metadata name its kind and its fields as JSON, and once both sides have proven that
they have the key, a tag: the first 16 bytes of HMAC-SHA256 over direction, number and message.
"""

import hmac
import select
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import Field, StringConstraints, ValidationError
from safetensors import SafetensorError

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.settings import Count, Settings, Whole
from polybasic.chain.formats.files import parse_json
from polybasic.deploy.runtime.rounds.logprobs import MAX_LOGPROBS
from polybasic.deploy.runtime.rounds.sampling import Sampling

PROTOCOL = "polybasic.remote/1"
MAX_GREETING_BYTES = 4096
"""Of a message before both sides are known to have the key."""
TAG_BYTES = 16
_LENGTH_BYTES = 4
_DROPPED_BYTES = 65536
"""That are read at once of what nobody wants."""
Arrays = Mapping[str, NDArray[Any]]
Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""32 bytes."""


class Hello(Settings):
    """The near side begins."""

    protocol: str
    nonce: Hex


class Challenge(Settings):
    """The far side's answer to `Hello`."""

    nonce: Hex


class Proof(Settings):
    """The near side has the key, and the chain of this identity."""

    proof: Hex
    chain: Hex


class Welcome(Settings):
    """The far side has the key, and a target for so many tokens of prompt and answer."""

    proof: Hex
    context_tokens: Count
    dtype: str


class Begin(Settings):
    """Read the tokens `ids` but for the last one, and draw what follows in this way."""

    num_prompt_tokens: Count
    sampling: Sampling
    logprobs: Whole | None = Field(None, le=MAX_LOGPROBS)


class Verify(Settings):
    """Verify a block: `ids` are the token at `position`, which is the last one, and the block."""

    number: Whole
    position: Whole


class Answer(Settings):
    """How many tokens of a block are kept, and the token that the target draws after them.

    -1 are kept where another token than the first of `ids` was the last one: the near side has
    sent the block before it knew. With log-probabilities there are `logprobs` [kept + 1],
    `top_ids` and `top_logprobs` [kept + 1, N].
    """

    number: Whole
    num_kept: int
    next_token: Whole = 0


class End(Settings):
    """The sequence is at its end, and its caches may be used for others."""


class Ping(Settings):
    """To be answered at once; may carry bytes."""


class Pong(Settings):
    """The answer to `Ping`."""


class Working(Settings):
    """The answer takes its time, and the link is whole."""


class Failure(Settings):
    """What a `UserError` says; the connection ends with it."""

    what: str
    where: str
    do: str
    is_busy: bool = False

    @classmethod
    def of(cls, error: UserError, is_busy: bool = False) -> "Failure":
        """The same as a message."""
        return cls(what=error.what, where=error.where, do=error.do, is_busy=is_busy)


_KINDS: dict[str, type[Settings]] = {
    kind.__name__: kind
    for kind in (
        *(Hello, Challenge, Proof, Welcome, Begin, Verify, Answer),
        *(End, Ping, Pong, Working, Failure),
    )
}


class Received(NamedTuple):
    """A message as it arrived."""

    content: Settings
    arrays: Arrays

    @property
    def ids(self) -> list[int]:
        """The token ids that it carries.

        Raises:
            UserError: it carries none, or something else under that name.
        """
        ids = self.arrays.get("ids")
        if ids is None or ids.dtype != np.int32 or ids.ndim != 1 or not len(ids) or ids.min() < 0:
            raise malformed("no token ids")
        tokens: list[int] = ids.tolist()
        return tokens


class BrokenLinkError(Exception):
    """A connection that ended, or that was silent for too long."""


def malformed(reason: str) -> UserError:
    """The error of a message that means nothing here."""
    return UserError("malformed message", reason, "let both sides run the same polybasic")


def packed(content: Settings, arrays: Arrays) -> bytes:
    """A message as bytes."""
    fields = content.model_dump_json(exclude_defaults=True)
    metadata = {"kind": type(content).__name__, "fields": fields}
    return safetensors.numpy.save(dict(arrays), metadata=metadata)


def unpacked(message: bytes) -> Received:
    """The message of these bytes.

    Raises:
        UserError: it is none.
    """
    try:
        arrays = safetensors.numpy.load(message)
        header = parse_json(message[8 : 8 + int.from_bytes(message[:8], "little")], "header", "it")
        metadata = header["__metadata__"]
        content = _KINDS[metadata["kind"]].model_validate_json(metadata["fields"])
    except (SafetensorError, KeyError, TypeError, ValidationError) as error:
        raise malformed(f"{len(message)} bytes, {type(error).__name__}") from error
    return Received(content, arrays)


class Channel:
    """Messages over a connected socket, for one thread.

    Args:
        connection: its timeout is set here.
        max_bytes: of a message.
    """

    def __init__(self, connection: socket.socket, max_bytes: int = MAX_GREETING_BYTES) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self.max_bytes = connection, max_bytes
        self._tags: _Tags | None = None

    def secure(self, key: bytes, sends: bytes, receives: bytes) -> None:
        """Tag all further messages.

        Args:
            key: of this connection.
            sends, receives: name the two directions.
        """
        self._tags = _Tags(key, sends, receives)

    def send(self, content: Settings, seconds: float, /, **arrays: NDArray[Any]) -> None:
        """Send a message.

        Raises:
            BrokenLinkError: the connection has ended, or takes nothing for so many seconds.
        """
        message = packed(content, arrays)
        tag = self._tags.next_sent(message) if self._tags else b""
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(len(message).to_bytes(_LENGTH_BYTES, "big") + message + tag)
        except OSError as error:
            raise BrokenLinkError(_reason(error)) from error

    def receive(self, seconds: float) -> Received:
        """The next message.

        Raises:
            BrokenLinkError: the connection has ended, or the message has not come in time.
            UserError: a malformed or oversized message, or one that another party has written.
        """
        deadline = time.monotonic() + seconds
        length = int.from_bytes(self._read(_LENGTH_BYTES, deadline), "big")
        if length > self.max_bytes:
            raise malformed(f"{length} bytes, at most {self.max_bytes} are taken")
        content = self._read(length + (TAG_BYTES if self._tags else 0), deadline)
        message, tag = content[:length], content[length:]
        if self._tags and not hmac.compare_digest(tag, self._tags.next_received(message)):
            raise malformed("its tag is wrong: neither side has written it")
        return unpacked(message)

    @property
    def has_arrived(self) -> bool:
        """Whether a message has come, at least in part, or the connection has ended."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def end_sending(self, seconds: float) -> None:
        """Send no more, and wait for so many seconds until the other side has ended, too.

        What it sends meanwhile is dropped unread: a connection that is closed before would be
        reset, and the last message lost with it.
        """
        deadline = time.monotonic() + seconds
        try:
            self._socket.shutdown(socket.SHUT_WR)
            while (left := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(_DROPPED_BYTES):
                    return
        except OSError:
            return  # it has ended

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _read(self, num_bytes: int, deadline: float) -> bytes:
        received = bytearray()
        try:
            while len(received) < num_bytes:
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
                if not (part := self._socket.recv(num_bytes - len(received))):
                    raise BrokenLinkError("the other side has ended it")
                received += part
        except OSError as error:
            raise BrokenLinkError(_reason(error)) from error
        return bytes(received)


class _Tags:
    """Tags of the messages of a connection, in their order."""

    def __init__(self, key: bytes, sends: bytes, receives: bytes) -> None:
        self._key, self._sends, self._receives = key, sends, receives
        self._num_sent = self._num_received = 0

    def next_sent(self, message: bytes) -> bytes:
        """Of the next message that is sent."""
        self._num_sent += 1
        return self._tag(self._sends, self._num_sent, message)

    def next_received(self, message: bytes) -> bytes:
        """That the next message has to carry."""
        self._num_received += 1
        return self._tag(self._receives, self._num_received, message)

    def _tag(self, direction: bytes, number: int, message: bytes) -> bytes:
        signed = direction + number.to_bytes(8, "big") + message
        return hmac.digest(self._key, signed, "sha256")[:TAG_BYTES]


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "silent for too long"
    return error.strerror or str(error) or type(error).__name__
