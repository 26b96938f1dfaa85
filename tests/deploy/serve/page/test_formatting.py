"""Answers as their Markdown means them: code in a code font, and nothing that runs or loads."""

import pytest

from tests.browser import Browser, Page
from tests.deploy.serve.page.asking import ask_and_wait, opened, say, say_it
from tests.deploy.serve.page.scripted import Answering, scripted
from tests.deploy.serve.test_markdown import ANSWER, HOSTILE

pytestmark = pytest.mark.proof

SHOWN = ".assistant .formatted"
IS_SHOWN = f"!document.querySelector('{SHOWN}').hidden"


def shown(page: Page) -> list[bool]:
    """Whether the answer is shown formatted, and whether its tokens are."""
    return [
        page.evaluate(f"document.querySelector('.assistant {name}').checkVisibility()")
        for name in (".formatted", ".token")
    ]


def test_an_answer_is_formatted_and_its_tokens_are_a_click_away(browser: Browser) -> None:
    with scripted(say(ANSWER)) as server:
        page = opened(browser, server)
        ask_and_wait(page)
        page.wait(IS_SHOWN)
        assert shown(page) == [True, False]
        tags = page.all(f"{SHOWN} > *", "e.firstElementChild?.tagName ?? e.tagName")
        assert tags == ["H4", "EM", "LI", "TABLE", "CODE", "HR", "P"]
        assert page.text(f"{SHOWN} pre") == "<b>&amp;</b>\n"
        style = "getComputedStyle(e)"
        for font in page.all(f"{SHOWN} code", f"{style}.fontFamily"):
            assert font.endswith("monospace")
        assert page.all(f"{SHOWN} td", f"{style}.textAlign") == ["left", "right"]
        assert page.evaluate(f"document.querySelector('{SHOWN} ol').start") == 3
        link = page.all(f"{SHOWN} a", "[e.href, e.rel, e.target, e.textContent]")[0]
        rel = "noopener noreferrer nofollow"
        assert link == ["https://example.org/a?b=c&d", rel, "_blank", "more"]
        for words, found in (("Show tokens", [False, True]), ("Show formatted", [True, False])):
            assert page.text(".assistant .form") == words
            page.click(".assistant .form")
            assert shown(page) == found
        assert page.text(".assistant .text") == ANSWER
        page.open()
        page.wait(IS_SHOWN)
        assert page.text(f"{SHOWN} h4") == "Towers"
        page.click(".assistant .form")
        ask_and_wait(page)
        page.wait("document.querySelectorAll('.formatted > h4').length === 2")
        texts = page.all(".assistant .text", "e.checkVisibility()")
        assert texts == [True, True], "the choice holds for all answers"
        assert page.problems == []


def test_an_answer_of_paragraphs_keeps_its_tints(browser: Browser) -> None:
    with scripted(say_it, say("*One*")) as server:
        page = opened(browser, server)
        ask_and_wait(page)
        ask_and_wait(page)
        page.wait("!document.querySelector('article:last-of-type .formatted').hidden")
        assert shown(page) == [False, True]
        assert page.evaluate("document.querySelector('.assistant .form').hidden")


def test_nothing_of_a_hostile_answer_runs_or_loads(browser: Browser) -> None:
    with scripted(say("\n\n".join(["*begin*", *HOSTILE]))) as server:
        page = opened(browser, server)
        page.evaluate("window.alert = () => (window.ran = 1)")
        ask_and_wait(page)
        page.wait(IS_SHOWN)
        found = page.all(f"{SHOWN} *", "e.tagName")
        assert set(found) == {"P", "EM"}
        assert page.all(f"{SHOWN} *", "e.attributes.length") == [0] * len(found)
        assert "<script>alert(1)</script>" in page.text(SHOWN)
        assert "![a](http://example.org/a.png)" in page.text(SHOWN)
        loaded = page.evaluate("performance.getEntriesByType('resource').map((e) => e.name)")
        assert all(name.startswith(server.url) for name in loaded)
        assert page.evaluate("window.ran") is None
        assert page.problems == []


def test_an_answer_that_cannot_be_formatted_stays_as_it_is(browser: Browser) -> None:
    def and_then_refuse(answering: Answering) -> None:
        server.key = "secret"
        say(ANSWER)(answering)

    with scripted(and_then_refuse) as server:
        page = opened(browser, server)
        ask_and_wait(page)
        page.wait("performance.getEntriesByName(`${location.href}markdown`).length")
        assert shown(page) == [False, True]
        assert page.evaluate("document.querySelector('#notice').hidden")


@pytest.mark.parametrize("width", [360, 1100])
def test_what_is_wide_scrolls_by_itself(browser: Browser, width: int) -> None:
    row = "|" + 30 * " column |"
    wide = f"```\n{400 * 'w'}\n```\n\n{row}\n{row.replace('column', '-')}\n{row}\n"
    with scripted(say(wide)) as server:
        page = opened(browser, server, width=width)
        ask_and_wait(page)
        page.wait(IS_SHOWN)
        fits = "e.scrollWidth <= e.clientWidth"
        assert page.all("html, #conversation, .formatted", fits)[:2] == [True, True]
        assert page.all(".formatted pre, .scrolled", fits) == [False, False]
