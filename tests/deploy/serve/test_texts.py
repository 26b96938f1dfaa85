"""Single tokens as bytes, and an answer's text shared out among its tokens."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from polybasic.deploy.runtime.rounds.stopping import AnswerText
from polybasic.deploy.serve.texts import SharedText, TokenTexts

TEXT = "Größe: 5 € 😀, \tja"


def byte_level() -> Tokenizer:
    alphabet = TokenTexts.byte_alphabet()
    tokenizer = Tokenizer(models.BPE({each: id for id, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>")])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As SentencePiece's: a mark for a blank, and bytes for what it does not know."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz",
    ]
    pieces += ["▁ja", "▁€"]
    tokenizer = Tokenizer(
        models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def test_the_alphabet_is_the_librarys() -> None:
    assert set(TokenTexts.byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(TokenTexts.byte_alphabet().values()) == list(range(256))


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["level", "fallback"])
def test_bytes_of_tokens_make_up_the_text(tokenizer: Tokenizer) -> None:
    texts, ids = TokenTexts(tokenizer), tokenizer.encode(TEXT).ids
    assert len(ids) > len(TEXT) - 6
    spelled = b"".join(texts.bytes_of(id) for id in ids).decode()
    assert spelled.strip() == TEXT
    assert "\ufffd" in "".join(texts.text_of(id) for id in ids)


def test_special_tokens_are_named() -> None:
    tokenizer = byte_level()
    eos = tokenizer.token_to_id("<eos>")
    assert TokenTexts(tokenizer).text_of(eos) == "<eos>"
    assert TokenTexts(tokenizer).bytes_of(10_000) == b""


@pytest.mark.parametrize("stop", [(), ("5 €",), ("Zz", "😀,")])
def test_texts_of_tokens_are_the_answers_text(stop: tuple[str, ...]) -> None:
    tokenizer, choose = byte_level(), random.Random(1)
    ids = tokenizer.encode(TEXT).ids
    for _ in range(30):
        answer, shared = AnswerText(tokenizer, stop), SharedText(tokenizer)
        told, text, left, has_stopped = [], "", list(ids), False
        while left and not has_stopped:
            num = choose.randint(1, 5)
            piece, left = left[:num], left[num:]
            read = []
            for token in piece:
                read.append(token)
                if has_stopped := answer.read(token):
                    break
            new = answer.take()
            text += new
            told += shared.add(new, read, ["draft"] * len(read))
            assert text.startswith("".join(shown.text for shown in told))
        rest = answer.finish()
        told += shared.add(rest, [], [])
        told += shared.finish()
        assert "".join(shown.text for shown in told) == text + rest
        assert [shown.token for shown in told] == ids[: len(told)]
        whole = TEXT if not stop else TEXT[: TEXT.index(stop[-1])]
        assert text + rest == whole
