"""A hub on this machine: the endpoints that huggingface_hub asks for a model's files, over HTTP."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


@dataclass
class Repository:
    """Files of each commit; `refs` are branches and tags.

    Attributes:
        refusal: status and X-Error-Code of every answer about a file's content.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    refusal: tuple[int, str] | None = None

    def commit(self, source: Path | dict[str, bytes], *refs: str) -> str:
        """Add a commit with these files and let `refs` (main too) point to it; returns its hash."""
        if isinstance(source, Path):
            paths = (path for path in source.rglob("*") if path.is_file())
            source = {str(path.relative_to(source)): path.read_bytes() for path in paths}
        commit = hashlib.sha1(repr(sorted(source.items())).encode()).hexdigest()
        self.commits[commit] = source
        self.refs |= dict.fromkeys(("main", *refs), commit)
        return commit


@dataclass
class Hub:
    """What is served, and what was asked.

    Attributes:
        cuts: bytes after which the connection breaks, by file name; each cut happens once.
        requests: method, path and Range header of each request.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)

    def downloads(self) -> list[str]:
        """Names of the files whose content was asked for, in order of name."""
        paths = (path for method, path, _ in self.requests if method == "GET")
        return sorted({path.split("/", 5)[5] for path in paths if "/resolve/" in path})


@contextmanager
def serve() -> Iterator[Hub]:
    """Serve a hub without repositories until the block ends."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        about = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path)
        content = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = about or content
        if found is None:
            return self._refuse(404, "EntryNotFound")
        repository = self.hub.repositories.get(found[1])
        if repository is None:
            return self._refuse(401, "RepoNotFound")
        revision = found[3] if about else found[2]
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return self._refuse(404, "RevisionNotFound")
        files = repository.commits[commit]
        if about and about[2] == "revision":
            return self._answer({"id": found[1], "sha": commit, "siblings": []})
        if about:
            return self._answer(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}
                    for name, content in files.items()
                ]
            )
        if repository.refusal is not None:
            return self._refuse(*repository.refusal)
        if found[3] not in files:
            return self._refuse(404, "EntryNotFound")
        return self._send(found[3], files[found[3]], commit)

    def _send(self, name: str, content: bytes, commit: str) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(wanted[1]) if wanted else 0
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", f'"{_etag(content)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        if self.command == "HEAD":
            return
        if cuts := self.hub.cuts.get(name):
            self.wfile.write(content[first : first + cuts.pop(0)])
            self.close_connection = True
        else:
            self.wfile.write(content[first:])

    def _answer(self, content: object) -> None:
        self._write(200, json.dumps(content).encode())

    def _refuse(self, status: int, code: str) -> None:
        self._write(status, b"{}", code)

    def _write(self, status: int, body: bytes, code: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
