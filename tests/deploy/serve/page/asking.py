"""A page that is open, and what is asked on it."""

from typing import Any

from tests.browser import Browser, Page
from tests.deploy.serve.page.scripted import Answering, Script, ScriptedServer

TOKENS = [("The", "draft"), (" old", "target"), (" tower", "intermediate"), (" old", "ngram")]
TEXT = "The old tower old"
IDLE = "!document.querySelector('#send').hidden"


def say_it(answering: Answering, rate: float = 640.0) -> None:
    answering.begin()
    answering.tokens(*TOKENS[:2])
    answering.tokens(*TOKENS[2:])
    answering.end(rate=rate)


def say(text: str) -> Script:
    """An answer in two tokens."""

    def answer(answering: Answering) -> None:
        answering.begin()
        answering.tokens((text[:9], "draft"), (text[9:], "target"))
        answering.end()

    return answer


def opened(browser: Browser, server: ScriptedServer, **settings: Any) -> Page:
    page = Page(browser, server.url, **settings)
    page.wait("document.querySelector('#model').textContent === 'tiny'")
    return page


def ask(page: Page, text: str) -> None:
    page.evaluate("document.querySelector('#question').focus()")
    page.type(text)
    page.press("Enter")


def ask_and_wait(page: Page, text: str = "What stands there?") -> None:
    ask(page, text)
    page.wait("document.querySelector('#stop').hidden")
