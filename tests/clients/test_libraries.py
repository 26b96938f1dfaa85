"""LangChain and litellm against a live server: what they show is what the library answers."""

import asyncio
from collections.abc import Iterable
from typing import Any, Literal

import pytest

from polybasic.deploy import Chain
from tests.deploy.serve.serving import QUESTION, Served

SAMPLED = {"temperature": 1.3, "seed": 11, "max_tokens": 24}


@pytest.fixture
def expected(chain: Chain) -> str:
    text = chain.generate(QUESTION, max_new_tokens=24, temperature=1.3, seed=11).text
    assert text != chain.generate(QUESTION, max_new_tokens=24, temperature=1.3, seed=12).text
    return text


def test_langchain(server: Served, expected: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="none", max_retries=0, **SAMPLED
    )
    asked = [("user", QUESTION[0]["content"])]
    whole = model.invoke(asked)
    assert whole.content == expected
    assert whole.usage_metadata["output_tokens"] > 0
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    pieces = list(model.stream(asked, stream_usage=True))
    assert "".join(piece.content for piece in pieces) == expected
    assert [piece.usage_metadata for piece in pieces if piece.usage_metadata] == [
        whole.usage_metadata
    ]
    assert asyncio.run(model.ainvoke(asked)).content == expected
    assert [answer.content for answer in model.batch([asked] * 6)] == [expected] * 6
    named = model.bind(logprobs=True).invoke(asked).response_metadata["logprobs"]["content"]
    assert len(named) == whole.usage_metadata["output_tokens"]


def test_langchain_shows_a_refusal(server: Served) -> None:
    import openai
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="tiny", base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def weather(town: str) -> str:
        """Of a town."""
        raise AssertionError

    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        model.bind_tools([weather]).invoke("w1")


def test_langchain_calls_tools(server_of_tools: Served) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="tiny",
        base_url=f"{server_of_tools.url}/v1",
        api_key="none",
        max_retries=0,
        temperature=1,
        seed=2,
        max_tokens=300,
    )

    def weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2]) -> str:
        """Of a city."""
        return f"sun in {city} for {days}"

    messages: list[Any] = [HumanMessage("Rome?")]
    calling = model.bind_tools([weather], tool_choice="any", strict=True, parallel_tool_calls=False)
    called = calling.invoke(messages)
    [call] = called.tool_calls
    said = weather(**call["args"])
    whole = sum_of(calling.stream(messages))
    assert [(tool_call["name"], tool_call["args"]) for tool_call in whole.tool_calls] == [
        ("weather", call["args"])
    ]
    messages += [called, ToolMessage(said, tool_call_id=call["id"])]
    assert isinstance(model.bind_tools([weather]).invoke(messages).content, str)
    person = {"title": "person", "type": "object", "properties": {"age": {"enum": [7, 77]}}}
    person |= {"required": ["age"], "additionalProperties": False}
    for way in ("json_schema", "function_calling"):
        found = model.with_structured_output(person, method=way).invoke("Rome?")
        assert found in ({"age": 7}, {"age": 77})


def sum_of(pieces: Iterable[Any]) -> Any:
    """A streamed message, whole."""
    first, *others = pieces
    return sum(others, first)


def test_litellm(server: Served, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    asked = {
        "model": "openai/tiny",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": QUESTION,
        "num_retries": 0,
        **SAMPLED,
    }
    whole = litellm.completion(**asked, logprobs=True)
    assert whole.choices[0].message.content == expected
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    chunks = list(litellm.completion(**asked, stream=True))
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == expected
    assert asyncio.run(litellm.acompletion(**asked)).choices[0].message.content == expected
    text = litellm.text_completion(
        model="text-completion-openai/tiny",
        api_base=f"{server.url}/v1",
        api_key="none",
        prompt="what is it",
        **SAMPLED,
    )
    assert text.choices[0].text == server.complete(**SAMPLED)["choices"][0]["text"]
    for wrong, error in (
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, litellm.BadRequestError),
        ({"model": "openai/other"}, litellm.NotFoundError),
    ):
        with pytest.raises(error):
            litellm.completion(**(asked | wrong))
