"""Log-probabilities and token ids, in the shapes of chats and of completions."""

import itertools
import math
from typing import Any

import pytest

from polybasic.deploy import Chain
from tests.deploy.serve.serving import QUESTION, Served, text_of

ASKED = {"temperature": 1.2, "seed": 4, "max_tokens": 24, "ignore_eos": True}


def library(chain: Chain, prompt: Any, **options: Any) -> Any:
    given = {"temperature": 1.2, "seed": 4, "max_new_tokens": 24, "ignore_eos": True}
    return chain.generate(prompt, **(given | options))


def joined(chunks: list[dict[str, Any]], name: str) -> list[Any]:
    """A list that is spread over the log-probabilities of a stream."""
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    return list(itertools.chain.from_iterable(each[name] for each in found if each))


def test_of_a_chat(server: Served, chain: Chain) -> None:
    expected = library(chain, QUESTION, logprobs=3)
    asked = {**ASKED, "logprobs": True, "top_logprobs": 3}
    choice = server.chat(**asked)["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [row.logprob for row in expected.logprobs]
    spelled = b"".join(bytes(entry["bytes"]) for entry in content)
    assert spelled.decode("utf-8", "replace") == choice["message"]["content"]
    for entry, row in zip(content, expected.logprobs, strict=True):
        told = [(each["token"], each["logprob"]) for each in entry["top_logprobs"]]
        assert [logprob for _, logprob in told] == [logprob for _, logprob in row.top]
        assert entry["logprob"] <= told[0][1]
        assert 0 < sum(math.exp(logprob) for _, logprob in told) <= 1 + 1e-6
    assert joined(server.chunks(**asked), "content") == content
    assert server.chat(**ASKED)["choices"][0]["logprobs"] is None
    bare = server.chat(**ASKED, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in bare] == [entry["logprob"] for entry in content]
    assert {len(entry["top_logprobs"]) for entry in bare} == {0}


def test_of_a_completion(server: Served, chain: Chain) -> None:
    ids = chain.tokenizer("what is it")["input_ids"]
    expected = library(chain, ids, logprobs=2)
    asked = {**ASKED, "logprobs": 2}
    choice = server.complete(**asked)["choices"][0]
    told = choice["logprobs"]
    assert told["token_logprobs"] == [row.logprob for row in expected.logprobs]
    assert len(told["tokens"]) == len(told["top_logprobs"]) == 24
    for token, logprob, top in zip(
        told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
    ):
        assert token in top
        assert logprob <= max(top.values())
    offsets = told["text_offset"]
    lengths = [len(token) for token in told["tokens"]]
    assert offsets == [0, *itertools.accumulate(lengths)][:-1]
    streamed = server.chunks("/v1/completions", **asked)
    for name in told:
        assert joined(streamed, name) == told[name]
    assert server.complete(**ASKED)["choices"][0]["logprobs"] is None


def test_named_by_ids(server: Served) -> None:
    told = server.complete(
        **ASKED, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True
    )["choices"][0]
    assert told["logprobs"]["tokens"] == [f"token_id:{token}" for token in told["token_ids"]]


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_scores_the_prompt(server: Served, chain: Chain, max_tokens: int) -> None:
    ids = chain.tokenizer("what is it")["input_ids"]
    expected = chain.generate(ids, max_new_tokens=max_tokens, prompt_logprobs=1, logprobs=1)
    choice = server.complete(max_tokens=max_tokens, echo=True, logprobs=1)["choices"][0]
    assert choice["text"] == "what is it" + expected.text
    told = choice["logprobs"]
    rows = [*expected.prompt_logprobs, *expected.logprobs]
    assert told["token_logprobs"] == [None, *(row.logprob for row in rows)]
    assert told["top_logprobs"][0] is None
    assert "".join(told["tokens"][: len(ids)]) == "what is it"
    assert choice["finish_reason"] == "length"
    chunks = server.chunks("/v1/completions", max_tokens=max_tokens, echo=True, logprobs=1)
    assert text_of(chunks) == choice["text"]
    assert joined(chunks, "token_logprobs") == told["token_logprobs"]
    plain = server.complete(prompt=ids, max_tokens=max_tokens, echo=True)["choices"][0]
    assert (plain["text"], plain["logprobs"]) == (choice["text"], None)


def test_of_a_prompt(server: Served, chain: Chain) -> None:
    ids = chain.encode(QUESTION)
    expected = chain.generate(ids, max_new_tokens=2, prompt_logprobs=2).prompt_logprobs
    first, *told = server.chat(max_tokens=2, prompt_logprobs=2)["prompt_logprobs"]
    assert first is None
    for row, entry in zip(expected, told, strict=True):
        assert entry[str(row.token)]["logprob"] == row.logprob
        for rank, (token, logprob) in enumerate(row.top, 1):
            assert entry[str(token)]["logprob"] == logprob
            assert entry[str(token)]["rank"] == rank
    choice = server.complete(prompt=ids, max_tokens=2, prompt_logprobs=2)["choices"][0]
    assert choice["prompt_logprobs"] == [None, *told]


def test_token_ids(server: Served, chain: Chain) -> None:
    expected = library(chain, QUESTION)
    ids = chain.encode(QUESTION)
    whole = server.chat(**ASKED, return_token_ids=True)
    assert whole["prompt_token_ids"] == ids
    assert whole["choices"][0]["token_ids"] == expected.token_ids
    chunks = server.chunks(**ASKED, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == ids
    told = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert told == expected.token_ids
    text = server.complete(**ASKED, prompt=ids, return_token_ids=True)["choices"][0]
    assert (text["prompt_token_ids"], text["token_ids"]) == (ids, expected.token_ids)
    assert "token_ids" not in server.chat(**ASKED)["choices"][0]
