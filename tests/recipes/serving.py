"""Files over HTTP on this machine, for what a recipe downloads."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


@contextmanager
def served(
    folder: Path, handler: type[SimpleHTTPRequestHandler] = SimpleHTTPRequestHandler
) -> Iterator[str]:
    """The URL under which the files of `folder` are, as long as the block runs."""
    answering = partial(handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), answering) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
