"""`polybasic serve`: what it refuses at its start, and how it ends."""

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import pytest

from polybasic.deploy.runtime import load
from polybasic.deploy.runtime.chain import Chain
from polybasic.recipes.cli import main as cli
from tests import forked
from tests.conftest import ChainParts
from tests.deploy.serve.serving import serving
from tests.recipes.command_line import call, refusal

NOBODY = 65534
"""The user that owns nothing."""


def test_help_names_vllms_flags() -> None:
    code, out, _ = call("serve", "--help")
    assert code == 0
    for flag in (
        *("host", "port", "api-key", "served-model-name", "max-model-len", "max-num-seqs"),
        *("dtype", "allowed-origins", "allowed-hosts", "allow-special-tokens"),
    ):
        assert f"--{flag} " in out


def test_bad_input_at_the_start_is_one_line(
    tiny_chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nowhere" in refusal("serve", tmp_path / "nowhere", "--port", 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refusal("serve", tiny_chain, "--port", port)
        assert line.startswith(f"error: cannot listen: --host 127.0.0.1 --port {port} (")
    assert "cannot listen: --host no.such.host" in refusal(
        "serve", tiny_chain, "--host", "no.such.host.invalid", "--port", 0
    )
    serve = "serve", tiny_chain, "--port", 0
    assert "keys.txt" in refusal(*serve, "--api-key-file", tmp_path / "keys.txt")
    (tmp_path / "empty.txt").write_text("\n")
    assert "no API key" in refusal(*serve, "--api-key-file", tmp_path / "empty.txt")
    assert "context out of range" in refusal(*serve, "--max-model-len", 10**6)
    assert "unknown dtype" in refusal(*serve, "--dtype", "float8")
    assert "log_format" in refusal(*serve, "--log-format", "xml")
    assert "request_seconds" in refusal(*serve, "--request-timeout", 0)
    (tmp_path / "plan.json").write_text('{"members": ["target"]}')
    assert "plan.json" in refusal(*serve, "--plan", tmp_path / "plan.json")
    monkeypatch.setattr(load, "available_bytes", lambda device: 1_000_000)
    assert "not enough memory" in refusal(*serve, "--max-num-seqs", 1000)


def test_a_key_file_that_every_user_may_read_is_told(tiny_chain: Path, tmp_path: Path) -> None:
    keys = tmp_path / "my keys.txt"
    keys.write_text("secret\n")
    serve = "serve", tiny_chain, "--port", 0, "--log-format", "xml", "--api-key-file", keys
    told = f"warning: API keys open to every user of this machine: {keys}; chmod o= '{keys}'\n"
    for mode, is_told in ((0o644, True), (0o602, True), (0o640, False), (0o600, False)):
        keys.chmod(mode)
        assert (told in call(*serve)[2]) == is_told, oct(mode)


def serve_slowly(*arguments: str) -> None:
    """`polybasic serve`, each of its passes at least 20 ms long."""
    step = Chain.step

    def slow_step(self: Chain) -> bool:
        time.sleep(0.02)
        return step(self)

    Chain.step = slow_step  # type: ignore[method-assign]
    cli.main(["serve", *arguments])


def serve_as_nobody(place: str, *arguments: str) -> None:
    """`polybasic serve`, for root as a user that owns nothing but the cache in a folder."""
    cache = Path(place, "cache")
    cache.mkdir()
    if os.geteuid() == 0:
        # Python itself may lie where others read nothing: what is imported late is imported here
        with serving(load.load_chain(arguments[0], dtype="float32", sequences=4)) as warm:
            warm.complete(prompt=[1])
        os.chown(cache, NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    os.chdir(cache)
    os.environ |= {"POLYBASIC_CACHE": str(cache), "HOME": str(cache)}
    cli.main(["serve", *arguments])


def lines_of(log: Path) -> list[str]:
    return log.read_text("utf-8").splitlines() if log.exists() else []


@contextmanager
def served(
    log: Path, *arguments: object, by: Callable[..., None] = serve_slowly, **environment: str
) -> Iterator[tuple[str, Any]]:
    """A server's address and its process, which has ended when the block has."""
    environment = {"OMP_NUM_THREADS": "1", **environment}
    given = map(str, (*arguments, "--port", 0))
    process = forked.start(by, *given, log=log, environment=environment)
    try:
        until = time.monotonic() + 60
        while not (found := re.search(r"listening at (http://[^\s;]+)", "\n".join(lines_of(log)))):
            assert process.is_alive(), lines_of(log)
            assert time.monotonic() < until
            time.sleep(0.02)
        yield found[1], process
        process.join(timeout=20)
        assert process.exitcode == 0, lines_of(log)
    finally:
        process.kill()


def test_sigterm_lets_answers_end_and_tells_the_others(tiny_chain: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    options = "--log-format", "json", "--served-model-name", "mine", "--shutdown-timeout", 1.5
    path, asked = "/v1/completions", {"prompt": "w1 w2", "ignore_eos": True, "stream": True}
    short, long = asked | {"max_tokens": 12}, asked | {"max_tokens": 120}
    headers = {"Authorization": "Bearer secret"}
    ended = {}

    def read(name: str, events: Iterator[str]) -> None:
        ended[name] = [event for event in events if event][-1]

    with served(log, tiny_chain, *options, POLYBASIC_API_KEY="secret") as (url, process):
        client = httpx2.Client(base_url=url, headers=headers, timeout=30)
        with (
            client,
            ThreadPoolExecutor(2) as pool,
            client.stream("POST", path, json=short, headers={"X-Request-Id": "short"}) as response,
            client.stream("POST", path, json=long, headers={"X-Request-Id": "long"}) as other,
        ):
            for name, answer in (("short", response), ("long", other)):
                pool.submit(read, name, answer.iter_lines())
            named = client.get("/v1/models", headers={"Host": "example.org"})
            assert named.status_code == 200, "who has a key may use any name"
            os.kill(process.pid, signal.SIGTERM)
            while client.get("/ready").status_code == 200:
                assert process.is_alive()
            refused = client.post(path, json=short)
            pool.shutdown()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    assert ended["short"] == "data: [DONE]"
    assert json.loads(ended["long"].removeprefix("data: "))["error"]["code"] == "shutting_down"
    lines = lines_of(log)
    for expected in ("as mine: target", "plan: target <- intermediate <- draft", "memory: "):
        assert any(expected in line for line in lines)
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    told = {entry.get("request_id"): entry for entry in logged}
    assert told["long"]["status"] == told["short"]["status"] == 200
    assert told["short"]["completion_tokens"] == 12
    assert told["long"]["completion_tokens"] < 120
    assert told["short"]["client"] == "key 0"
    assert "Traceback" not in "".join(lines)


def test_a_copy_of_the_chains_folder_alone_is_served_elsewhere_to_another_user(
    tiny_chain_parts: ChainParts, tmp_path: Path
) -> None:
    run, models = tmp_path / "run", tiny_chain_parts.target.parent
    for name, copy_target in (("chain", "auto"), ("referring", False)):
        tiny_chain_parts.package(run / name, copy_target=copy_target)
    asked = {"prompt": [1, 2], "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    expected = load.load_chain(run / "chain", dtype="float32").generate(
        [1, 2], max_new_tokens=8, ignore_eos=True, temperature=0
    )
    with TemporaryDirectory() as folder:
        elsewhere = Path(folder)
        elsewhere.chmod(0o755)
        for name in ("chain", "referring"):
            shutil.copytree(run / name, elsewhere / name)
        shutil.rmtree(run)
        shutil.rmtree(models)
        given = elsewhere, elsewhere / "chain", "--dtype", "float32", "--max-num-seqs", 2
        with served(tmp_path / "log.txt", *given, by=serve_as_nobody) as (url, process):
            answer = httpx2.post(f"{url}/v1/completions", json=asked, timeout=30).json()
            if os.geteuid() == 0:
                assert f"Uid:\t{NOBODY}\t" in Path(f"/proc/{process.pid}/status").read_text()
            os.kill(process.pid, signal.SIGTERM)
        assert answer["choices"][0]["text"] == expected.text
        line = refusal("serve", elsewhere / "referring", "--port", 0)
        assert line.startswith("error: target is not there: ")


def test_a_second_signal_ends_at_once(tiny_chain: Path, tmp_path: Path) -> None:
    asked = {"prompt": "w1 w2", "ignore_eos": True, "stream": True, "max_tokens": 120}
    options = "--shutdown-timeout", 600, "--log-format", "text"
    with (
        served(tmp_path / "log.txt", tiny_chain, *options) as (url, process),
        httpx2.stream("POST", f"{url}/v1/completions", json=asked, timeout=30) as answer,
    ):
        # without a key, at an address of this machine alone
        elsewhere = httpx2.get(f"{url}/v1/models", headers={"Host": "evil.example"})
        assert elsewhere.json()["error"]["code"] == "host_not_allowed"
        os.kill(process.pid, signal.SIGINT)
        while httpx2.get(f"{url}/ready").status_code == 200:
            assert process.is_alive()
        os.kill(process.pid, signal.SIGINT)
        assert "shutting_down" in [line for line in answer.iter_lines() if line][-1]
