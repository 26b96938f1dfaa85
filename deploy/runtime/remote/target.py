"""A chain's target on another host: its address, connections to it, and their link."""

import itertools
import socket
import ssl
import time
from dataclasses import dataclass

import numpy as np

from polybasic.chain.base.errors import UserError
from polybasic.deploy.runtime.remote.keys import GREETING_SECONDS, expected, greet
from polybasic.deploy.runtime.remote.link import Link
from polybasic.deploy.runtime.remote.messages import BrokenLinkError, Channel, Ping, Pong

MAX_MESSAGE_BYTES = 1 << 20
"""Of what the far side sends."""
SILENT_SECONDS = 15.0
"""After which a link counts as broken; a far side that works says so more often."""
RECONNECT_SECONDS = 60.0
"""In which a link that broke has to be whole again."""
_NUM_PINGS, _PING_BYTES = 5, 32_768
"""Bytes of those that measure the bandwidth: more than a message of a round, and fewer than what
would hold up the start on a slow link."""
_LEAST_SECONDS = 1e-6
"""That they take, of which a link on one machine may show none."""


@dataclass(frozen=True)
class Address:
    """Where a target listens, and what is needed to talk to it.

    Attributes:
        host: name or number.
        port: of its server.
        key: that both sides have.
        tls: trusts the far side's certificate; None sends all in the clear.
    """

    host: str
    port: int
    key: bytes
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def host_and_port(where: str) -> tuple[str, int]:
    """ "host:1234" -> ("host", 1234); numbers of IPv6 stand in brackets.

    Raises:
        UserError: it is no such text.
    """
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError("no address", where, "write HOST:PORT, as in 127.0.0.1:7800")
    return host.strip("[]"), int(port)


class RemoteTarget:
    """A chain's target on another host.

    Args:
        name: of the member.
        vocab_size: of the chain.
        chain: as `polybasic.deploy.runtime.remote.keys.identity_of` names it.
        address: of the far side.
        optimistic: stages below go on while an answer is under way.

    Attributes:
        link: measured when this was made.
        context_tokens: prompt and answer together, that the far side has caches for.
        dtype: of the target.
        reconnect_seconds: see `RECONNECT_SECONDS`.
        numbers: of blocks; none is used twice, so that an answer to one that was dropped is known
            on whatever connection it comes.

    Raises:
        UserError: nobody answers, another key, chain or protocol.
    """

    def __init__(
        self, name: str, vocab_size: int, chain: str, address: Address, optimistic: bool = True
    ) -> None:
        self.name, self.vocab_size, self.address = name, vocab_size, address
        self.optimistic, self.reconnect_seconds = optimistic, RECONNECT_SECONDS
        self._chain = chain
        try:
            channel = self.connected()
            self.link = _measured(channel)
        except BrokenLinkError as error:
            raise UserError(
                "target not reached", f"{address} ({error})", "start it, or name another address"
            ) from error
        self._idle = [channel]
        self.numbers = itertools.count(1)

    def connected(self) -> Channel:
        """A new connection, whose far side has proven the key.

        Raises:
            BrokenLinkError: nobody answers.
            UserError: another key, chain or protocol.
        """
        where = (self.address.host, self.address.port)
        try:
            connection = socket.create_connection(where, GREETING_SECONDS)
            if self.address.tls is not None:
                tls, name = self.address.tls, self.address.host
                connection = tls.wrap_socket(connection, server_hostname=name)
        except ssl.SSLError as error:
            raise UserError(
                "no TLS", f"{self.address} ({error.reason})", "check both sides' certificates"
            ) from error
        except OSError as error:
            raise BrokenLinkError(error.strerror or str(error)) from error
        channel = Channel(connection)
        try:
            welcome = greet(channel, self.address.key, self._chain)
        except BaseException:
            channel.close()
            raise
        channel.max_bytes = MAX_MESSAGE_BYTES
        self.context_tokens, self.dtype = welcome.context_tokens, welcome.dtype
        return channel

    def take(self) -> Channel:
        """A connection that no sequence uses."""
        return self._idle.pop() if self._idle else self.connected()

    def give_back(self, channel: Channel) -> None:
        """Keep a connection for the next sequence."""
        self._idle.append(channel)

    def close(self) -> None:
        """End the connections that no sequence uses."""
        while self._idle:
            self._idle.pop().close()


def _measured(channel: Channel) -> Link:
    """The least of several times each, since whatever disturbs them makes them longer."""

    def seconds(num_bytes: int) -> float:
        begin = time.perf_counter()
        channel.send(Ping(), SILENT_SECONDS, content=np.zeros(num_bytes, np.uint8))
        expected(channel.receive(SILENT_SECONDS), Pong)
        return time.perf_counter() - begin

    round_trip = min(seconds(0) for _ in range(_NUM_PINGS))
    sending = min(seconds(_PING_BYTES) for _ in range(_NUM_PINGS)) - round_trip
    return Link(round_trip, _PING_BYTES / max(sending, _LEAST_SECONDS))
