"""`polybasic serve-target` and `--remote`: what they refuse at their start, and an answer."""

import socket
import threading
from pathlib import Path

import pytest

from polybasic.deploy.runtime.load import load_target
from polybasic.deploy.runtime.remote.keys import read_key
from polybasic.deploy.runtime.remote.server import TargetServer
from tests.recipes.command_line import call, refusal


def test_bad_input_at_the_start_is_one_line(tiny_chain: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    serve = "serve-target", tiny_chain, "--key-file", key
    assert "key not found" in refusal(*serve) or "no such" in refusal(*serve).lower()
    key.write_text("secret")
    assert "key is too short: 6 characters" in refusal(*serve)
    key.write_text("0" * 32)
    key.chmod(0o644)
    open_key = f"warning: key open to every user of this machine: {key}; chmod o= {key}"
    assert open_key in call(*serve, "--listen", "7800")[2].splitlines()
    key.chmod(0o600)
    assert open_key not in call(*serve, "--listen", "7800")[2]
    assert "half of a certificate" in refusal(*serve, "--tls-cert", key)
    assert "unusable certificate" in refusal(*serve, "--tls-cert", key, "--tls-key", key)
    assert "no address: 7800" in refusal(*serve, "--listen", "7800")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"cannot listen: {where} (" in refusal(*serve, "--listen", where)
    generate = "generate", tiny_chain, "-p", "w5"
    assert "no remote target: --key-file" in refusal(*generate, "--key-file", key)
    assert "no key: remote=127.0.0.1:1" in refusal(*generate, "--remote", "127.0.0.1:1")


def test_an_answer_from_elsewhere(tiny_chain: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0" * 32)
    listening = socket.create_server(("127.0.0.1", 0))
    server = TargetServer(load_target(tiny_chain, dtype="float32"), read_key(key), listening)
    threading.Thread(target=server.run).start()
    asked = "generate", tiny_chain, "-p", "w5 w9", "--max-new-tokens", 20, "--dtype", "float32"
    there = "--remote", f"127.0.0.1:{listening.getsockname()[1]}", "--key-file", key
    try:
        code, here, _ = call(*asked)
        assert code == 0
        code, out, said = call(*asked, *there, "--no-optimism", "--verify")
    finally:
        server.close()
    assert (code, out) == (0, here)
    assert "identical to the target alone" in said


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_other_commands_know_remote_targets(command: str) -> None:
    code, out, _ = call(command, "--help")
    assert code == 0
    assert "--remote " in out
    assert "--key-file " in out
