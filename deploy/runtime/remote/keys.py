"""Who may talk: both sides prove that they have the same key, without sending it.

Proofs are HMAC-SHA256 of the role, both nonces and the chain's identity, so that none can be used
twice, or by the other side. A key of the connection, derived in the same way, tags what follows.
"""

import hmac
import secrets
import ssl
from pathlib import Path
from typing import TypeVar

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import read_secret, sha256_of_object, warn_of_readers
from polybasic.chain.formats.manifest import Manifest
from polybasic.deploy.runtime.remote.messages import (
    PROTOCOL,
    Challenge,
    Channel,
    Failure,
    Hello,
    Proof,
    Received,
    Welcome,
    malformed,
)

MIN_KEY_CHARACTERS = 32
GREETING_SECONDS = 10.0
"""That each message of a greeting may take."""
Kind = TypeVar("Kind")
_NEAR, _FAR, _CONNECTION = b"near", b"far", b"connection"


def read_key(path: Path) -> bytes:
    """The key in a file, with a warning where every user of the machine may read it.

    Raises:
        UserError: the file cannot be read, or its key is short enough to be guessed.
    """
    key = read_secret(path, "key").strip()
    if len(key) < MIN_KEY_CHARACTERS:
        raise UserError(
            "key is too short",
            f"{len(key)} characters in {path}",
            f"write {MIN_KEY_CHARACTERS} or more: openssl rand -hex 32 > {path}",
        )
    return key.encode()


def identity_of(manifest: Manifest) -> str:
    """Names the target and the tokenizer of a chain; chains that differ in drafters share it."""
    target = manifest.members[0]
    return sha256_of_object({"target": target.files, "tokenizer": manifest.tokenizer.files})


def greet(channel: Channel, key: bytes, chain: str) -> Welcome:
    """Prove the key to the far side, and have it proven.

    Args:
        chain: as `identity_of` names it.

    Raises:
        UserError: another key, another chain or another protocol.
        BrokenLinkError: no answer.
    """
    nonce = secrets.token_hex(32)
    channel.send(Hello(protocol=PROTOCOL, nonce=nonce), GREETING_SECONDS)
    nonces = nonce + expected(channel.receive(GREETING_SECONDS), Challenge).nonce
    channel.send(Proof(proof=_proof(key, _NEAR, nonces, chain), chain=chain), GREETING_SECONDS)
    welcome = expected(channel.receive(GREETING_SECONDS), Welcome)
    if not hmac.compare_digest(welcome.proof, _proof(key, _FAR, nonces, chain)):
        raise _wrong_key("the far side's proof")
    channel.secure(_connection_key(key, nonces), _NEAR, _FAR)
    return welcome


def receive(channel: Channel, key: bytes, chain: str, context_tokens: int, dtype: str) -> None:
    """Take a near side's greeting, or refuse it.

    Raises:
        UserError: as `greet`.
        BrokenLinkError: no greeting.
    """
    hello = expected(channel.receive(GREETING_SECONDS), Hello)
    if hello.protocol != PROTOCOL:
        raise UserError(
            "other protocol",
            f"{hello.protocol[:40]} asked of {PROTOCOL}",
            "install the same polybasic on both sides",
        )
    challenge = secrets.token_hex(32)
    channel.send(Challenge(nonce=challenge), GREETING_SECONDS)
    nonces = hello.nonce + challenge
    given = expected(channel.receive(GREETING_SECONDS), Proof)
    # the chain that was named, so that a wrong key and another chain are told apart
    if not hmac.compare_digest(given.proof, _proof(key, _NEAR, nonces, given.chain)):
        raise _wrong_key("the near side's proof")
    if given.chain != chain:
        raise UserError(
            "another chain",
            f"target and tokenizer {given.chain[:8]}… near, {chain[:8]}… far",
            "let both sides have chains of the same target",
        )
    proof = _proof(key, _FAR, nonces, chain)
    welcome = Welcome(proof=proof, context_tokens=context_tokens, dtype=dtype)
    channel.send(welcome, GREETING_SECONDS)
    channel.secure(_connection_key(key, nonces), _FAR, _NEAR)


def expected(message: Received, kind: type[Kind]) -> Kind:
    """The content of a message of this kind.

    Raises:
        UserError: it is of another kind, or says what is wrong.
    """
    if isinstance(message.content, kind):
        return message.content
    if isinstance(message.content, Failure):
        raise UserError(message.content.what, message.content.where, message.content.do)
    raise malformed(f"{type(message.content).__name__} in the place of {kind.__name__}")


def server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS of a far side that shows a certificate; warns of a key that every user may read.

    Raises:
        UserError: the files are no certificate and its key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise _unusable(f"{certificate} and {key}", error) from error
    warn_of_readers(key, "private key")
    return context


def client_tls(certificate: Path) -> ssl.SSLContext:
    """TLS of a near side that trusts this certificate, or what it has signed, and no other.

    Raises:
        UserError: the file is no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(certificate)
    except (OSError, ssl.SSLError) as error:
        raise _unusable(f"{certificate}", error) from error
    return context


def _proof(key: bytes, role: bytes, nonces: str, chain: str) -> str:
    return hmac.digest(key, b"|".join((role, nonces.encode(), chain.encode())), "sha256").hex()


def _connection_key(key: bytes, nonces: str) -> bytes:
    return hmac.digest(key, b"|".join((_CONNECTION, nonces.encode())), "sha256")


def _wrong_key(whose: str) -> UserError:
    return UserError("wrong key", whose, "give both sides the same key file")


def _unusable(where: str, error: Exception) -> UserError:
    return UserError(
        "unusable certificate", f"{where} ({error})", "give PEM files of a certificate and its key"
    )
