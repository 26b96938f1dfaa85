"""A TCP proxy that makes a link of a loopback: it delays all bytes, and may limit their rate.

    python benchmarks/delaying_proxy.py HOST:PORT [--milliseconds 20] [--megabits 100]

Prints the port that it listens on. What it reads is handed on half a round trip later, in either
direction; meanwhile it reads on, so that any number of bytes may be under way, as on a long line.
"""

import argparse
import asyncio
import selectors
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

READ_BYTES = 1 << 16


async def hand_on(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    seconds: float,
    bytes_per_second: float,
) -> None:
    """Write what is read, delayed, until it ends.

    Args:
        seconds: between reading a byte and writing it.
        bytes_per_second: that leave at most, one after the other.
    """
    clock = asyncio.get_running_loop().time
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, read = await under_way.get()
            await asyncio.sleep(due - clock())
            if not read:
                return
            writer.write(read)
            await writer.drain()

    delivering = asyncio.ensure_future(deliver())
    has_left, read = 0.0, b"-"
    try:
        while read:
            read = await reader.read(READ_BYTES)
            has_left = max(has_left, clock()) + len(read) / bytes_per_second
            under_way.put_nowait((has_left + seconds, read))
        await delivering
    except ConnectionError:
        delivering.cancel()  # either side is gone, and the other one is told so
    finally:
        writer.close()


async def serve(host: str, port: int, seconds: float, bytes_per_second: float) -> None:
    """Accept connections and hand on what comes, until this is cancelled.

    Args:
        host: behind the link, with `port`.
        seconds: of a round trip.
    """

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(
            hand_on(reader, far_writer, seconds / 2, bytes_per_second),
            hand_on(far_reader, writer, seconds / 2, bytes_per_second),
        )

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


@contextmanager
def delaying_proxy(
    host: str, port: int, seconds: float, bytes_per_second: float = float("inf")
) -> Iterator[int]:
    """A proxy in a process of its own: the port of 127.0.0.1 that it listens on."""
    words = [f"{host}:{port}", f"--milliseconds={1e3 * seconds}"]
    words += [f"--megabits={8e-6 * bytes_per_second}"]
    with subprocess.Popen(
        [sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("address", metavar="HOST:PORT", help="that all is handed on to")
    parser.add_argument("--milliseconds", type=float, default=0.0, help="of a round trip")
    parser.add_argument("--megabits", type=float, default=float("inf"), help="a second, at most")
    arguments = parser.parse_args()
    host, _, port = arguments.address.rpartition(":")
    serving = serve(host, int(port), 1e-3 * arguments.milliseconds, 1e6 / 8 * arguments.megabits)
    # epoll's timeouts are whole milliseconds, select's are not
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    loop.run_until_complete(serving)


if __name__ == "__main__":
    main()
