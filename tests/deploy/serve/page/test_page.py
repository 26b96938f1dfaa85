"""The page in a browser, against answers that a test writes."""

import json
from threading import Event

import pytest

from tests.browser import Browser, Page
from tests.deploy.serve.page.asking import IDLE, TEXT, TOKENS, ask, ask_and_wait, opened, say_it
from tests.deploy.serve.page.scripted import Answering, Script, scripted

pytestmark = pytest.mark.proof

ATTACK = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"


def test_an_answer_comes_token_by_token_with_who_proposed_them(browser: Browser) -> None:
    go_on = Event()

    def slowly(answering: Answering) -> None:
        answering.begin()
        answering.tokens(*TOKENS[:2], passes={"target": 1, "intermediate": 2, "draft": 3})
        assert go_on.wait(10)
        # the text of a token may come before the token is told
        answering.tokens(text=" tow")
        answering.tokens(TOKENS[2], TOKENS[3], text="er old")
        answering.end()

    with scripted(slowly) as server:
        page = opened(browser, server)
        ask(page, "What stands there?")
        page.wait("document.querySelectorAll('.assistant .token').length === 2")
        assert page.text(".assistant .text") == "The old"
        assert page.text("#status") == "The answer is coming."
        assert page.text("#passes") == "target1intermediate2draft3"
        assert page.text("#length") == "2.00"
        go_on.set()
        page.wait(IDLE)
        shown = page.all(".assistant .token", "[e.textContent, e.dataset.member]")
        assert shown == [list(token) for token in TOKENS]
        assert page.text(".assistant .text") == TEXT == page.text("#status")
        assert [page.text(f"#{name}") for name in ("rate", "length", "tokens")] == [
            "640",
            "4.04",
            "4",
        ]
        assert page.text("#passes") == "target12intermediate30draft41"
        assert (
            page.text("#legend") == "target drew it itself1intermediate1draft1copied from the text1"
        )
        assert len(set(page.all(".assistant .token", "e.className"))) == len(TOKENS)
        asked = server.asked[0]
        assert asked["messages"] == [{"role": "user", "content": "What stands there?"}]
        assert asked["polybasic"] == {"members": True}
        assert page.problems == []


def test_a_lossy_plan_is_named_and_asked_for_no_draws(browser: Browser) -> None:
    def say(answering: Answering) -> None:
        answering.begin()
        answering.tokens(*TOKENS)
        answering.end()

    shown = (
        "['lossy', 'keep', 'stray'].filter((id) => document.getElementById(id).checkVisibility())"
    )
    with scripted(say) as server:
        page = opened(browser, server)
        assert page.evaluate(shown) == ["keep"]
        ask_and_wait(page, "Which is it?")
        assert isinstance(server.asked[0]["seed"], int)
        server.about = {**server.about, "lossless": False}
        page.open()
        page.wait("!document.getElementById('lossy').hidden")
        assert page.evaluate(shown) == ["lossy"]
        ask_and_wait(page, "And now?")
        assert server.asked[1]["temperature"] == 0
        assert "seed" not in server.asked[1]
        page.click("#alone")
        ask_and_wait(page, "And alone?")
        assert isinstance(server.asked[2]["seed"], int)
        page.click("#fresh")
        page.wait("document.querySelectorAll('article').length === 0")
        assert page.evaluate(shown) == ["lossy", "stray"]
        assert page.problems == []


def test_text_is_never_markup(browser: Browser) -> None:
    def attack(answering: Answering) -> None:
        answering.begin()
        answering.tokens((ATTACK, "draft"), (ATTACK, ATTACK))
        answering.end()

    def refuse(answering: Answering) -> None:
        answering.refuse(400, ATTACK)

    with scripted(attack, refuse) as server:
        page = opened(browser, server)
        ask_and_wait(page, ATTACK)
        ask_and_wait(page, ATTACK)
        assert page.text(".user .text") == ATTACK
        assert page.text("#notice") == f"{ATTACK}."
        page.open()
        page.wait("document.querySelectorAll('article').length === 2")
        assert page.text(".assistant .text") == 2 * ATTACK
        assert page.evaluate("document.querySelectorAll('img, b').length") == 0
        assert page.evaluate("document.title") == "polybasic"
        for inline in (
            "document.body.insertAdjacentHTML('beforeend', '<b onclick=\"window.ran = 1\">')",
            "document.body.append(document.createElement('b'));"
            "document.querySelector('b').setAttribute('onclick', 'window.ran = 1')",
        ):
            tried = f"(() => {{ try {{ {inline} }} catch (error) {{ return error.name; }} }})()"
            failed = page.evaluate(tried)
            assert failed == "TypeError", "the policy of contents lets no text become markup"
        page.evaluate("document.querySelector('b').click()")
        assert page.evaluate("window.ran") is None


def test_an_answer_is_stopped_with_the_keyboard_and_the_button(browser: Browser) -> None:
    left = [Event(), Event()]

    def endless(number: int) -> Script:
        def answer(answering: Answering) -> None:
            answering.begin()
            answering.tokens(*TOKENS)
            answering.wait_until_left()
            left[number].set()

        return answer

    with scripted(endless(0), endless(1), say_it) as server:
        page = opened(browser, server)
        for number in range(2):
            ask(page, f"Question {number}")
            page.wait(f"document.querySelectorAll('.assistant .token').length === {4 * number + 4}")
            page.press("Escape") if number == 0 else page.click("#stop")
            page.wait(IDLE)
            assert left[number].wait(10), "the server hears of it"
        assert page.text(".assistant .cost") == "stopped"
        ask_and_wait(page)
        assert [message["content"] for message in server.asked[2]["messages"]] == [
            "Question 0",
            TEXT,
            "Question 1",
            TEXT,
            "What stands there?",
        ]
        assert page.problems == []


def test_the_target_alone_is_asked_and_compared(browser: Browser) -> None:
    def alone(answering: Answering) -> None:
        answering.begin()
        answering.tokens(*((part, "target") for part, _ in TOKENS))
        answering.end(rate=320.0)

    with scripted(alone, say_it) as server:
        page = opened(browser, server)
        page.click("label.switch")
        ask_and_wait(page)
        assert server.asked[0]["polybasic"] == {"members": True, "run": ["target"]}
        assert page.text(".assistant .cost") == "320 tokens a second · target alone"
        page.click(".repeat")
        page.wait("document.querySelector('.assistant .cost').textContent.includes('times')")
        assert page.text(".assistant .cost").endswith(
            "2.00 times as fast as the target alone, with the same text"
        )
        first, second = server.asked
        assert second["polybasic"] == {"members": True}
        assert (second["messages"], second["seed"]) == (first["messages"], first["seed"])
        assert page.evaluate("document.querySelectorAll('article').length") == 2


def test_errors_are_told_in_words(browser: Browser) -> None:
    def busy(answering: Answering) -> None:
        answering.refuse(503, "queue", {"Retry-After": "7"})

    def lost(answering: Answering) -> None:
        answering.begin()
        answering.tokens(*TOKENS)
        answering.cut_off()

    def failing(answering: Answering) -> None:
        answering.begin()
        page.type("and more")
        answering.event({"error": {"message": "the model computed no numbers"}})

    with scripted(busy, lost, failing, say_it) as server:
        page = opened(browser, server)
        ask_and_wait(page, "Say it")
        assert page.text("#notice") == "The server is busy. Please send it again in 7 seconds."
        assert page.evaluate("document.querySelector('#notice').role") == "alert"
        assert page.evaluate("document.querySelector('#question').value") == "Say it"
        page.press("Enter")
        page.wait(f"{IDLE} && !document.querySelector('#notice').hidden")
        assert page.text("#notice") == "The connection was lost before the answer was complete."
        assert page.text(".assistant .text") == TEXT, "what came is kept"
        assert page.text(".assistant .cost") == "incomplete"
        ask_and_wait(page, "Again")
        assert page.text("#notice") == "The model computed no numbers."
        assert page.evaluate("document.querySelector('#question').value") == "Again\nand more"
        page.press("Enter")
        page.wait(f"{IDLE} && document.querySelectorAll('article').length === 4")
        assert page.evaluate("document.querySelector('#notice').hidden")
    ask_and_wait(page, "Is anybody there?")
    assert page.text("#notice") == "The server cannot be reached. Is it running?"


def test_a_key_is_asked_for(browser: Browser) -> None:
    with scripted(say_it) as server:
        server.key = "secret"
        page = Page(browser, server.url)
        page.wait("document.querySelector('#settings').open")
        words = "This server asks for an API key. Enter it in the settings."
        assert page.text("#notice") == page.text("#key-wrong") == words
        assert page.evaluate("document.activeElement.name") == "key"
        page.press("Escape")
        page.wait("!document.querySelector('#settings').open")
        page.click("#open-settings")
        assert page.evaluate("document.querySelector('#key-wrong').hidden")
        page.evaluate("document.querySelector('[name=key]').focus()")
        page.type("wrong")
        page.press("Enter")
        page.wait("document.querySelector('#settings').open")
        page.wait("!document.querySelector('#key-wrong').hidden")
        assert page.text("#key-wrong") == "This server does not take the API key of the settings."
        wrong = page.evaluate(
            "JSON.parse(JSON.stringify(document.querySelector('#key-wrong').getBoundingClientRect()))"
        )
        under = f"document.elementFromPoint({wrong['x'] + 9}, {wrong['y'] + 9})"
        assert page.evaluate(f"{under}.id") == "key-wrong", "nothing lies over it"
        page.evaluate("document.querySelector('[name=key]').select()")
        page.type("secret")
        assert page.evaluate("document.querySelector('#key-wrong').hidden")
        page.press("Enter")
        page.wait("document.querySelector('#model').textContent === 'tiny'")
        assert page.evaluate("document.querySelector('#notice').hidden")
        ask_and_wait(page)
        page.open()
        page.wait("document.querySelector('#model').textContent === 'tiny'")
        assert page.text(".assistant .text") == TEXT
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_a_refusal_that_is_not_of_the_key_is_told_as_it_is(browser: Browser) -> None:
    with scripted(lambda answering: answering.refuse(403, "ask localhost instead")) as server:
        page = opened(browser, server)
        ask_and_wait(page)
        assert page.text("#notice") == "Ask localhost instead."
        assert not page.evaluate("document.querySelector('#settings').open")


def test_settings_are_sent_and_kept(browser: Browser) -> None:
    with scripted(say_it) as server:
        page = opened(browser, server)
        page.click("#open-settings")
        given = {"temperature": "0.7", "top_p": "0.9", "max_tokens": "64", "seed": "5"}
        for name, value in (given | {"system": "Be brief."}).items():
            page.evaluate(f"document.querySelector('[name={name}]').focus()")
            page.type(value)
        page.press("Escape")
        page.wait("!document.querySelector('#settings').open")
        page.open()
        page.wait("document.querySelector('#model').textContent === 'tiny'")
        ask_and_wait(page)
        asked = server.asked[0]
        assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
        assert {name: asked[name] for name in given} == {
            "temperature": 0.7,
            "top_p": 0.9,
            "max_tokens": 64,
            "seed": 5,
        }
        page.click("#open-settings")
        page.evaluate("document.querySelector('[name=top_p]').focus()")
        page.type("9")  # 0.99 is in range, 0.999 too; 99 before it is not
        page.evaluate("document.querySelector('[name=top_p]').value = '9'")
        page.type("9")
        page.evaluate("document.querySelector('#settings').close()")
        ask_and_wait(page)
        assert server.asked[1]["top_p"] == 0.99, "a value out of range is not taken"


def test_an_answer_is_shown_that_begins_while_the_page_connects(browser: Browser) -> None:
    go_on = Event()

    def waiting(answering: Answering) -> None:
        answering.begin()
        assert go_on.wait(10)
        answering.tokens(*TOKENS)
        answering.end()

    with scripted(waiting) as server:
        page = opened(browser, server)
        page.evaluate(
            "(({ fetch }) => { window.fetch = async (path, options) => {"
            "  if (path === 'v1/models') await new Promise((done) => (window.goOn = done));"
            "  return fetch(path, options); } })(window)"
        )
        page.click("#open-settings")
        page.press("Escape")
        page.wait("window.goOn")
        ask(page, "What stands there?")
        page.wait("document.querySelector('.busy')")
        page.evaluate("window.goOn()")
        page.wait("performance.getEntriesByName(`${location.href}v1/models`).length === 2")
        go_on.set()
        page.wait(IDLE)
        assert page.text(".assistant .text") == TEXT


def test_a_conversation_outlives_a_reload_and_is_bounded(browser: Browser) -> None:
    long = 300_000 * "x"

    def much(answering: Answering) -> None:
        answering.begin()
        answering.tokens((long, "draft"))
        answering.end()

    def cut_short(answering: Answering) -> None:
        answering.begin()
        answering.tokens(*TOKENS)
        answering.wait_until_left()

    with scripted(say_it, much, much, cut_short) as server:
        page = opened(browser, server)
        ask_and_wait(page, "First\nline")
        before = page.evaluate("document.querySelector('#conversation').innerHTML")
        page.open()
        page.wait("document.querySelector('#model').textContent === 'tiny'")
        assert page.evaluate("document.querySelector('#conversation').innerHTML") == before
        assert page.text("#rate") == "640"
        for _ in range(2):
            ask_and_wait(page, "Much")
        assert page.evaluate("localStorage['polybasic.conversation'].length") < 1_000_001
        ask(page, "Last")
        page.wait("document.querySelectorAll('article').length === 8")
        page.wait("document.querySelector('article:last-of-type').textContent.includes('tower')")
        page.open()
        page.wait("document.querySelector('#model').textContent === 'tiny'")
        assert page.text("article:last-of-type .cost") in ("stopped", "incomplete")
        page.click("#fresh")
        page.wait("!document.querySelector('article')")
        page.type("half a ques")
        page.open()
        assert page.evaluate("document.querySelectorAll('article').length") == 0
        assert page.evaluate("document.querySelector('#question').value") == "half a ques"


def test_the_oldest_turns_are_not_sent_where_the_context_is_full(browser: Browser) -> None:
    def too_long(answering: Answering) -> None:
        answering.refuse(400, "does not fit", code="context_length_exceeded")

    with scripted(say_it, say_it, say_it, too_long, too_long, say_it, say_it, too_long) as server:
        page = opened(browser, server)
        for number in range(5):
            ask_and_wait(page, f"Question {number}")
            if number == 3:
                assert "its first 4 turns are no longer sent" in page.text("#notice")
        sent = [asked["messages"] for asked in server.asked]
        assert [messages[0]["content"] for messages in sent] == [
            *(f"Question {number}" for number in (0, 0, 0, 0, 1, 2, 2)),
        ]
        assert [len(messages) for messages in sent] == [1, 3, 5, 7, 5, 3, 5]
        ask_and_wait(page, "Question 5")
        assert [len(asked["messages"]) for asked in server.asked[7:]] == [7, 5, 3, 1]
        assert page.text("#notice") == "Does not fit."
        assert page.evaluate("document.querySelector('#question').value") == "Question 5"


@pytest.mark.parametrize(
    "damaged",
    [
        "{",
        "[1]",
        '[{"role": "user"}]',
        '{"role": "user"}',
        '[{"role": "assistant", "text": "", "calls": [{"id": "a", "function": {"name": "b"}}]}]',
    ],
)
def test_a_damaged_conversation_is_left_alone(browser: Browser, damaged: str) -> None:
    def unforeseen(answering: Answering) -> None:
        answering.begin()
        answering.raw(b"data: {]\n\n")

    with scripted(unforeseen, say_it) as server:
        page = opened(browser, server)
        keep = f"localStorage['polybasic.conversation'] = {json.dumps(damaged)}"
        page.evaluate(f"addEventListener('pagehide', () => {keep})")
        page.open()
        assert page.evaluate("localStorage['polybasic.conversation']") == damaged
        page.wait("document.querySelector('#model').textContent === 'tiny'")
        ask_and_wait(page)
        assert page.text("#notice").startswith("This page has failed: ")
        page.press("Enter")
        page.wait("document.querySelectorAll('article').length === 2")


def test_a_question_of_several_lines(browser: Browser) -> None:
    with scripted(say_it) as server:
        page = opened(browser, server)
        page.evaluate("document.querySelector('#question').focus()")
        page.type("one")
        page.press("Enter", shift=True)
        page.type("two")
        page.press("Enter")
        page.wait("document.querySelectorAll('article').length === 2")
        page.wait(IDLE)
        assert server.asked[0]["messages"][0]["content"] == "one\ntwo"
