"""What a far side refuses in one line, and lives on; and what a near side refuses."""

import json
import shutil
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Plan, Tree
from polybasic.deploy import Chain
from polybasic.deploy.runtime.remote import messages
from polybasic.deploy.runtime.remote.keys import client_tls, greet, identity_of, server_tls
from polybasic.deploy.runtime.remote.messages import (
    Begin,
    BrokenLinkError,
    Channel,
    Failure,
    Verify,
)
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.conftest import ChainParts, write_target
from tests.deploy.runtime.remote.far import KEY, Far, key_file, serving

SECONDS = 5


@pytest.fixture
def near(far: Far) -> Iterator[Chain]:
    """Of which an answer must still be right at the end."""
    near = far.near()
    expected = near.generate([5, 9], max_new_tokens=10).token_ids
    yield near
    assert near.generate([5, 9], max_new_tokens=10).token_ids == expected


def greeted(far: Far) -> Channel:
    channel = Channel(socket.create_connection(far.address))
    greet(channel, KEY.encode(), identity_of(far.chain.manifest))
    return channel


def refusal(channel: Channel) -> str:
    """What the far side says, after which the connection ends."""
    content = channel.receive(SECONDS).content
    assert isinstance(content, Failure)
    with pytest.raises(BrokenLinkError, match="ended"):
        channel.receive(SECONDS)
    return f"{content.what}: {content.where}"


def test_another_key_is_refused(far: Far, near: Chain, tmp_path: Path) -> None:
    other = key_file(tmp_path, "f" * 32)
    with pytest.raises(UserError, match="wrong key: the near side's proof"):
        far.near(key_file=other)


def test_a_far_side_without_the_key_is_refused(far: Far) -> None:
    """It takes any proof, and cannot give its own."""

    def pretend() -> None:
        with listening, listening.accept()[0] as connection:
            channel = Channel(connection)
            channel.receive(SECONDS)
            channel.send(messages.Challenge(nonce="0" * 64), SECONDS)
            channel.receive(SECONDS)
            welcome = messages.Welcome(proof="0" * 64, context_tokens=100, dtype="float32")
            channel.send(welcome, SECONDS)

    listening = socket.create_server(("127.0.0.1", 0))
    where = f"127.0.0.1:{listening.getsockname()[1]}"
    threading.Thread(target=pretend).start()
    with pytest.raises(UserError, match="wrong key: the far side's proof"):
        far.near(remote=where)


def test_a_short_key_and_no_key_are_refused(far: Far, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="key is too short"):
        far.near(key_file=key_file(tmp_path, "secret"))
    with pytest.raises(UserError, match="no key"):
        far.near(key_file=None)


def test_another_target_is_refused(
    far: Far, near: Chain, tiny_chain_parts: ChainParts, tmp_path: Path
) -> None:
    shutil.rmtree(tiny_chain_parts.target)
    write_target(tiny_chain_parts.target, seed=7)
    other = tmp_path / "other_chain"
    parts = [part for part in tiny_chain_parts.parts if part.kind == "awq"]
    plan = Plan(members=("target",), tree=Tree(depth=1, top_k=1, rows=2))
    tiny_chain_parts.package(other, parts=parts, plan=plan, training={})
    with pytest.raises(UserError, match="another chain"):
        far.near(other)


def test_another_protocol_is_refused(
    far: Far, near: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = Channel(socket.create_connection(far.address))
    channel.send(messages.Hello(protocol="polybasic.remote/9", nonce="0" * 64), SECONDS)
    assert refusal(channel).startswith("other protocol")


def _of_kind(kind: str, fields: str) -> bytes:
    header = json.dumps({"__metadata__": {"kind": kind, "fields": fields}}).encode()
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize(
    "frame",
    [
        b"\0\0\0\0",
        struct.pack(">I", 20) + b"\xff" * 20,
        struct.pack(">I", 1 << 30),
        b"GET / HTTP/1.1\r\n\r\n",
        *(
            struct.pack(">I", len(message)) + message
            for message in (
                _of_kind("Unknown", "{}"),
                _of_kind("Hello", "{"),
                _of_kind("Hello", '{"protocol": 1}'),
                _of_kind("Ping", "{}"),
                _of_kind("Hello", "[" * 2000),
            )
        ),
    ],
)
def test_malformed_frames_are_refused(far: Far, near: Chain, frame: bytes) -> None:
    with socket.create_connection(far.address) as connection:
        connection.sendall(frame)
        answer = connection.recv(65536)
    assert b"malformed message" in answer


def test_what_has_no_tag_of_the_key_is_refused(far: Far, near: Chain) -> None:
    channel = greeted(far)
    assert channel._tags is not None
    channel._tags._key = b"another"
    channel.send(messages.Ping(), SECONDS)
    channel._tags = None  # the answer is tagged by the right key
    message = channel._socket.recv(65536)
    assert b"its tag is wrong" in message


def test_a_message_that_is_repeated_is_refused(far: Far, near: Chain) -> None:
    channel = greeted(far)
    channel.send(messages.Ping(), SECONDS)
    channel.receive(SECONDS)
    assert channel._tags is not None
    channel._tags._num_sent -= 1
    channel.send(messages.Ping(), SECONDS)
    assert "its tag is wrong" in refusal(channel)


GREEDY, IDS = Sampling(), {"ids": np.array([5, 9], np.int32)}


@pytest.mark.parametrize(
    ("sent", "arrays", "reason"),
    [
        (Begin(num_prompt_tokens=2, sampling=GREEDY), {}, "no token ids"),
        (Begin(num_prompt_tokens=2, sampling=GREEDY), {"ids": np.zeros((2, 2))}, "no token ids"),
        (
            Begin(num_prompt_tokens=2, sampling=GREEDY),
            {"ids": np.array([-1], np.int32)},
            "no token ids",
        ),
        (
            Begin(num_prompt_tokens=2, sampling=GREEDY),
            {"ids": np.array([64, 1], np.int32)},
            "token 64",
        ),
        (Begin(num_prompt_tokens=3, sampling=GREEDY), IDS, "a prompt of 3"),
        (Begin(num_prompt_tokens=2, sampling=Sampling(temperature=1.0)), IDS, "without a seed"),
        (
            Begin(num_prompt_tokens=1, sampling=GREEDY),
            {"ids": np.ones(200, np.int32)},
            "does not fit the context",
        ),
        (Verify(number=1, position=1), IDS, "before a sequence"),
        (messages.Welcome(proof="0" * 64, context_tokens=1, dtype="x"), {}, "Welcome to a target"),
    ],
)
def test_messages_that_mean_nothing_are_refused(
    far: Far, near: Chain, sent: Any, arrays: Any, reason: str
) -> None:
    channel = greeted(far)
    channel.send(sent, SECONDS, **arrays)
    assert reason in refusal(channel)


def test_a_block_for_another_place_costs_no_pass(far: Far, near: Chain) -> None:
    channel = greeted(far)
    begin = Begin(num_prompt_tokens=2, sampling=GREEDY)
    channel.send(begin, SECONDS, ids=np.array([5, 9], np.int32))
    kept = []
    for position, first in ((1, 9), (1, 9), (2, 63), (5, 9)):
        asked = Verify(number=1, position=position)
        channel.send(asked, SECONDS, ids=np.array([first, 1], np.int32))
        answer = channel.receive(SECONDS).content
        assert isinstance(answer, messages.Answer)
        kept.append(answer.num_kept >= 0)
    assert kept == [True, False, False, False]


def test_a_connection_without_messages_is_ended(target: Chain, near_folder: Path) -> None:
    with serving(target, near_folder, idle_seconds=0.1) as far:
        near = far.near()
        channel = greeted(far)
        with pytest.raises(BrokenLinkError, match="ended"):
            channel.receive(SECONDS)
        # a near side that has been idle does not notice
        assert near.generate([5, 9], max_new_tokens=5).token_ids


def test_what_needs_more_than_token_ids_is_refused(near: Chain) -> None:
    with pytest.raises(UserError, match="rule that a remote target does not know"):
        near.generate([5, 9], max_new_tokens=9, temperature=1.0, rule="block")
    with pytest.raises(UserError, match="no log-probabilities of prompts"):
        near.generate([5, 9], max_new_tokens=9, prompt_logprobs=1)
    with pytest.raises(UserError, match="the head reads states of the target"):
        near.generate([5, 9], max_new_tokens=9, members=["target", "draft"])
    with pytest.raises(UserError, match="the target runs elsewhere"):
        _ = near.engine.models.target


def test_addresses_and_contexts_that_cannot_be_are_refused(
    far: Far, target: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="no address"):
        far.near(remote="host")
    monkeypatch.setattr(target.engine, "context_tokens", 50)
    assert far.near().engine.context_tokens == 50
    with pytest.raises(UserError, match="context out of range"):
        far.near(context_tokens=60)
    far.server.close()
    with pytest.raises(UserError, match="target not reached"):
        far.near()


def test_tls_hides_tokens_from_who_reads_along(
    target: Chain,
    near_folder: Path,
    local: Chain,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = {}
    for name in ("far", "other"):
        certificate, key = tmp_path / f"{name}.pem", tmp_path / f"{name}.pem.key"
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
        subject = ["-subj", "/CN=far", "-addext", "subjectAltName=IP:127.0.0.1"]
        files = ["-keyout", str(key), "-out", str(certificate)]
        subprocess.run([*command.split(), *subject, *files], check=True, capture_output=True)
        paths[name] = certificate, key
    with serving(target, near_folder, tls=server_tls(*paths["far"])) as far:
        near = far.near(tls_certificate=str(paths["far"][0]))
        encrypted = near.generate([5, 9], max_new_tokens=20, temperature=0.0).token_ids
        with pytest.raises(UserError, match="no TLS"):
            far.near(tls_certificate=str(paths["other"][0]))
        with pytest.raises(UserError, match="target not reached"):
            far.near()
    assert encrypted == local.generate([5, 9], max_new_tokens=20, temperature=0.0).token_ids
    with pytest.raises(UserError, match="unusable certificate"):
        client_tls(tmp_path / "none.pem")
    assert isinstance(client_tls(paths["far"][0]), ssl.SSLContext)
    warning = "warning: private key open to every user of this machine"
    assert warning not in capsys.readouterr().err
    paths["far"][1].chmod(0o644)
    server_tls(*paths["far"])
    assert warning in capsys.readouterr().err
