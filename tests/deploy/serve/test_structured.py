"""Answers that the fields of OpenAI and vLLM restrict, alone, in streams and beside others."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polybasic.deploy import load_chain
from tests.deploy.byte_target import write_byte_target
from tests.deploy.serve.serving import Served, serving
from tests.deploy.serve.test_refusals import CHAT, refusal

TEXTS = ["an ant", "us!"]
ASKED = {"messages": [{"role": "user", "content": "a"}]}
PATTERN = r"[a-c]{3}\?"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_target(folder)
    with serving(load_chain(folder, dtype="float32", sequences=4)) as served:
        yield served


def text_of(server: Served, **fields: Any) -> str:
    """A whole answer, which ends by itself."""
    [choice] = server.chat(temperature=1.0, seed=5, max_tokens=30, **fields)["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("guided_choice", TEXTS, "an ant|us!"),
        ("guided_regex", PATTERN, PATTERN),
        ("guided_grammar", 'start: "a" | "b" start', "b*a"),
        ("structured_outputs", {"choice": TEXTS}, "an ant|us!"),
        ("structured_outputs", {"regex": PATTERN}, PATTERN),
        ("structured_outputs", {"grammar": 'start: "a" | "b" start'}, "b*a"),
        ("guided_json", {"enum": [None]}, "null"),
        ("structured_outputs", {"json": '{"type": "null"}'}, "null"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": {"const": None}}},
            "null",
        ),
    ],
)
def test_answers_match(server: Served, field: str, value: Any, pattern: str) -> None:
    found = text_of(server, **{field: value})
    assert re.fullmatch(pattern, found)
    assert text_of(server, **{field: value}, polybasic={"run": ["target"]}) == found
    parts = server.chunks(temperature=1.0, seed=5, max_tokens=30, **{field: value})
    assert "".join(part["choices"][0]["delta"].get("content") or "" for part in parts) == found


def test_completions_match_too(server: Served) -> None:
    answers = server.complete(guided_choice=TEXTS, n=3, max_tokens=30, temperature=1.0)["choices"]
    assert {answer["text"] for answer in answers} <= {*TEXTS}
    assert {answer["finish_reason"] for answer in answers} == {"stop"}


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"guided_regex": "("}, "guided_regex", "grammar cannot be used"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json", "nonsense"),
        ({"guided_json": "{"}, "guided_json", "no JSON that can be read"),
        ({"structured_outputs": {"grammar": "a: b"}}, "structured_outputs.grammar", "start"),
        ({"structured_outputs": {"nonsense": 1}}, "structured_outputs.nonsense", "unknown field"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "json_schema",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "both restrict"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "no end"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "no end"),
        ({"guided_regex": "a", "max_tokens": "x"}, "max_tokens", "integer"),
    ],
)
def test_what_cannot_be_matched_is_refused(
    server: Served, fields: dict[str, Any], param: str, part: str
) -> None:
    error = refusal(server, CHAT, ASKED | fields)
    assert error["param"] == param
    assert part in error["message"]


def test_what_no_token_spells_is_refused(byte_chain: Path) -> None:
    """That is what a tokenizer without braces has."""
    with serving(load_chain(byte_chain, dtype="float32")) as small:
        error = refusal(small, CHAT, ASKED | {"response_format": {"type": "json_object"}})
    assert error["param"] == "response_format"
    assert "no token of the chain's tokenizer spells" in error["message"]


def nested(depth: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE = {
    "deep": nested(400),
    "wide": {"enum": [f"a {number}" for number in range(20_000)]},
    "counted": {"type": "string", "maxLength": 10**9},
    "many items": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 10**6},
    "recursive": {"$ref": "#"},
    "recursive items": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "alternatives": {"anyOf": [{"type": "string", "pattern": f"(a|b){{{n}}}"} for n in range(500)]},
    "pattern": {"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_answered_or_refused_in_time(server: Served, name: str) -> None:
    began = time.monotonic()
    answer = server.post(CHAT, {**ASKED, "max_tokens": 3, "guided_json": HOSTILE[name]})
    assert answer.status_code in (200, 400), answer.text
    assert time.monotonic() - began < 10, "a hundred times what it takes here"
    assert server.chat(max_tokens=3)["usage"]["completion_tokens"] == 3
