"""The page before the server itself, over a chain of random weights."""

import json
from typing import Any

import pytest

from tests.browser import Browser, Page
from tests.deploy.serve.page.asking import ask, ask_and_wait
from tests.deploy.serve.serving import Served

pytestmark = pytest.mark.proof

SEED = 10  # of an answer of many tokens


def test_the_page_shows_the_tokens_of_the_server(browser: Browser, server: Served) -> None:
    page = Page(browser, server.url)
    page.wait("document.querySelector('#model').textContent")
    page.evaluate(f"localStorage['polybasic.settings'] = {json.dumps(json.dumps(settings()))}")
    ask_and_wait(page, "what is it")
    asked: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": SEED}
    answer = server.chat(**asked)
    content = answer["choices"][0]["message"]["content"]
    assert page.text(".assistant .text") == content
    tokens = page.all(".assistant .token", "[e.textContent, e.dataset.member]")
    assert "".join(text for text, _ in tokens) == content
    assert len(tokens) == answer["usage"]["completion_tokens"] > 20
    assert {member for _, member in tokens} >= {"target", "intermediate"}
    page.click(".repeat")
    page.wait("document.querySelector('.assistant .cost').textContent.includes('times')")
    assert "target alone" in page.text(".assistant .cost")
    assert page.text(".assistant .cost").endswith("as fast as all members, with the same text")
    assert set(page.all(".assistant .token", "e.dataset.member")) == {"target"}
    assert page.problems == []


def settings() -> dict[str, str]:
    return {"max_tokens": "40", "temperature": "1", "seed": str(SEED)}


def test_stopping_frees_the_sequence(browser: Browser, server: Served) -> None:
    page = Page(browser, server.url)
    page.wait("document.querySelector('#model').textContent")
    ask(page, "what is it")
    page.press("Escape")
    page.wait("document.querySelector('#stop').hidden")
    assert server.chat(max_tokens=4)["usage"]["completion_tokens"] <= 4
