"""OpenAI's /v1/responses, as its client reads it."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.deploy.serve.serving import Served, serving_tools
from tests.deploy.serve.test_refusals import refusal
from tests.deploy.serve.test_tools import PARAMETERS

TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
ASKED = {"model": "tiny", "temperature": 0.0, "max_output_tokens": 60}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_tools(tmp_path_factory.mktemp("tools")) as served:
        yield served


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def chat(server: Served, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    found = server.chat(messages=messages, temperature=0, max_tokens=60, **fields)
    return dict(found["choices"][0]["message"])


def test_an_answer_is_the_chats(server: Served, client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rome?"}]
    expected = chat(server, messages)["content"]
    found = client.responses.create(**ASKED, instructions="Be brief.", input="Rome?")
    assert found.output_text == expected
    assert (found.status, found.object) == ("incomplete", "response")
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage is not None
    assert found.usage.output_tokens == 60
    listed: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Rome?"}]},
    ]
    assert client.responses.create(**ASKED, input=listed).output_text == expected


def test_events_make_the_same(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED, input="Rome?")
    events: list[Any] = list(client.responses.create(**ASKED, input="Rome?", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events if not event.type.endswith("delta")]
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_a_loop_of_tools(server: Served, client: openai.OpenAI) -> None:
    tools: Any = [TOOL]
    forced: Any = {"type": "function", "name": "weather"}
    asked = {**ASKED, "tools": tools, "parallel_tool_calls": False, "max_output_tokens": 200}
    first = client.responses.create(**asked, input="Rome?", tool_choice=forced)
    [call] = first.output
    assert call.type == "function_call"
    assert (first.status, call.name) == ("completed", "weather")
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    events: list[Any] = list(
        client.responses.create(**asked, input="Rome?", tool_choice="required", stream=True)
    )
    [again] = events[-1].response.output
    assert again.arguments == call.arguments
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [call.arguments]
    answered: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    user: Any = {"role": "user", "content": "Rome?"}
    found = client.responses.create(**asked, input=[user, call, answered], tool_choice="none")
    function = {"name": call.name, "arguments": call.arguments}
    messages = [
        user,
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "rain"},
    ]
    assert found.output_text.startswith(chat(server, messages)["content"])


def test_text_may_have_to_match_a_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "name": "city", "schema": PARAMETERS, "strict": True}
    wanted: Any = {"format": form}
    found = client.responses.create(**ASKED, input="Rome?", text=wanted)
    assert found.status == "completed"
    jsonschema.validate(json.loads(found.output_text), PARAMETERS)
    with client.responses.stream(**ASKED, input="Rome?", text=wanted) as stream:
        assert stream.get_final_response().output_text == found.output_text


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "input"),
        ({"input": 1}, "input"),
        ({"input": [{"role": "nobody", "content": "a"}]}, "input.0.role"),
        ({"input": [{"type": "image", "content": "a"}]}, "input.0"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "frobnicate": 1}, "frobnicate"),
        ({"input": "a", "temperature": -1}, "temperature"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_is_no_request_is_refused(server: Served, asked: dict[str, Any], param: str) -> None:
    assert refusal(server, "/v1/responses", asked)["param"] == param
