"""Tools: prompts that tell of them, answers that are held to calls, and calls that are read."""

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from polybasic.deploy import load_chain
from polybasic.deploy.serve.api.tools import Call, CallReader, MarkedCalls, style_of
from tests.deploy.serve.serving import TEMPLATE, Served, serving, serving_tools
from tests.deploy.serve.test_refusals import CHAT, refusal

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
LLAMA = '{% if tools %}{"name": function name, "parameters": its arguments}{% endif %}'
SUNNY = '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}'
RAINY = '{"name": "now", "arguments": {}}'
CALLS = [Call("weather", '{"city": "Rome", "days": 2}'), Call("now", "{}")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_tools(tmp_path_factory.mktemp("tools")) as served:
        yield served


def asked(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Rome?"}]
    sampled = {"temperature": 1.0, "seed": 2, "max_tokens": 300}
    return {"messages": messages, "tools": TOOLS, **sampled, **fields}


def check(call: dict[str, Any]) -> None:
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    name = call["function"]["name"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[name])


@pytest.mark.parametrize("name", [None, "weather", "now"])
def test_answers_are_calls_where_they_must_be(server: Served, name: str | None) -> None:
    choice: Any = "required"
    if name is not None:
        choice = {"type": "function", "function": {"name": name}}
    fields = asked(tool_choice=choice, parallel_tool_calls=False)
    [found] = server.post(CHAT, fields).json()["choices"]
    assert found["finish_reason"] == "tool_calls"
    assert found["message"]["content"] is None
    [call] = found["message"]["tool_calls"]
    check(call)
    assert name in (None, call["function"]["name"])
    chunks = server.chunks(**fields)
    deltas = [
        delta for part in chunks for delta in part["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert [(delta["index"], delta["function"]) for delta in deltas] == [(0, call["function"])]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert "".join(part["choices"][0]["delta"].get("content") or "" for part in chunks) == ""


def test_parameters_refer_to_their_own_parts(server: Served) -> None:
    city = {"enum": ["Rome", "Oslo"]}
    parameters = {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": city},
    }
    tools = [{"type": "function", "function": {"name": "go", "parameters": parameters}}]
    fields = asked(tools=tools, tool_choice="required", parallel_tool_calls=False)
    [found] = server.post(CHAT, fields).json()["choices"]
    [call] = found["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), parameters)


@pytest.mark.parametrize("depth", [300, 700, 900])
def test_deep_objects_are_refused(server: Served, depth: int) -> None:
    deep: Any = {}
    for _ in range(depth):
        deep = {"a": deep}
    function = {"name": "f", "parameters": deep}
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps(deep)}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    for fields, param in (
        ({"tools": [{"type": "function", "function": function}]}, "tools.0.function.parameters"),
        ({"messages": messages}, "messages.1.tool_calls.0.function.arguments"),
        ({"chat_template_kwargs": {"x": deep}}, "chat_template_kwargs"),
        ({"guided_json": deep}, "guided_json"),
    ):
        assert refusal(server, CHAT, asked(**fields))["param"] == param


def test_several_calls_are_numbered(server: Served) -> None:
    numbers = []
    for seed in range(20):
        fields = asked(tool_choice="required", seed=seed)
        [found] = server.post(CHAT, fields).json()["choices"]
        calls = found["message"]["tool_calls"]
        for call in calls:
            check(call)
        chunks = server.chunks(**fields)
        deltas = [
            delta for part in chunks for delta in part["choices"][0]["delta"].get("tool_calls", [])
        ]
        assert [delta["index"] for delta in deltas] == list(range(len(calls)))
        numbers.append(len(calls))
    assert max(numbers) > 1


def test_openais_client_has_a_loop_of_tools(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    fields = asked(tool_choice="required", parallel_tool_calls=False)
    first = client.chat.completions.create(model="tiny", **fields).choices[0].message
    assert first.tool_calls is not None
    answered = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}
    messages = [*fields["messages"], first, answered]
    again = client.chat.completions.create(
        model="tiny", **fields | {"messages": messages, "tool_choice": "none", "max_tokens": 4}
    )
    assert again.choices[0].message.tool_calls is None


def test_the_prompt_tells_of_tools_and_calls(server: Served) -> None:
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    messages = [
        {"role": "user", "content": "Oslo?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    told = server.post(CHAT, asked(messages=messages, max_tokens=1, return_token_ids=True)).json()
    text = server.service.tokenizer.decode(told["prompt_token_ids"], skip_special_tokens=False)
    assert json.dumps(TOOLS[0]["function"])[1:20] in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    assert "tool\nrain" in text
    untold = asked(messages=messages, max_tokens=1, return_token_ids=True, tool_choice="none")
    told = server.post(CHAT, untold).json()
    text = server.service.tokenizer.decode(told["prompt_token_ids"], skip_special_tokens=False)
    assert "<tools>" not in text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "sun"}}}, "tool_choice"),
        ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}
                ],
            },
            "tools",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": []}, {"role": "user"}]},
            "messages.1.content",
        ),
    ],
)
def test_what_is_no_tool_is_refused(server: Served, fields: dict[str, Any], param: str) -> None:
    assert refusal(server, CHAT, asked(**fields))["param"] == param


# Reading


def read(reader: CallReader, *parts: str) -> tuple[str, list[Call]]:
    """All that is said, and all calls."""
    said, calls = "", []
    for place, part in enumerate(parts, 1):
        added, found = reader.add(part, is_last=place == len(parts))
        said += added
        calls += found
    return said, calls


MARKED = f"<tool_call>\n{SUNNY}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (MARKED, "", CALLS[:1]),
        (f"{MARKED}\n<tool_call>\n{RAINY}\n</tool_call>", "", CALLS),
        (f"I look.\n\n{MARKED}\n", "I look.", CALLS[:1]),
        (f"{MARKED}\nThat was it.", "That was it.", CALLS[:1]),
        (f"<tool_call>\n{SUNNY}", "", CALLS[:1]),
        (SUNNY, "", CALLS[:1]),
        (f"\n{SUNNY}; {RAINY}\n", "", CALLS),
        ("", "", []),
        ("  \n", "  \n", []),
        ("a < b and <tool_cal", "a < b and <tool_cal", []),
        (
            "<tool_call>\nno JSON\n</tool_call> it is",
            "<tool_call>\nno JSON\n</tool_call> it is",
            [],
        ),
        ('<tool_call>{"name": "none", "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "now", "arguments": [1]}</tool_call>', None, []),
        ("<tool_call>[1]</tool_call>", None, []),
        ('{"a": 1}', None, []),
        ('{"a": ', None, []),
        ("{}" + "[" * 100_000, None, []),
    ],
)
def test_calls_are_read_wherever_an_answer_is_cut(
    text: str, said: str | None, calls: list[Call]
) -> None:
    expected = (text if said is None else said, calls)
    names = ("weather", "now")
    assert read(MarkedCalls(names), text) == expected
    if len(text) < 200:
        assert read(MarkedCalls(names), *text, "") == expected
        for first, second in combinations(range(0, len(text), 3), 2):
            parts = text[:first], text[first:second], text[second:]
            assert read(MarkedCalls(names), *parts) == expected, parts


def test_calls_without_marks_have_parameters() -> None:
    text = SUNNY.replace("arguments", "parameters")
    assert read(CallReader(["weather"]), *text) == ("", CALLS[:1])
    assert read(CallReader(["weather"]), "I say ", text) == (f"I say {text}", [])


def test_what_is_certain_comes_at_once() -> None:
    reader = MarkedCalls(["weather"])
    assert reader.add("It is ") == ("It is", [])
    assert reader.add("fine <to") == (" fine", [])
    assert reader.add("day>") == (" <today>", [])
    assert reader.add(f" {MARKED}") == ("", CALLS[:1])


def test_styles_are_known_by_templates() -> None:
    assert style_of(TEMPLATE) is MarkedCalls
    assert style_of(LLAMA) is CallReader
    assert style_of("{% for message in messages %}{{ message.content }}{% endfor %}") is None
    assert style_of("{% if tools %}[TOOL_CALLS]{% endif %}") is None


def test_a_template_without_tools_refuses_them(byte_chain: Path) -> None:
    with serving(load_chain(byte_chain, dtype="float32")) as plain:
        error = refusal(plain, CHAT, asked())
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
        answered = [{"role": "tool", "content": "a", "tool_call_id": "b"}]
        error = refusal(plain, CHAT, {"messages": answered})
        assert error["param"] == "messages.0"
