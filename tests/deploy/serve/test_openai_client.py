"""OpenAI's own client against a live server: sync, async, streams, raw responses, errors."""

import asyncio

import openai
import pytest

from polybasic.deploy import Chain
from tests.deploy.serve.serving import QUESTION, Served, serving

SAMPLED = {"model": "tiny", "temperature": 1.3, "seed": 11, "max_tokens": 24}


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_chat_whole_and_in_a_stream(client: openai.OpenAI, chain: Chain) -> None:
    expected = chain.generate(QUESTION, max_new_tokens=24, temperature=1.3, seed=11)
    whole = client.chat.completions.create(messages=QUESTION, **SAMPLED, logprobs=True)
    assert whole.choices[0].message.content == expected.text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(expected.token_ids)
    assert len(whole.choices[0].logprobs.content) == len(expected.token_ids)
    assert whole.polybasic["seed"] == 11
    stream = client.chat.completions.create(
        messages=QUESTION, **SAMPLED, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert last.usage == whole.usage


def test_a_stream_of_the_clients_own_kind(client: openai.OpenAI, chain: Chain) -> None:
    expected = chain.generate(QUESTION, max_new_tokens=24, temperature=1.3, seed=11)
    with client.chat.completions.stream(messages=QUESTION, **SAMPLED) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == expected.text


def test_completions(client: openai.OpenAI, chain: Chain) -> None:
    ids = chain.tokenizer("what is it")["input_ids"]
    expected = chain.generate(ids, max_new_tokens=24, temperature=1.3, seed=11)
    whole = client.completions.create(prompt="what is it", **SAMPLED, echo=True)
    assert whole.choices[0].text == "what is it" + expected.text
    stream = client.completions.create(prompt=ids, **SAMPLED, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected.text


def test_raw_responses(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        messages=QUESTION, **SAMPLED, extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine"
    assert raw.parse()._request_id == "mine"
    with client.chat.completions.with_streaming_response.create(
        messages=QUESTION, **SAMPLED, stream=True
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


def test_extensions_by_extra_body(client: openai.OpenAI) -> None:
    extra = {
        "polybasic": {"members": True, "run": ["target"]},
        "top_k": 5,
        "return_token_ids": True,
    }
    whole = client.chat.completions.create(messages=QUESTION, **SAMPLED, extra_body=extra)
    choice = whole.choices[0]
    assert {token["member"] for token in choice.polybasic["tokens"]} == {"target"}
    assert [token["id"] for token in choice.polybasic["tokens"]] == choice.token_ids


def test_many_at_a_time(server: Served, chain: Chain) -> None:
    """More than there are sequences: each gets its own text."""

    async def ask(client: openai.AsyncOpenAI, seed: int, is_stream: bool) -> str:
        given = {**SAMPLED, "seed": seed, "messages": QUESTION}
        if not is_stream:
            whole = await client.chat.completions.create(**given)
            return str(whole.choices[0].message.content)
        stream = await client.chat.completions.create(**given, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def test() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, seed, seed % 2 == 0) for seed in range(12)))

    found = asyncio.run(test())
    expected = [
        chain.generate(QUESTION, max_new_tokens=24, temperature=1.3, seed=seed).text
        for seed in range(12)
    ]
    assert found == expected
    assert len(set(found)) > 6


def test_errors_have_the_clients_classes(client: openai.OpenAI, chain: Chain) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(openai.BadRequestError, match="tools is not supported") as caught:
        client.chat.completions.create(messages=QUESTION, **SAMPLED, tools=[tool])
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-5' here"):
        client.chat.completions.create(messages=QUESTION, model="gpt-5")
    assert [model.id for model in client.models.list()] == ["tiny"]
    with serving(chain, api_keys=("right",)) as guarded:
        for key, is_right in (("right", True), ("wrong", False)):
            asking = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0)
            if is_right:
                assert asking.chat.completions.create(messages=QUESTION, **SAMPLED).choices
            else:
                with pytest.raises(openai.AuthenticationError):
                    asking.models.list()


def test_a_queue_that_is_full_is_tried_again(chain: Chain) -> None:
    with serving(chain, sequences=1, queue=0) as small:
        real = chain.step
        refused = []

        def refuse_once() -> bool:
            if not refused:
                refused.append(small.post("/v1/chat/completions", {"messages": QUESTION}))
            return real()

        chain.step = refuse_once  # type: ignore[method-assign]
        try:
            client = openai.OpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=0)
            assert client.chat.completions.create(messages=QUESTION, **SAMPLED).choices
        finally:
            del chain.step
        [answer] = refused
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        assert small.metric("requests_refused_total", code="queue_full") == 1
