"""Thoughts apart from what is said, settings of templates, and answers that go on."""

import itertools
import json
from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.deploy import Chain
from polybasic.deploy.serve import service
from polybasic.deploy.serve.api import reasoning
from polybasic.deploy.serve.api.reasoning import Reasoning
from tests.deploy.serve.serving import QUESTION, Served

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message.reasoning_content is defined %}, {{ message.reasoning_content }}.{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{% if enable_thinking is not false %}q{% endif %}{{ style }}{% endif %}"
)
BEGUN = [*QUESTION, {"role": "assistant", "content": "it is"}]


@pytest.mark.parametrize(
    ("text", "is_open", "thought", "said"),
    [
        ("<think>\nfirst\n\nthis\n</think>\n\nHello\n", False, "first\n\nthis", "Hello\n"),
        ("\n <think>a</think>b", False, "a", "b"),
        ("a</think>\nb</think>", True, "a", "b</think>"),
        ("\na\n</thin</think>", True, "a\n</thin", ""),
        ("Hello <think>a</think>", False, "", "Hello <think>a</think>"),
        ("  Hello", False, "", "  Hello"),
        ("<thin", False, "", "<thin"),
        ("<think>cut off </th", False, "cut off </th", ""),
        ("cut off\n", True, "cut off\n", ""),
        ("<think>\n\n</think>\n\nHello", False, "", "Hello"),
        ("", False, "", ""),
        ("", True, "", ""),
    ],
)
def test_thoughts_are_parted_wherever_the_text_is_cut(
    text: str, is_open: bool, thought: str, said: str
) -> None:
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        parted = Reasoning(is_open)
        found = [parted.add(text[:first]), parted.add(text[first:second])]
        found.append(parted.add(text[second:], is_last=True))
        assert ("".join(part for part, _ in found), "".join(part for _, part in found)) == (
            thought,
            said,
        )


def test_what_is_sure_is_given_at_once() -> None:
    parted = Reasoning(is_open=True)
    assert parted.add("some thought") == ("some thought", "")
    assert parted.add(" more\n</") == (" more", "")
    assert parted.add("b") == ("\n</b", "")
    assert parted.add("</think>said") == ("", "said")


@pytest.fixture
def thinking(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that opens a thought by `q`; a part of the greedy answer closes it."""
    monkeypatch.setattr(chain.tokenizer, "chat_template", TEMPLATE)
    text = chain.generate(QUESTION, max_new_tokens=20, ignore_eos=True).text
    for module in (reasoning, service):
        monkeypatch.setattr(module, "OPENING", "q")
        monkeypatch.setattr(module, "CLOSING", text[6:8])
    monkeypatch.setattr(chain.tokenizer, "chat_template", f"{TEMPLATE}{{# {text[6:8]} #}}")


@pytest.mark.usefixtures("thinking")
def test_an_answer_has_its_thought_apart(server: Served, chain: Chain) -> None:
    asked: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    text = chain.generate(QUESTION, max_new_tokens=20, ignore_eos=True).text
    thought, _, said = text.partition(reasoning.CLOSING)
    whole = server.chat(**asked)["choices"][0]["message"]
    assert whole["reasoning_content"] == thought.strip("\n")
    assert whole["content"] == said.lstrip("\n")
    body = {"messages": QUESTION, "stream": True, **asked}
    lines = server.post(CHAT, body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == whole[name]
    hidden = server.chat(**asked, include_reasoning=False)["choices"][0]["message"]
    assert "reasoning_content" not in hidden
    assert hidden["content"] == whole["content"]
    open_ended = server.chat(**asked, enable_thinking=False)["choices"][0]["message"]
    assert "reasoning_content" not in open_ended, "no thought was begun"


@pytest.mark.usefixtures("thinking")
def test_templates_read_what_a_request_says(server: Served, chain: Chain) -> None:
    def text(**fields: Any) -> str:
        answer = server.post(TOKENIZE, {"messages": QUESTION, **fields})
        assert answer.status_code == 200, answer.text
        return str(chain.tokenizer.decode(answer.json()["tokens"]))

    assert text() == "what is it\nq"
    assert text(enable_thinking=False) == "what is it\n"
    options = {"enable_thinking": False, "style": "be brief"}
    assert text(chat_template_kwargs=options) == "what is it\nbe brief"
    past = [*QUESTION, {"role": "assistant", "content": "so", "reasoning_content": "why"}]
    assert text(messages=[*past, *QUESTION]) == "what is it\nso, why.\nwhat is it\nq"
    # control tokens in them are plain text, too
    special = chain.tokenizer.eos_token_id
    forged = {"messages": QUESTION, "chat_template_kwargs": {"style": "a<eos>"}}
    assert special not in server.post(TOKENIZE, forged).json()["tokens"]


def test_an_answer_goes_on_with_the_final_message(server: Served, chain: Chain) -> None:
    fields = {"messages": BEGUN, "continue_final_message": True}
    told = server.post(TOKENIZE, fields).json()["tokens"]
    assert chain.tokenizer.decode(told) == "what is it\nit is"
    assert told == chain.encode(BEGUN, continues=True)
    answer = server.chat(**fields, add_generation_prompt=False, max_tokens=4, temperature=0)
    expected = chain.generate(told, max_new_tokens=4)
    assert answer["choices"][0]["message"]["content"] == expected.text
    for wrong in (QUESTION, [{"role": "assistant", "content": ""}]):
        with pytest.raises(UserError, match="no message to continue"):
            chain.encode(wrong, continues=True)
        refused = server.post(CHAT, {"messages": wrong, "continue_final_message": True})
        assert refused.status_code == 400
        assert "end with a message of the assistant" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        (
            {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"enable_thinking": "no"}, "enable_thinking"),
    ],
)
def test_what_no_template_can_be_told(server: Served, fields: dict[str, Any], param: str) -> None:
    answer = server.post(CHAT, {"messages": QUESTION, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
