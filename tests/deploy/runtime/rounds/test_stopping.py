"""Where answers end, and their text as its tokens come; on real tokenizers."""

import random
import time
from collections.abc import Collection
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from polybasic.chain.base.errors import UserError
from polybasic.deploy.runtime.rounds.stopping import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    AnswerText,
    _overlap,
    cut_at_end,
)

TEXT = "Say stop: the Straße is wide, 東京 is large 🎉 and the END is near. "


@cache
def byte_level() -> Tokenizer:
    """As of GPT-2 and Llama 3: merges of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the stop is stop: the END and the wide stop "] * 4, trainer)
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """As of Llama 2: pieces with a mark for the space, and a token for each byte."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for character in sorted(set(TEXT.replace(" ", "▁")) - set("東京🎉ß")):
        vocabulary[character] = len(vocabulary)
    model = models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


TOKENIZERS = pytest.mark.parametrize(
    "tokenizer", [byte_level(), byte_fallback()], ids=["byte_level", "byte_fallback"]
)


def feed(text: AnswerText, tokens: list[int], batch: int = 1) -> tuple[list[str], int | None]:
    """What is shown of a stream of batches, and the number of tokens kept."""
    shown = []
    for begin in range(0, len(tokens), batch):
        kept, stopped_by = cut_at_end(tokens[begin : begin + batch], len(tokens) + 1, (), text)
        shown.append(text.take())
        if stopped_by is not None:
            assert stopped_by == "stop_string"
            return [*shown, text.finish()], begin + len(kept)
    return [*shown, text.finish()], None


@pytest.mark.parametrize(
    ("limit", "stop_tokens", "kept", "stopped_by"),
    [
        (6, {7, 9}, 2, "stop"),
        (2, {7, 9}, 2, "stop"),
        (1, {7, 9}, 1, "length"),
        (5, {8}, 5, "length"),
        (6, {8}, 5, None),
        (6, (), 5, None),
    ],
)
def test_an_answer_ends_at_a_stop_token_or_its_length(
    limit: int, stop_tokens: Collection[int], kept: int, stopped_by: str | None
) -> None:
    tokens = [4, 7, 5, 7, 9]
    assert cut_at_end(tokens, limit, stop_tokens) == (tokens[:kept], stopped_by)


def test_a_stop_string_that_ends_with_a_stop_token_comes_first() -> None:
    tokenizer = byte_fallback()  # one token for each character
    tokens = tokenizer.encode("the END").ids
    for stop, stop_tokens, expected in (
        (["END"], tokens[-1:], (len(tokens), "stop_string")),
        (["END"], tokens[-2:-1], (len(tokens) - 1, "stop")),
        (["EN"], tokens[-1:], (len(tokens) - 1, "stop_string")),
    ):
        text = AnswerText(tokenizer, stop)
        kept, stopped_by = cut_at_end(tokens, len(tokens), stop_tokens, text)
        assert (len(kept), stopped_by) == expected


def first_token_with(tokenizer: Tokenizer, tokens: list[int], stop: list[str]) -> int:
    """By decoding every beginning whole."""
    for num in range(1, len(tokens) + 1):
        if any(string in tokenizer.decode(tokens[:num]) for string in stop):
            return num
    raise AssertionError


@TOKENIZERS
def test_text_is_what_decoding_all_gives(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT).ids
    assert len(tokens) > 20
    for batch in (1, 3, 100):
        shown, kept = feed(AnswerText(tokenizer), tokens, batch)
        assert "".join(shown) == tokenizer.decode(tokens) == TEXT
        assert kept is None
        assert all("\ufffd" not in piece for piece in shown)


@TOKENIZERS
@pytest.mark.parametrize(
    "stop",
    [["stop"], ["top: t"], ["END"], ["京"], ["🎉 and"], ["ß"], ["near", "wide"], [" "], ["S"]],
    ids=str,
)
def test_the_answer_ends_at_the_first_stop_string(tokenizer: Tokenizer, stop: list[str]) -> None:
    tokens = tokenizer.encode(TEXT).ids
    position = min(TEXT.find(string) for string in stop if string in TEXT)
    for batch in (1, 2, 7, 100):
        text = AnswerText(tokenizer, stop)
        shown, kept = feed(text, tokens, batch)
        assert "".join(shown) == text.text == TEXT[:position]
        assert text.has_stopped
        assert kept == first_token_with(tokenizer, tokens, stop)
        assert not any(string in tokenizer.decode(tokens[: kept - 1]) for string in stop)


def test_a_stop_string_may_begin_and_end_inside_of_tokens() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("the stop is").ids
    parts = [tokenizer.decode([token]) for token in tokens]
    assert any("top" in part and part != "top" for part in parts)
    shown, kept = feed(AnswerText(tokenizer, ["e sto"]), tokens)
    assert ("".join(shown), kept) == ("th", 2)
    assert tokenizer.decode(tokens[:2]) == "the stop"


@TOKENIZERS
def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a stop is").ids
    text = AnswerText(tokenizer, ["stop it"])
    shown, held_back = "", []
    for token in tokens:
        assert not text.read(token)
        shown += text.take()
        held_back.append(text.text.removeprefix(shown))
    assert shown + text.finish() == "a stop is"
    assert all("stop it".startswith(beginning) for beginning in held_back)
    assert "stop" in held_back
    assert held_back[-1] == "s"
    # and what is held back at the end of the answer is given out then
    text = AnswerText(tokenizer, ["stop it"])
    assert not any(map(text.read, tokenizer.encode("a stop").ids))
    assert (text.take(), text.finish(), text.finish()) == ("a ", "stop", "")


def test_of_two_stop_strings_the_one_that_is_complete_first_counts() -> None:
    tokenizer = byte_fallback()  # one token for each character
    tokens = tokenizer.encode("the wide END").ids
    shown, kept = feed(AnswerText(tokenizer, ["wide END", "de"]), tokens)
    assert ("".join(shown), kept) == ("the wi", len(tokenizer.encode("the wide").ids))
    shown, kept = feed(AnswerText(tokenizer, ["the wide", "e wide"]), tokens)
    assert "".join(shown) == ""


def test_a_stop_string_before_an_incomplete_character_is_found_at_once() -> None:
    tokenizer = byte_level()
    first_byte = tokenizer.encode("東").ids[:1]
    tokens = [*tokenizer.encode("EN").ids, *first_byte]
    shown, kept = feed(AnswerText(tokenizer, ["EN"]), tokens)
    assert ("".join(shown), kept) == ("", len(tokens) - 1)
    shown, kept = feed(AnswerText(tokenizer), tokens)
    assert shown[-1] == "\ufffd"
    assert "".join(shown) == "EN\ufffd" == tokenizer.decode(tokens)


@TOKENIZERS
def test_any_tokens_can_be_read(tokenizer: Tokenizer) -> None:
    """A warm model draws bytes that are no text; the stream goes on and says where."""
    numbers = random.Random(0)
    for _ in range(50):
        tokens = [numbers.randrange(1, tokenizer.get_vocab_size()) for _ in range(40)]
        shown, _ = feed(AnswerText(tokenizer), tokens, 3)
        if tokenizer is byte_level():
            assert "".join(shown) == tokenizer.decode(tokens)
        assert "".join(shown)


def test_special_tokens_have_no_text() -> None:
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<eos>")
    tokens = [*tokenizer.encode("the").ids, end, *tokenizer.encode(" END").ids]
    shown, kept = feed(AnswerText(tokenizer, ["<eos>", "the END"]), tokens)
    assert ("".join(shown), kept) == ("", len(tokens))


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match=r"empty stop string: stop=\['a', ''\]; give it"):
        AnswerText(byte_level(), ["a", ""])


@TOKENIZERS
def test_stop_strings_have_a_number_and_a_length(tokenizer: Tokenizer) -> None:
    AnswerText(tokenizer, ["x" * MAX_STOP_CHARACTERS] * MAX_STOP_STRINGS)
    for stop in (["x" * (MAX_STOP_CHARACTERS + 1)], ["x"] * (MAX_STOP_STRINGS + 1), "x" * 10**6):
        with pytest.raises(UserError, match=r"too many or too long stop strings: stop of \d"):
            AnswerText(tokenizer, stop)


@TOKENIZERS
def test_long_stop_strings_take_no_time(tokenizer: Tokenizer) -> None:
    """The worst case: every end of the text nearly begins every stop string."""
    stop = [f"{'stop' * (MAX_STOP_CHARACTERS // 4 - 1)}{number:04}" for number in range(64)]
    tokens = tokenizer.encode("stop" * 300).ids
    text, started = AnswerText(tokenizer, stop), time.monotonic()
    shown = "".join(text.take() for token in tokens if not text.read(token))
    assert shown + text.finish() == "stop" * 300
    assert len(shown) < 4 * 300
    assert time.monotonic() - started < 10


@given(text=st.text("ab", max_size=12), string=st.text("ab", min_size=1, max_size=6))
def test_what_is_held_back_is_the_longest_start_of_a_stop_string(text: str, string: str) -> None:
    ends = [num for num in range(1, len(string)) if text.endswith(string[:num])]
    assert _overlap(text, string) == max(ends, default=0)
