"""The far side: a target that verifies blocks of others' stages.

A thread for each connection reads its messages; one thread runs the passes of all sequences,
together where they wait for one at the same time.
"""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as NotYetError

from polybasic.chain.base.errors import UserError
from polybasic.chain.kernels.product_times import name_of
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.listening import bound
from polybasic.deploy.runtime.remote.keys import GREETING_SECONDS, identity_of, receive
from polybasic.deploy.runtime.remote.messages import (
    Begin,
    BrokenLinkError,
    Channel,
    End,
    Failure,
    Ping,
    Pong,
    Received,
    Verify,
    Working,
    malformed,
)
from polybasic.deploy.runtime.remote.runner import RemoteRunner
from polybasic.deploy.runtime.remote.sequence import HeldSequence, TargetReply
from polybasic.deploy.runtime.remote.target import host_and_port
from polybasic.deploy.runtime.rounds.passes import Passes
from polybasic.deploy.runtime.slots import BusyError

IDLE_SECONDS = 600.0
"""After which a connection without messages is ended."""
WORKING_SECONDS = 3.0
"""Between the signs of life while an answer takes its time."""
ENDING_SECONDS = 5.0
"""In which a near side that was refused has to end the connection."""
_SPARE_BYTES = 65536
"""Of a message beside the token ids of a whole context."""
_MAX_WAITING = 16
"""Connections beyond those of sequences, before they have proven the key, or between answers."""
_PAUSE_SECONDS = 0.5
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""After 30 seconds a near side that is gone holds no caches."""


def listening_at(where: str) -> socket.socket:
    """A socket that listens at HOST:PORT.

    Raises:
        UserError: no such address, or another process has it.
    """
    listening = bound(*host_and_port(where), where, "port 0")
    listening.listen()
    return listening


class TargetServer:
    """Serves the target of a chain to stages elsewhere.

    Args:
        chain: of which the target is loaded.
        key: that near sides have.
        listening: a socket that listens.
        tls: shows a certificate; None sends in the clear.
        idle_seconds: see `IDLE_SECONDS`.
        say: takes a line for people.
    """

    def __init__(
        self,
        chain: Chain,
        key: bytes,
        listening: socket.socket,
        tls: ssl.SSLContext | None = None,
        idle_seconds: float = IDLE_SECONDS,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.chain, self._key, self._listening, self._tls = chain, key, listening, tls
        self._idle_seconds, self._say = idle_seconds, say
        self._runner = RemoteRunner()
        self._places = threading.BoundedSemaphore(2 * chain.engine.slots.most + _MAX_WAITING)
        self._is_closed = False
        self._open: dict[threading.Thread, socket.socket] = {}

    def run(self) -> None:
        """Take connections until `close`."""
        while True:
            try:
                connection, (host, *_) = self._listening.accept()
            except OSError as error:
                if self._is_closed:
                    return
                self._say(f"no connection taken ({error.strerror})")  # too many files, for one
                time.sleep(_PAUSE_SECONDS)
                continue
            if not self._places.acquire(blocking=False):
                self._say(f"{host}: refused, too many connections")
                connection.close()
                continue
            thread = threading.Thread(target=self._talk, args=(connection, host), daemon=True)
            self._open[thread] = connection
            thread.start()

    def close(self) -> None:
        """End all connections, after the pass that is under way, and take no more."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listening.close()
        for thread, connection in list(self._open.items()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()
        self._runner.close()

    def _talk(self, connection: socket.socket, host: str) -> None:
        """Serve one connection to its end."""
        sequence = HeldSequence(self.chain)
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            connection.settimeout(GREETING_SECONDS)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
                self._open[threading.current_thread()] = connection
            self._serve(Channel(connection), sequence)
        except (BrokenLinkError, OSError) as error:
            self._say(f"{host}: ended ({error})")
        except UserError as error:
            self._say(f"{host}: refused: {error}")
        finally:
            self._runner.submit(sequence.end())
            connection.close()
            self._places.release()
            del self._open[threading.current_thread()]

    def _serve(self, channel: Channel, sequence: HeldSequence) -> None:
        engine = self.chain.engine
        try:
            dtype, chain = name_of(engine.models.target.dtype), identity_of(self.chain.manifest)
            receive(channel, self._key, chain, engine.context_tokens, dtype)
            channel.max_bytes = 4 * engine.context_tokens + _SPARE_BYTES
            while True:
                message = channel.receive(self._idle_seconds)
                if isinstance(message.content, Ping):
                    channel.send(Pong(), GREETING_SECONDS)
                elif (reply := self._reply(channel, sequence, message)) is not None:
                    channel.send(reply.answer, GREETING_SECONDS, **reply.arrays)
        except UserError as error:
            with contextlib.suppress(BrokenLinkError):
                channel.send(Failure.of(error, isinstance(error, BusyError)), GREETING_SECONDS)
                channel.end_sending(ENDING_SECONDS)
            raise

    def _reply(
        self, channel: Channel, sequence: HeldSequence, message: Received
    ) -> TargetReply | None:
        """What the sequence answers, with signs of life until then."""
        content = message.content
        work: Passes[TargetReply | None]
        if isinstance(content, Begin):
            work = sequence.begin(content, message.ids)
        elif isinstance(content, Verify):
            work = sequence.verify(content, message.ids)
        elif isinstance(content, End):
            work = sequence.end()
        else:
            raise malformed(f"{type(content).__name__} to a target")
        future = self._runner.submit(work)
        try:
            while True:
                try:
                    return future.result(WORKING_SECONDS)
                except NotYetError:
                    channel.send(Working(), GREETING_SECONDS)
                except CancelledError as error:
                    raise BrokenLinkError("the server ends") from error
        finally:
            future.cancel()
