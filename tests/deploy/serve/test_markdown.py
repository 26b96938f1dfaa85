"""Answers as elements: what Markdown means, and that nothing else comes of a text."""

import json
from collections.abc import Iterator

import pytest

from polybasic.deploy import Chain
from polybasic.deploy.serve.markdown import MAX_CHARACTERS, Node, elements
from tests.deploy.serve.serving import Served, serving

TAGS = {
    *("a", "blockquote", "br", "code", "em", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s"),
    *("strong", "table", "tbody", "td", "th", "thead", "tr", "ul"),
}
ANSWER = """# Towers

The *old* **one** ~~stood~~
stands, says `tower()`.

3. first
4. second
   - inner

| name | height |
|:-----|-------:|
| old  | 31     |

```html
<b>&amp;</b>
```

---

> [more](HTTPS://example.org/a?b=c&d "title") <mailto:a@example.org>
"""
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a <b onclick=alert(1)>bold</b> <!-- hidden --> <![CDATA[x]]> <?php x ?>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "[a](javascript:alert(1))",
    "[a](JaVaScRiPt:alert(1))",
    "[a](&#106;avascript:alert(1))",
    "[a](<java\tscript:alert(1)>)",
    "[a]( \x01javascript:alert(1))",
    "[a](vbscript:x)",
    "[a](data:text/html;base64,PHNjcmlwdD4=)",
    "[a](file:///etc/passwd)",
    "[a](blob:https://example.org/1)",
    "[a](//example.org/a)",
    "[a](/v1/models)",
    "[a](#settings)",
    "[a](http:v1/models)",
    "<javascript:alert(1)>",
    "[a]\n\n[a]: javascript:alert(1)",
    "![a](http://example.org/a.png)",
    "![a](javascript:alert(1))",
    "![a](data:image/svg+xml,<svg/onload=alert(1)>)",
    "http://example.org www.example.org",
]


def element(tag: str, *children: Node, **attributes: str | int) -> Node:
    made: Node = {"tag": tag, "children": list(children), **attributes}  # type: ignore[typeddict-item]
    return made


def tags(nodes: list[Node]) -> Iterator[str]:
    for node in nodes:
        if not isinstance(node, str):
            yield node["tag"]
            yield from tags(node["children"])


def text(nodes: list[Node]) -> str:
    return "".join(node if isinstance(node, str) else text(node["children"]) for node in nodes)


def test_what_an_answer_means() -> None:
    row = [element("td", "old", align="left"), element("td", "31", align="right")]
    head = [element("th", "name", align="left"), element("th", "height", align="right")]
    assert elements(ANSWER) == [
        element("h4", "Towers"),
        element(
            "p",
            *("The ", element("em", "old"), " ", element("strong", "one"), " "),
            *(element("s", "stood"), element("br"), "stands, says "),
            *(element("code", "tower()"), "."),
        ),
        element(
            "ol",
            element("li", "first"),
            element("li", "second", element("ul", element("li", "inner"))),
            start=3,
        ),
        element(
            "table",
            element("thead", element("tr", *head)),
            element("tbody", element("tr", *row)),
        ),
        element("pre", element("code", "<b>&amp;</b>\n")),
        element("hr"),
        element(
            "blockquote",
            element(
                "p",
                element("a", "more", href="HTTPS://example.org/a?b=c&d"),
                " ",
                element("a", "mailto:a@example.org", href="mailto:a@example.org"),
            ),
        ),
    ]
    assert set(tags(elements(ANSWER + "\n## a\n### b\n#### c\n"))) == TAGS


@pytest.mark.parametrize("given", HOSTILE)
def test_what_is_hostile_is_text(given: str) -> None:
    for within in (given, f"# {given}", f"- {given}", f"> {given}", f"**{given}**"):
        found = elements(within)
        assert not {"a", "img", "script"} & set(tags(found))
        assert set(tags(found)) <= TAGS
        assert "href" not in json.dumps(found)
    if given[0] in "<!":
        assert text(elements(given)) == given, "nothing of it is lost"
    assert "a" in tags(elements(f"{given}\n\n[a](https://example.org)"))


def test_an_image_in_a_link_is_its_text() -> None:
    [found] = elements("[![a](http://example.org/a.png)](https://example.org)")
    inner = element("a", "![a](http://example.org/a.png)", href="https://example.org")
    assert found == element("p", inner)


DEEP = [
    400 * "> " + "a",
    5000 * "*a " + 5000 * "a* ",
    "".join(f"{2 * depth * ' '}- a\n" for depth in range(45)),
]


@pytest.mark.parametrize("given", DEEP, ids=["quotes", "emphasis", "lists"])
def test_what_is_nested_too_deeply_is_shown_as_it_is(given: str) -> None:
    assert elements(given) == [given]


def test_the_page_is_told_within_the_guard(chain: Chain) -> None:
    asked = {"text": "*a* <b>"}
    with serving(chain, api_keys=("secret",), body_bytes=1000) as served:
        refused = served.post("/markdown", asked)
        assert refused.status_code == 401
        headers = {"Authorization": "Bearer secret"}
        answer = served.post("/markdown", asked, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.json() == {"elements": [element("p", element("em", "a"), " <b>")]}
        assert served.post("/markdown", {"text": 1000 * "a"}, headers=headers).status_code == 413


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "text: Field required"),
        ({"text": 1}, "text: Input should be a valid string"),
        ({"text": "a", "html": True}, "unknown field html"),
        ({"text": (MAX_CHARACTERS + 1) * "a"}, "text has 65,537 characters; at most 65,536"),
    ],
)
def test_a_request_that_is_refused(server: Served, asked: dict[str, object], words: str) -> None:
    answer = server.post("/markdown", asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(words)
    assert answer.json()["error"]["param"] in ("text", "html")


def test_the_longest_text_is_taken(server: Served) -> None:
    answer = server.post("/markdown", {"text": MAX_CHARACTERS * "a"})
    assert answer.json() == {"elements": [element("p", MAX_CHARACTERS * "a")]}
