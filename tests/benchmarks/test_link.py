"""The proxy that makes a link of a loopback."""

import socket
import threading
import time

import pytest

from tests.benchmarks.scripts import load_script

delaying_proxy = load_script("delaying_proxy").delaying_proxy


@pytest.mark.parametrize("seconds", [0.0, 0.04])
def test_bytes_are_delayed_and_many_may_be_under_way(seconds: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def echo() -> None:
            connection, _ = listening.accept()
            while part := connection.recv(4096):
                connection.sendall(part)
            connection.close()

        thread = threading.Thread(target=echo)
        thread.start()
        with delaying_proxy("127.0.0.1", listening.getsockname()[1], seconds) as port:
            near = socket.create_connection(("127.0.0.1", port))
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            took: list[float] = []
            for sent in (b"one", b"two", b"three"):
                began = time.perf_counter()
                near.sendall(sent)
                assert near.recv(16) == sent
                took.append(time.perf_counter() - began)
            assert min(took) >= seconds
            assert min(took) < seconds + 0.03
            began, received = time.perf_counter(), b""
            for number in range(20):
                near.sendall(bytes([number]))
            while len(received) < 20:
                received += near.recv(64)
            assert received == bytes(range(20))
            assert time.perf_counter() - began < seconds + 0.4, "not one after the other"
            near.shutdown(socket.SHUT_WR)
            assert near.recv(16) == b"", "the end is handed on, too"
            near.close()
        thread.join()
