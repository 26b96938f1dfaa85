"""What is not supported, not known, or does not fit: a 400 in OpenAI's shape, never silence."""

from typing import Any

import pytest
from pydantic import ValidationError

from polybasic.chain.base.errors import UserError
from polybasic.deploy import Chain
from polybasic.deploy.serve.api.protocol import (
    MAX_MESSAGES,
    MAX_PROMPTS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tests.deploy.serve.serving import QUESTION, Served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}


def refusal(server: Served, path: str, content: Any, status: int = 400) -> dict[str, Any]:
    """The error, which has OpenAI's shape."""
    answer = server.post(path, content)
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"]
    [(name, error)] = answer.json().items()
    assert name == "error"
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return dict(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [TOOL]),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("guided_decoding_backend", "xgrammar"),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("store", True),
        ("service_tier", "flex"),
        ("logits_processors", ["a"]),
        ("use_beam_search", True),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("chat_template", "{{ 1 }}"),
        ("truncate_prompt_tokens", 5),
        ("echo", True),
        ("top_logprobs", 3),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_what_is_not_supported_is_named(server: Served, field: str, value: Any) -> None:
    error = refusal(server, CHAT, {"messages": QUESTION, field: value})
    assert error["param"] == field
    assert field in error["message"]
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize("field", ["frobnicate", "max_token", "Temperature"])
def test_unknown_fields_are_named(server: Served, field: str) -> None:
    for path, asked in ((CHAT, {"messages": QUESTION}), (COMPLETIONS, {"prompt": "a"})):
        error = refusal(server, path, {**asked, field: 1})
        assert (error["param"], error["code"]) == (field, "unknown_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 100_000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": [1]}, "stop.0"),
        ({"stop_token_ids": [64]}, "stop_token_ids"),
        ({"logit_bias": {"64": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"polybasic": {"run": ["nobody"]}}, "polybasic.run"),
        ({"polybasic": {"run": ["draft"]}}, "polybasic.run"),
        ({"polybasic": {"speed": 2}}, "polybasic.speed"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, "messages.0.content"),
    ],
)
def test_values_out_of_range_are_named(server: Served, fields: dict[str, Any], param: str) -> None:
    error = refusal(server, CHAT, {"messages": QUESTION, **fields})
    assert error["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [64]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"suffix": "b"}, "suffix"),
    ],
)
def test_of_completions(server: Served, fields: dict[str, Any], param: str) -> None:
    error = refusal(server, COMPLETIONS, {"prompt": "what", **fields})
    assert (error["param"] or "").split(".")[0] == param


def test_what_does_not_fit_is_refused_before_any_work(server: Served) -> None:
    before, most = server.metric("prompt_tokens_total"), server.service.context_tokens
    for path, asked in (
        (CHAT, {"messages": QUESTION, "max_tokens": most}),
        (CHAT, {"messages": [{"role": "user", "content": "a " * most}]}),
        (COMPLETIONS, {"prompt": [1] * most, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": [1] * (most + 1), "max_tokens": 0, "echo": True}),
    ):
        error = refusal(server, path, asked)
        assert error["code"] == "context_length_exceeded"
        assert str(most) in error["message"]
    assert server.metric("prompt_tokens_total") == before
    fitting = server.complete(prompt=[1] * most, max_tokens=0, echo=True)
    assert fitting["usage"]["prompt_tokens"] == most
    assert server.metric("prompt_tokens_total") == before + most


@pytest.mark.parametrize(
    ("path", "content", "told"),
    [
        (COMPLETIONS, {"prompt": [3, -1]}, "token 1 is -1: token ids are whole numbers from 0 up"),
        (COMPLETIONS, {"prompt": [[3], [3, "a"]]}, "token 1 of prompt 1 is 'a'"),
        (COMPLETIONS, {"prompt": ["a", [3]]}, "prompt 1 is of another kind"),
        (COMPLETIONS, {"prompt": [1.5]}, "prompt 0 is of another kind"),
        (COMPLETIONS, {"prompt": {}}, "a text, a list of token ids, or a list of either"),
        (COMPLETIONS, {"prompt": ["a"] * (MAX_PROMPTS + 1)}, "4,097 prompts are more than 4,096"),
        (COMPLETIONS, {"prompt": "a\0b"}, "a NUL character, which is no text: leave it out"),
        (CHAT, {"messages": QUESTION * (MAX_MESSAGES + 1)}, "4,097 messages are more than 4,096"),
        (CHAT, {"messages": QUESTION, "logit_bias": {"1": None}}, "bias of token '1' is no number"),
        (CHAT, {"messages": [{"role": "user", "content": "\0"}]}, "a NUL character"),
        (CHAT, [1], "send one, with Content-Type: application/json"),
    ],
)
def test_the_message_says_what_to_do(server: Served, path: str, content: Any, told: str) -> None:
    assert told in refusal(server, path, content)["message"]


def test_a_body_of_another_kind_is_told_its_header(server: Served) -> None:
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        headers = {"Content-Type": kind}
        answer = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers=headers)
        assert answer.status_code == 400
        assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_many_faults_are_told_by_the_first() -> None:
    parts = [{"type": "text", "text": 1}] * 1000
    for model, given in (
        (CompletionRequest, {"prompt": "a", "stop_token_ids": [-1] * 1000}),
        (CompletionRequest, {"prompt": "a", **{f"unknown{number}": 1 for number in range(1000)}}),
        (ChatRequest, {"messages": [{}] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": parts}]}),
        (ChatRequest, {"messages": QUESTION, "stop": [1] * 1000}),
        (
            ChatRequest,
            {"messages": QUESTION, "logit_bias": {str(token): "a" for token in range(1000)}},
        ),
        (DetokenizeRequest, {"tokens": [-1] * 1000}),
        (TokenizeRequest, {"messages": [{}] * 1000}),
    ):
        with pytest.raises(ValidationError) as caught:
            model.model_validate(given)
        assert caught.value.error_count() < 10, given.keys()


def test_roles_that_no_template_knows_are_refused(
    server: Served, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "usr", "content": "a"}]
    error = refusal(server, CHAT, {"messages": messages})
    assert error["param"] == "messages.0.role"
    with pytest.raises(UserError, match="there is no role 'usr'; there are assistant, developer"):
        chain.encode(messages)
    for named in ("'usr'", '"usr"', "as it's not 'usr'"):
        template = f"{chain.tokenizer.chat_template}{{# {named} #}}"
        with monkeypatch.context() as patch:
            patch.setattr(chain.tokenizer, "chat_template", template)
            assert chain.encode(messages)


def test_other_models_are_not_found(server: Served) -> None:
    error = refusal(server, CHAT, {"messages": QUESTION, "model": "gpt-5"}, status=404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert server.chat(model="tiny", max_tokens=2)["model"] == "tiny"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"messages": NaN}',
        b"[" * 60_000,
        b'{"messages": [], "seed": ' + b"9" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "a"}], "\\ud800": 1}',
    ],
)
def test_bodies_that_are_no_request(server: Served, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = server.client.post(CHAT, content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert server.client.post(CHAT, content=body).status_code == 400
    assert server.get("/health").status_code == 200


def test_fields_that_ask_for_nothing_are_taken(server: Served) -> None:
    harmless = {
        "user": "someone",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "stream": False,
        "stop": None,
        "n": None,
        "top_k": -1,
        "top_p": 1,
        "logit_bias": None,
        "modalities": ["text"],
        "skip_special_tokens": True,
        "max_tokens": 4,
        "max_completion_tokens": 4,
    }
    plain = server.chat(max_tokens=4)
    assert server.chat(**harmless)["choices"] == plain["choices"]
    answered = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None}
    assert server.chat(messages=[*QUESTION, answered, *QUESTION], max_tokens=2)


def test_unknown_paths_and_methods(server: Served) -> None:
    assert refusal(server, "/v1/embeddings", {}, status=404)["code"] == "not_found"
    assert refusal(server, "/health", {}, status=405)["message"] == "Method Not Allowed"
    assert server.get("/v1/chat/completions").status_code == 405


def test_the_chain_answers_as_before(server: Served) -> None:
    """After all that was refused."""
    assert server.get("/ready").json() == {"status": "ready"}
    assert server.chat(max_tokens=3)["usage"]["completion_tokens"] == 3
