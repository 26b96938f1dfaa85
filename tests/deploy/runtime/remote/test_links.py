"""Links that break, or are silent: no token is lost or comes twice."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.deploy import Chain
from polybasic.deploy.runtime.remote import session
from tests.deploy.runtime.remote.far import Far, serving

PROMPT = [5, 9, 2, 40]


@contextmanager
def piped(far: Far, is_whole: threading.Event) -> Iterator[str]:
    """HOST:PORT of a link to a far side, which carries nothing unless it is whole."""
    listening = socket.create_server(("127.0.0.1", 0))
    made: list[socket.socket] = [listening]

    def carry(source: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while part := source.recv(65536):
                if is_whole.is_set():
                    other.sendall(part)

    def run() -> None:
        with suppress(OSError):
            while True:
                near, _ = listening.accept()
                away = socket.create_connection(far.address)
                made.extend((near, away))
                for ends in ((near, away), (away, near)):
                    threading.Thread(target=carry, args=ends, daemon=True).start()

    threading.Thread(target=run, daemon=True).start()
    yield f"127.0.0.1:{listening.getsockname()[1]}"
    for connection in made:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


@pytest.mark.parametrize("optimistic", [True, False])
def test_a_server_that_is_started_again_goes_on(
    local: Chain, target: Chain, near_folder: Path, optimistic: bool
) -> None:
    sampling = {"temperature": 1.0, "seed": 6}
    expected = local.generate(PROMPT, max_new_tokens=60, **sampling).token_ids
    with serving(target, near_folder) as far:
        near = far.near(optimistic=optimistic)
        stream = near.stream(PROMPT, max_new_tokens=60, **sampling)
        found = next(stream).token_ids
    with serving(target, near_folder, port=far.address[1]):
        for piece in stream:
            found += piece.token_ids
    assert found == expected
    assert stream.statistics.num_tokens == len(expected)


def test_a_link_that_stays_broken_ends_with_what_was_given(
    local: Chain, target: Chain, near_folder: Path
) -> None:
    with serving(target, near_folder) as far:
        near = far.near()
        assert near.engine.models.remote is not None
        near.engine.models.remote.reconnect_seconds = 0.1
        stream = near.stream(PROMPT, max_new_tokens=60, temperature=0.0)
        found = next(stream).token_ids
    with pytest.raises(UserError, match="link to the target is broken") as error:
        found += [token for piece in stream for token in piece.token_ids]
    assert f"after {len(found)} tokens" in str(error.value)
    expected = local.generate(PROMPT, max_new_tokens=60, temperature=0.0).token_ids
    assert found == expected[: len(found)]


def test_a_link_that_is_silent_counts_as_broken(
    local: Chain,
    target: Chain,
    near_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = local.generate(PROMPT, max_new_tokens=60, temperature=0.0).token_ids
    is_whole = threading.Event()
    is_whole.set()
    with serving(target, near_folder) as far, piped(far, is_whole) as where:
        near = far.near(remote=where)
        stream = near.stream(PROMPT, max_new_tokens=60, temperature=0.0)
        found = next(stream).token_ids
        monkeypatch.setattr(session, "SILENT_SECONDS", 0.2)
        is_whole.clear()
        threading.Timer(0.1, is_whole.set).start()  # what was sent meanwhile is lost
        for piece in stream:
            found += piece.token_ids
    assert found == expected


def test_a_far_side_that_works_long_is_no_broken_link(
    local: Chain,
    target: Chain,
    near_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from polybasic.deploy.runtime.remote import server

    monkeypatch.setattr(session, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(server, "WORKING_SECONDS", 0.05)
    with serving(target, near_folder) as far:
        near = far.near()
        runner, is_free = far.server._runner, threading.Event()
        far.server._runner.submit(_held(is_free))
        threading.Timer(0.7, is_free.set).start()
        found = near.generate(PROMPT, max_new_tokens=10, temperature=0.0).token_ids
        assert far.server._runner is runner
        assert not [line for line in far.said if "ended" in line]
    assert found == local.generate(PROMPT, max_new_tokens=10, temperature=0.0).token_ids


def _held(is_free: threading.Event):  # type: ignore[no-untyped-def]
    """Work that keeps the thread of all passes."""
    is_free.wait(5)
    yield from ()
