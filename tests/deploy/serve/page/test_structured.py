"""Answers in JSON, and tools whose results the user writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, Page
from tests.deploy.serve.page.asking import IDLE, TEXT, ask_and_wait, opened, say, say_it
from tests.deploy.serve.page.scripted import Answering, Script, scripted
from tests.deploy.serve.page.test_access import CONTRASTS, DARK, LIGHT
from tests.deploy.serve.page.test_formatting import IS_SHOWN, SHOWN, shown
from tests.deploy.serve.serving import serving_tools

pytestmark = pytest.mark.proof

ATTACK = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"
ANSWER = r'{"name": "a, {b}\"", "empty": [ ], "big": [12345678901234567890, 1.0]}'
INDENTED = r"""{
  "name": "a, {b}\"",
  "empty": [ ],
  "big": [
    12345678901234567890,
    1.0
  ]
}"""
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
WEATHER = {"name": "weather", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": WEATHER}
FIELDS = ".calls textarea"


def call(name: str, arguments: str = "{}", number: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": number, "id": f"call_{name}", "type": "function", "function": function}


CALLS = [call("weather", '{"city": "Oslo"}'), call("now", number=1)]


def say_calls(*calls: dict[str, Any], text: str = "") -> Script:
    """An answer whose calls come one by one, behind a text."""

    def answer(answering: Answering) -> None:
        answering.begin()
        answering.tokens((text, "draft"), ("<tool_call>", "grammar"), text=text)
        for tool_call in calls:
            answering.event({"choices": [{"index": 0, "delta": {"tool_calls": [tool_call]}}]})
        answering.end("tool_calls")

    return answer


def asked_of(*results: str) -> list[dict[str, str]]:
    """The messages that answer all calls."""
    return [
        {"role": "tool", "tool_call_id": tool_call["id"], "content": result}
        for tool_call, result in zip(CALLS, results, strict=True)
    ]


def choose(page: Page, answers: str) -> None:
    select = "document.querySelector('[name=format]')"
    page.evaluate(f"{select}.value = {json.dumps(answers)}")
    page.evaluate(f"{select}.dispatchEvent(new Event('input', {{bubbles: true}}))")


def write(page: Page, selector: str, text: str) -> None:
    page.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
    page.type(text)


def close_settings(page: Page) -> None:
    page.press("Escape")
    page.wait("!document.querySelector('#settings').open")


def wait_for_articles(page: Page, number: int) -> None:
    page.wait(f"document.querySelectorAll('article').length === {number} && {IDLE}")


def is_shown(page: Page, selector: str) -> Any:
    return page.evaluate(f"document.querySelector({json.dumps(selector)}).checkVisibility()")


def test_answers_in_json_are_asked_for_and_shown_indented(browser: Browser) -> None:
    with scripted(say_it, say(ANSWER), say(ANSWER[:-1])) as server:
        page = opened(browser, server)
        ask_and_wait(page)
        assert not {"response_format", "tools"} & {*server.asked[0]}
        page.click("#fresh")
        page.click("#open-settings")
        choose(page, "json_object")
        assert not is_shown(page, "[name=schema]")
        close_settings(page)
        ask_and_wait(page)
        assert server.asked[1]["response_format"] == {"type": "json_object"}
        for _ in range(2):
            page.wait(IS_SHOWN)
            assert shown(page) == [True, False]
            assert page.text(f"{SHOWN} pre code") == INDENTED
            assert page.all(f"{SHOWN} code", "getComputedStyle(e).fontFamily")[0].endswith("space")
            page.click(".assistant .form")
            assert shown(page) == [False, True]
            assert page.text(".assistant .text") == ANSWER
            page.click(".assistant .form")
            page.open()
        page.wait(IS_SHOWN)
        ask_and_wait(page)
        assert page.text("article:last-of-type .text") == ANSWER[:-1]
        assert is_shown(page, "article:last-of-type .text"), "what is cut stays as it came"
        assert page.problems == []


def test_a_schema_is_checked_and_sent(browser: Browser) -> None:
    def refuse(answering: Answering) -> None:
        answering.refuse(400, "response_format: no such type")

    with scripted(say("{}"), say("{}"), say("{}"), refuse) as server:
        page = opened(browser, server)
        page.click("#open-settings")
        choose(page, "json_schema")
        assert page.all("[name=schema]", "getComputedStyle(e).fontFamily")[0].endswith("space")
        write(page, "[name=schema]", json.dumps(SCHEMA))
        assert not is_shown(page, "#schema-wrong")
        write(page, "[name=schema]", "{")
        assert page.text("#schema-wrong") == "This is not JSON, so it is not kept."
        assert is_shown(page, "#schema-wrong")
        invalid = "document.querySelector('[name=schema]').ariaInvalid === 'true'"
        assert page.evaluate(invalid)
        close_settings(page)
        ask_and_wait(page)
        asked = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
        assert server.asked[0]["response_format"] == asked, "the last one that was JSON"
        page.open()
        page.wait("document.querySelector('#model').textContent === 'tiny'")
        page.click("#open-settings")
        assert is_shown(page, "[name=schema]")
        assert not is_shown(page, "#schema-wrong")
        assert not page.evaluate(invalid)
        write(page, "[name=schema]", "{")
        choose(page, "")
        page.click("#settings .actions button")
        page.wait("!document.querySelector('#settings').open")
        ask_and_wait(page)
        assert "response_format" not in server.asked[1]
        page.click("#open-settings")
        choose(page, "json_schema")
        assert page.evaluate("document.querySelector('[name=schema]').value") == json.dumps(SCHEMA)
        write(page, "[name=schema]", " ")
        close_settings(page)
        ask_and_wait(page)
        assert server.asked[2]["response_format"] == {"type": "json_schema", "json_schema": {}}
        ask_and_wait(page)
        assert page.text("#notice") == "Response_format: no such type."


def test_tools_are_checked_and_sent(browser: Browser) -> None:
    with scripted(say_it) as server:
        page = opened(browser, server)
        page.click("#open-settings")
        write(page, "[name=tools]", json.dumps([TOOL, WEATHER]))
        assert not is_shown(page, "#tools-wrong")
        for wrong in ("[", "{}", "1", "null]", "[null]", "[1]", '[{"function": {}}]', "[{}]"):
            write(page, "[name=tools]", wrong)
            assert is_shown(page, "#tools-wrong"), wrong
        words = "This is not a JSON list of functions, so it is not kept."
        assert page.text("#tools-wrong") == words
        close_settings(page)
        ask_and_wait(page)
        assert server.asked[0]["tools"] == [TOOL, TOOL]


def test_calls_are_shown_and_their_results_sent(browser: Browser) -> None:
    with scripted(say_calls(*CALLS, text="Well."), say_calls(CALLS[0]), say_it) as server:
        page = opened(browser, server)
        ask_and_wait(page, "Oslo?")
        assert page.all(".call p .name", "e.textContent") == ["weather", "now"]
        assert page.all(".call pre", "e.textContent") == ['{\n  "city": "Oslo"\n}', "{}"]
        assert page.text("#status") == 'Well.\nweather({"city": "Oslo"})\nnow({})'
        page.wait(IS_SHOWN)
        assert shown(page) == [True, False], "the marks of a call are left to the tokens"
        assert page.text(SHOWN) == "Well."
        labels = page.all(FIELDS, "e.labels[0].innerText.trim()")
        assert labels == ["Result of weather", "Result of now"]
        write(page, FIELDS, "rain\nand")
        page.press("Enter")
        page.type("wind")
        assert len(server.asked) == 1, "Enter starts a line"
        page.open()
        page.wait(IS_SHOWN)
        assert page.all(FIELDS, "e.value") == ["rain\nand\nwind", ""]
        page.click(".calls button")
        wait_for_articles(page, 3)
        told = {"role": "assistant", "content": "Well.", "tool_calls": CALLS}
        messages = [{"role": "user", "content": "Oslo?"}, told, *asked_of("rain\nand\nwind", "")]
        assert server.asked[1]["messages"] == messages
        assert page.all(FIELDS, "e.readOnly") == [True, True, False]
        assert page.all(".calls button", "e.checkVisibility()") == [False, False, True]
        assert page.evaluate("document.activeElement.id") == "question"
        write(page, f"article:last-of-type {FIELDS}", "sun")
        page.click(".calls button")
        wait_for_articles(page, 4)
        again = {"role": "assistant", "content": "", "tool_calls": [CALLS[0]]}
        result = {"role": "tool", "tool_call_id": "call_weather", "content": "sun"}
        assert server.asked[2]["messages"] == [*messages, again, result]
        page.open()
        page.wait("document.querySelector('#model').textContent === 'tiny'")
        assert page.all(FIELDS, "[e.value, e.readOnly]") == [
            ["rain\nand\nwind", True],
            ["", True],
            ["sun", True],
        ]
        page.click(".repeat")
        page.wait(
            "document.querySelector('article:last-of-type .cost').textContent.includes('sam')"
        )
        assert server.asked[3]["messages"] == server.asked[2]["messages"]
        page.click("#fresh")
        page.wait("!document.querySelector('article')")
        assert page.problems == []


def test_a_message_leaves_calls_with_what_is_written(browser: Browser) -> None:
    def busy(answering: Answering) -> None:
        answering.refuse(503, "queue")

    with scripted(say_calls(*CALLS), busy, busy, say_it) as server:
        page = opened(browser, server)
        ask_and_wait(page, "Oslo?")
        write(page, FIELDS, "rain")
        page.click(".calls button")
        page.wait(f"{IDLE} && !document.querySelector('#notice').hidden")
        ask_and_wait(page, "Never mind")
        assert [message["role"] for message in server.asked[2]["messages"][2:]] == [
            "tool",
            "tool",
            "user",
        ]
        assert page.all(FIELDS, "[e.value, e.readOnly]") == [["rain", False], ["", False]]
        assert page.evaluate("document.querySelector('#question').value") == "Never mind"
        page.click("#send")
        wait_for_articles(page, 4)
        assert server.asked[3]["messages"] == server.asked[2]["messages"]
        last = {"role": "user", "content": "Never mind"}
        assert server.asked[3]["messages"][2:] == [*asked_of("rain", ""), last]
        assert page.text("article:last-of-type .text") == TEXT


def test_an_answer_that_calls_can_be_repeated(browser: Browser) -> None:
    other = say_calls(call("weather", '{"city": "Rome"}'))
    with scripted(say_calls(CALLS[0]), say_calls(CALLS[0]), other) as server:
        page = opened(browser, server)
        ask_and_wait(page, "Oslo?")
        for number, words in ((2, "with the same text"), (3, "with another text")):
            page.click(".repeat")
            cost = "document.querySelector('.assistant .cost').textContent"
            page.wait(f"{cost}.endsWith('{words}')")
            assert len(server.asked) == number
            assert server.asked[-1]["messages"] == [{"role": "user", "content": "Oslo?"}]
            assert page.all(FIELDS, "e.readOnly") == [False]


def test_no_result_is_sent_or_kept_without_its_call(browser: Browser) -> None:
    def too_long(answering: Answering) -> None:
        answering.refuse(400, "does not fit", code="context_length_exceeded")

    with scripted(say_calls(*CALLS), say_it, too_long, say_it) as server:
        page = opened(browser, server)
        ask_and_wait(page, "Oslo?")
        page.click(".calls button")
        wait_for_articles(page, 3)
        ask_and_wait(page, "Rome?")
        last = {"role": "user", "content": "Rome?"}
        assert [len(asked["messages"]) for asked in server.asked] == [1, 4, 6, 1]
        assert server.asked[3]["messages"] == [last]
        assert "its first 3 turns are no longer sent" in page.text("#notice")
        kept = page.evaluate(
            "(async () => {"
            "  const { saveConversation } = await import(`${location.href}page/store.js`);"
            "  const turns = JSON.parse(localStorage['polybasic.conversation'] ?? 'null');"
            "  turns[1].calls[0].result = 'x'.repeat(1_000_000);"
            "  saveConversation(turns);"
            "  return JSON.parse(localStorage['polybasic.conversation']).map((e) => e.text); })()"
        )
        assert kept == ["Rome?", TEXT]


def test_a_call_is_never_markup(browser: Browser) -> None:
    attack = call(ATTACK, json.dumps({ATTACK: ATTACK}))
    with scripted(say_calls(attack, call(ATTACK, ATTACK))) as server:
        page = opened(browser, server)
        ask_and_wait(page)
        for _ in range(2):
            page.wait("document.querySelectorAll('.call').length === 2")
            names = page.all(".call .name", "e.textContent")
            assert names == [ATTACK] * 4
            given = page.all(".call pre", "e.textContent")
            assert given == [json.dumps({ATTACK: ATTACK}, indent=2), ATTACK]
            assert page.evaluate("document.querySelectorAll('img, b').length") == 0
            assert page.evaluate("document.title") == "polybasic"
            page.open()


def test_tokens_of_the_grammar_are_told(browser: Browser) -> None:
    with scripted(say_it, say_calls(*CALLS)) as server:
        page = opened(browser, server)
        ask_and_wait(page)
        assert "foretold" not in page.text("#legend")
        ask_and_wait(page)
        assert "foretold by the grammar1" in page.text("#legend")
        style = "getComputedStyle(e)"
        look = f"{style}.textDecorationStyle + {style}.textDecorationThickness"
        tint = f"{style}.backgroundColor"
        tokens = ".token.target, .token.proposer1, .token.proposer2, .token.ngram, .token.grammar"
        for seen in (look, tint):
            found = dict(page.all(tokens, f"[e.className, {seen}]"))
            assert len({*found.values()}) == len(found) == 5
            assert "rgba(0, 0, 0, 0)" not in found.values()


@pytest.mark.parametrize("features", [LIGHT, DARK], ids=["light", "dark"])
def test_calls_can_be_read_on_a_phone(browser: Browser, features: dict[str, str]) -> None:
    wide = call("w" * 64, json.dumps({"w" * 200: "v" * 200}))
    with scripted(say_calls(wide)) as server:
        page = opened(browser, server, features=features, width=360)
        ask_and_wait(page)
        fits = "e.scrollWidth <= e.clientWidth"
        assert page.all("html, #conversation, .call", fits) == [True] * 3
        assert page.all(".call pre", fits) == [False]
        page.click("#open-settings")
        choose(page, "json_schema")
        write(page, "[name=schema]", "{")
        found = page.evaluate(CONTRASTS)
        assert {name for _, name in found} >= {"name", "wrong", "CODE", "SPAN"}
        assert min(found)[0] >= 4.5
        assert page.all("#settings", "e.scrollWidth <= e.clientWidth") == [True]


def test_the_server_takes_what_the_page_sends(browser: Browser, tmp_path: Path) -> None:
    schema = json.dumps({"type": "array", "items": {"const": 7}, "minItems": 1, "maxItems": 1})
    given = {"format": "json_schema", "schema": schema, "tools": json.dumps([WEATHER])}
    turns = [{"role": "user", "text": "Oslo?"}, {"role": "assistant", "text": "", "calls": CALLS}]
    with serving_tools(tmp_path) as server:
        page = Page(browser, server.url)
        for name, value in (("settings", given), ("conversation", turns)):
            kept = f"localStorage['polybasic.{name}'] = {json.dumps(json.dumps(value))}"
            page.evaluate(f"addEventListener('pagehide', () => {kept})")
        page.open()
        page.wait("document.querySelector('#model').textContent")
        page.click(".calls button")
        wait_for_articles(page, 3)
        assert page.text("#notice") == ""
        assert page.text("article:last-of-type .formatted") == "[\n  7\n]"
        assert page.problems == []
