"""Single tokens as text and bytes, and an answer's text shared out among its tokens."""

from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from polybasic.deploy.runtime.rounds.stopping import AnswerText


class TokenTexts:
    """Each token by itself, as log-probabilities name them.

    Args:
        tokenizer: the chain's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {id: token.content for id, token in added.items()}
        self._bytes = self.byte_alphabet() if isinstance(tokenizer.decoder, ByteLevel) else None
        # behind another token, so that what begins a text (a dropped blank) does not show
        self._before = next(
            (id for id in range(256, 0, -1) if tokenizer.decode([id]).strip().isalnum()), None
        )
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Its bytes, which may be a part of a character."""
        if token not in self._known:
            self._known[token] = self._found(token)
        return self._known[token]

    def text_of(self, token: int) -> str:
        """Its text; bytes that are no whole character become U+FFFD."""
        return self.bytes_of(token).decode("utf-8", "replace")

    @staticmethod
    def byte_alphabet() -> dict[str, int]:
        """The character that stands for each byte in byte-level vocabularies -> the byte."""
        shown = {byte: chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
        others = [byte for byte in range(256) if byte not in shown]
        shown |= {byte: chr(256 + number) for number, byte in enumerate(others)}
        return {character: byte for byte, character in shown.items()}

    def _found(self, token: int) -> bytes:
        if token in self._special:
            return self._special[token].encode()
        name = self.tokenizer.id_to_token(token)
        if name is None:
            return b""
        if self._bytes is not None and all(character in self._bytes for character in name):
            return bytes(self._bytes[character] for character in name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        before = [] if self._before is None else [self._before]
        return self.tokenizer.decode([*before, token])[
            len(self.tokenizer.decode(before)) :
        ].encode()


@dataclass(frozen=True)
class Shown:
    """A token whose text has been given out."""

    text: str
    token: int
    member: str


class SharedText:
    """Says which token each part of an answer's text came with.

    A token is told once, when all of its text has been given out or the answer has ended; the texts
    of all tokens together are the answer's text, for each to be shown where it belongs.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoded = AnswerText(tokenizer)
        self._pending: list[tuple[int, str, int]] = []
        self._given = ""
        self._told = 0

    def add(self, text: str, tokens: list[int], members: list[str]) -> list[Shown]:
        """The tokens that are told with this piece."""
        for token, member in zip(tokens, members, strict=True):
            self._decoded.read(token)
            self._pending.append((token, member, len(self._decoded.text)))
        self._given += text
        return self._tell(len(self._given), is_over=False)

    def finish(self) -> list[Shown]:
        """Those that are left once the answer has ended."""
        self._decoded.finish()
        return self._tell(len(self._given), is_over=True)

    def _tell(self, length: int, is_over: bool) -> list[Shown]:
        told: list[Shown] = []
        while self._pending and (is_over or self._pending[0][2] <= length):
            token, member, end = self._pending.pop(0)
            if not self._pending and is_over:
                end = len(self._given)
            end = min(end, length)
            told.append(Shown(self._given[self._told : end], token, member))
            self._told = max(self._told, end)
        return told
