"""Who can use the page: contrast, narrow screens, motion, names of controls."""

from threading import Event

import pytest

from tests.browser import Browser
from tests.deploy.serve.page.asking import (
    IDLE,
    TEXT,
    TOKENS,
    ask,
    ask_and_wait,
    opened,
    say,
    say_it,
)
from tests.deploy.serve.page.scripted import Answering, scripted
from tests.deploy.serve.test_markdown import ANSWER

pytestmark = pytest.mark.proof

LIGHT, DARK = ({"prefers-color-scheme": name} for name in ("light", "dark"))


CONTRASTS = """(() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b]
    .map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const color = channels(getComputedStyle(e).backgroundColor);
      if (color[3] !== 0) return color;
    }
  };
  const own = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  return [...document.querySelectorAll("body *")].filter((e) => own(e) && e.checkVisibility())
    .map((e) => {
      const [a, b] = [channels(getComputedStyle(e).color), behind(e)].map(luminance);
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.className || e.tagName];
    });
})()"""


@pytest.mark.parametrize("features", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast(browser: Browser, features: dict[str, str]) -> None:
    def all_members(answering: Answering) -> None:
        answering.begin()
        answering.tokens(*TOKENS, (" fourth", "unlisted"))
        answering.end()

    def refuse(answering: Answering) -> None:
        answering.refuse(400, "no")

    with scripted(all_members, say(ANSWER), refuse) as server:
        page = opened(browser, server, features=features)
        page.evaluate("document.querySelector('#by-member').open = true")
        for _ in range(3):
            ask_and_wait(page)
        page.wait("document.querySelector('.formatted > *')")
        page.evaluate("document.querySelector('.assistant .token').className = 'token proposer3'")
        page.evaluate("document.querySelector('#settings').showModal()")
        found = page.evaluate(CONTRASTS)
        named = {name for _, name in found}
        looks = {f"token {look}" for look in ("target", "proposer1", "proposer3", "ngram")}
        assert named >= looks | {"cost", "hint", "BUTTON", "P", "H4", "CODE", "TH", "TD", "A"}
        assert min(found)[0] >= 4.5
        page.evaluate("document.querySelector('.assistant .cost').style.color = 'rgb(118 118 118)'")
        assert min(page.evaluate(CONTRASTS))[0] < 4.5, "the measure can fail"
        page.evaluate("document.querySelector('.assistant .cost').style.color = ''")
        style = "getComputedStyle(e)"
        line = f"{style}.textDecorationStyle + {style}.textDecorationThickness"
        styles = page.all("#legend .token", line)
        assert len(set(styles)) == len(styles) >= 3, "members differ not by colour alone"


def test_a_phone_shows_it_without_scrolling_sideways(browser: Browser) -> None:
    def wide(answering: Answering) -> None:
        answering.begin()
        answering.tokens((200 * "w", "draft"), (" " + 200 * "v", "target"))
        answering.end()

    with scripted(wide, lambda answering: answering.refuse(400, 300 * "e")) as server:
        page = opened(browser, server, width=360, height=740)
        for _ in range(2):
            ask_and_wait(page, 150 * "q")
            for element in ("document.documentElement", "document.querySelector('#conversation')"):
                assert page.evaluate(f"{element}.scrollWidth <= {element}.clientWidth")
        shown = page.all("#legend .token", "e.checkVisibility() && e.offsetTop + e.offsetHeight")
        bottom = page.evaluate("document.querySelector('aside').getBoundingClientRect().bottom")
        assert len(shown) == 3
        assert 0 < min(shown) <= max(shown) < bottom < 300
        page.click("#open-settings")
        assert (
            page.evaluate("document.querySelector('#settings').getBoundingClientRect().right")
            <= 360
        )


def test_nothing_moves_for_those_who_ask_for_that(browser: Browser) -> None:
    go_on = Event()

    def waiting(answering: Answering) -> None:
        answering.begin()
        assert go_on.wait(10)
        answering.end()

    moving = "getComputedStyle(document.querySelector('.busy .text'), '::after').animationName"
    with scripted(waiting) as server:
        for features, name in (({}, "blink"), ({"prefers-reduced-motion": "reduce"}, "none")):
            go_on.clear()
            page = opened(browser, server, features=features)
            ask(page, "Hello")
            page.wait("document.querySelector('.busy')")
            assert page.evaluate(moving) == name
            go_on.set()
            page.wait(IDLE)


def test_controls_have_names_and_the_answer_is_read_once(browser: Browser) -> None:
    with scripted(say_it) as server:
        page = opened(browser, server)
        ask_and_wait(page)
        page.ask("Accessibility.enable")
        nodes = page.ask("Accessibility.getFullAXTree")["nodes"]
        names = {
            (node["role"]["value"], node["name"]["value"])
            for node in nodes
            if not node["ignored"] and "name" in node
        }
        assert names >= {
            ("switch", "Target alone"),
            ("button", "New conversation"),
            ("button", "Settings"),
            ("button", "Send"),
            ("button", "Copy"),
            ("textbox", "Your message"),
            ("log", "Conversation"),
            ("checkbox", "Tint tokens"),
        }
        assert page.evaluate("document.querySelector('[role=log]').ariaLive") == "off"
        copied = page.evaluate(
            "new Promise((done) => {"
            "  navigator.clipboard.writeText = async (text) => done(text);"
            "  document.querySelector('.assistant .copy').click(); })"
        )
        assert copied == TEXT
