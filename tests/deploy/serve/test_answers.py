"""Answers over HTTP: the library's own texts, in OpenAI's shapes, whole and in streams."""

from typing import Any

import pytest

from polybasic.deploy import Chain
from tests.deploy.serve.serving import QUESTION, Served, text_of

SAMPLED = {"temperature": 1.3, "seed": 11, "max_tokens": 40, "ignore_eos": True}
COMPLETIONS = "/v1/completions"


def library(chain: Chain, prompt: Any = QUESTION, **options: Any) -> Any:
    given = {"temperature": 1.3, "seed": 11, "max_new_tokens": 40, "ignore_eos": True}
    return chain.generate(prompt, **(given | options))


def test_a_seed_means_the_same_text_everywhere(server: Served, chain: Chain) -> None:
    expected = library(chain)
    whole = server.chat(**SAMPLED)
    streamed = server.chunks(**SAMPLED)
    assert whole["choices"][0]["message"]["content"] == expected.text
    assert text_of(streamed) == expected.text
    assert len(streamed) > 2
    # the text is one that could break: it has characters of several bytes, and parts of them
    assert not expected.text.isascii()
    assert library(chain, seed=12).text != expected.text
    in_python = library(chain, members=["target"])
    alone = server.chat(**SAMPLED, polybasic={"run": ["target"]})
    assert alone["choices"][0]["message"]["content"] == in_python.text == expected.text
    assert alone["polybasic"]["plan"] == ["target"]


def test_greedy_and_default_settings(server: Served, chain: Chain) -> None:
    expected = chain.generate(QUESTION, max_new_tokens=20)
    answer = server.chat(max_tokens=20)
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": expected.text,
        "refusal": None,
    }
    assert answer["polybasic"]["seed"] is None
    text = server.complete()
    ids = chain.tokenizer("what is it")["input_ids"]
    assert text["choices"][0]["text"] == chain.generate(ids, max_new_tokens=16).text
    assert text["usage"]["completion_tokens"] == 16


def test_a_drawn_seed_is_reported_and_repeats_the_answer(server: Served) -> None:
    first = server.chat(temperature=1.5, max_tokens=30)
    seed = first["polybasic"]["seed"]
    again = server.chat(temperature=1.5, max_tokens=30, seed=seed)
    assert 0 <= seed < 2**53
    assert again["choices"] == first["choices"]
    assert server.chat(temperature=1.5, max_tokens=30)["choices"] != first["choices"]


def test_a_chat_fills_the_context_by_default(server: Served, chain: Chain) -> None:
    answer = server.chat(ignore_eos=True)
    usage, [choice] = answer["usage"], answer["choices"]
    assert usage["total_tokens"] == chain.engine.context_tokens
    assert choice["finish_reason"] == "length"


def test_shape_of_a_stream(server: Served) -> None:
    *chunks, last, usage = server.chunks(**SAMPLED, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in (*chunks, last, usage)}) == 1
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 40
    assert all("usage" not in chunk for chunk in (*chunks, last))
    assert last["timings"]["predicted_n"] == 40
    assert last["polybasic"]["seed"] == 11
    counted = server.chunks(**SAMPLED, stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in counted][-1] == 40


def test_costs_are_told(server: Served) -> None:
    answer = server.chat(**SAMPLED)
    told, timings = answer["polybasic"], answer["timings"]
    assert told["plan"] == ["target", "intermediate", "draft"]
    assert told["accepted_length"] == pytest.approx(39 / told["passes"]["target"])
    assert set(told["drafted"]) >= {"intermediate", "draft"}
    assert timings["draft_n"] == sum(told["drafted"].values()) > 0
    assert timings["draft_n_accepted"] == sum(told["accepted"].values())
    assert timings["predicted_per_second"] == pytest.approx(
        1000 * timings["predicted_n"] / timings["predicted_ms"]
    )
    usage = answer["usage"]
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == told["cached_tokens"]


def test_several_answers_differ_and_keep_their_places(server: Served, chain: Chain) -> None:
    expected = [library(chain, choice=index).text for index in range(3)]
    assert len(set(expected)) == 3
    whole = server.chat(**SAMPLED, n=3)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in whole["choices"]] == expected
    assert whole["usage"]["completion_tokens"] == 120
    chunks = server.chunks(**SAMPLED, n=3)
    assert [text_of(chunks, index) for index in range(3)] == expected
    ends = [chunk for chunk in chunks if "timings" in chunk]
    assert sorted(chunk["choices"][0]["index"] for chunk in ends) == [0, 1, 2]


def test_prompts_of_every_kind(server: Served, chain: Chain) -> None:
    texts = ["what is", "and so"]
    ids = [chain.tokenizer(text)["input_ids"] for text in texts]
    expected = [chain.generate(each, max_new_tokens=8).text for each in ids]

    def answers(prompt: Any) -> list[str]:
        found = server.complete(prompt=prompt, max_tokens=8, temperature=0)
        return [choice["text"] for choice in found["choices"]]

    assert answers(texts) == answers(ids) == expected
    assert answers(texts[0]) == answers(ids[0]) == expected[:1]
    both = server.complete(prompt=texts, max_tokens=8, temperature=1.5, n=2, seed=5)
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    alone = server.complete(prompt=texts[1], max_tokens=8, temperature=1.5, n=2, seed=5)
    assert [each["text"] for each in both["choices"][2:]] == [
        each["text"] for each in alone["choices"]
    ]
    assert both["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[1])


def test_stops(server: Served, chain: Chain) -> None:
    free = library(chain)
    stop = free.text[5:8]
    cut = server.chat(**SAMPLED, stop=[stop, "zzzz"])["choices"][0]
    assert cut["message"]["content"] == free.text[: free.text.index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert text_of(server.chunks(**SAMPLED, stop=stop)) == cut["message"]["content"]
    token = free.token_ids[12]
    first = free.token_ids.index(token)
    ended = server.chat(**SAMPLED, stop_token_ids=[token], return_token_ids=True)["choices"][0]
    assert ended["token_ids"] == free.token_ids[: first + 1]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", token)
    later = server.chat(
        **SAMPLED, stop_token_ids=[token], min_tokens=first + 3, return_token_ids=True
    )["choices"][0]
    assert len(later["token_ids"]) >= first + 3
    assert token not in later["token_ids"][: first + 2]


def test_the_checkpoints_stop_token_ends_unless_it_is_ignored(server: Served, chain: Chain) -> None:
    eos = chain.tokenizer.eos_token_id
    asked = {"max_tokens": 8, "logit_bias": {str(eos): 100}, "return_token_ids": True}
    ended = server.complete(**asked)["choices"][0]
    assert (ended["token_ids"], ended["finish_reason"]) == ([eos], "stop")
    assert ended["stop_reason"] is None
    assert ended["text"] == ""
    ignored = server.complete(**asked, ignore_eos=True)["choices"][0]
    assert ignored["token_ids"] == [eos] * 8


def test_settings_reach_the_chain(server: Served, chain: Chain) -> None:
    settings: dict[str, Any] = {
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    }
    expected = library(chain, **settings, logit_bias={3: 1.5}).text
    given = {**SAMPLED, **settings, "logit_bias": {"3": 1.5}}
    assert server.chat(**given)["choices"][0]["message"]["content"] == expected
    assert server.chat(**(given | {"top_k": 1}))["choices"][0]["message"]["content"] != expected


def test_messages_in_parts_are_lines(server: Served) -> None:
    parts = [{"type": "text", "text": "what"}, {"type": "text", "text": "is it"}]
    in_parts = server.chat(messages=[{"role": "user", "content": parts}], max_tokens=8)
    joined = server.chat(messages=[{"role": "user", "content": "what\nis it"}], max_tokens=8)
    assert in_parts["choices"] == joined["choices"]


def test_members_are_told_of_each_token(server: Served, chain: Chain) -> None:
    expected = library(chain, stop="zzzz")
    chunks = server.chunks(**SAMPLED, polybasic={"members": True})
    tokens = [token for chunk in chunks for token in chunk.get("polybasic", {}).get("tokens", [])]
    assert [token["id"] for token in tokens] == expected.token_ids
    assert [token["member"] for token in tokens] == expected.members
    assert "".join(token["text"] for token in tokens) == expected.text
    assert {"target", "intermediate"} <= set(expected.members)
    whole = server.chat(**SAMPLED, polybasic={"members": True})
    assert whole["choices"][0]["polybasic"]["tokens"] == tokens
    stop = expected.text[7:10]
    cut = server.chat(**SAMPLED, stop=stop, polybasic={"members": True})["choices"][0]
    told = cut["polybasic"]["tokens"]
    assert "".join(token["text"] for token in told) == cut["message"]["content"]
    assert "tokens" not in server.chunks(**SAMPLED)[2].get("polybasic", {})


def test_passes_are_counted_while_an_answer_comes(server: Served) -> None:
    long = {**SAMPLED, "max_tokens": 100, "ignore_eos": True}
    chunks = server.chunks(**long, polybasic={"members": True})
    *coming, last = [chunk["polybasic"] for chunk in chunks if "polybasic" in chunk]
    assert coming[-1]["passes"] == last["passes"]
    for member in ("target", "intermediate", "draft"):
        counted = [told["passes"][member] for told in coming]
        assert counted == sorted(counted)
        assert counted[0] == 0  # the first token came with the prompt
        assert counted[-1] > 0
    plain = server.chunks(**long)
    assert ["polybasic" in chunk for chunk in plain] == [False] * (len(plain) - 1) + [True]


def test_tokenize_and_back(server: Served, chain: Chain) -> None:
    told = server.post("/tokenize", {"prompt": "it is ä€", "return_token_strs": True}).json()
    assert told["tokens"] == chain.tokenizer("it is ä€")["input_ids"]
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == chain.engine.context_tokens
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "it is ä€"}
    chat = server.post("/tokenize", {"messages": QUESTION}).json()
    assert chat["tokens"] == chain.encode(QUESTION)


def test_models_are_listed(server: Served) -> None:
    [model] = server.get("/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert model["polybasic"]["members"] == ["target", "intermediate", "draft"]
    assert server.get("/v1/models/tiny").json() == model
    assert server.get("/v1/models/other").status_code == 404
