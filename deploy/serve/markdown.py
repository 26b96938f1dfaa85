"""Markdown as elements that a page makes one by one: nothing of it runs or is loaded."""

import re
from collections.abc import Iterator
from typing import Required, TypedDict

from markdown_it import MarkdownIt
from markdown_it.token import Token

MAX_CHARACTERS = 1 << 16
"""Of a text; the slowest of this length take about a second."""
_MAX_DEPTH = 20
"""Of blocks within each other, and of what is in a line; the parser's time grows with it."""
_FIRST_HEADING = 4
"""Headings of an answer stand below those of the page."""
_MAY_LINK = re.compile(r"https?://|mailto:", re.IGNORECASE)


class Element(TypedDict, total=False):
    """An element of HTML.

    Attributes:
        tag: its name, one of those that CommonMark, tables and ~~strikethrough~~ need.
        children: what it holds.
        href: of a link, with http, https or mailto.
        start: of a numbered list that does not begin with 1.
        align: of a table's cell: left, center or right.
    """

    tag: Required[str]
    children: Required[list["Node"]]
    href: str
    start: int
    align: str


Node = Element | str
"""An element, or text as it is."""


class _Markdown(MarkdownIt):
    """CommonMark with tables, in which HTML is text."""

    def __init__(self) -> None:
        super().__init__("commonmark", {"html": False, "maxNesting": _MAX_DEPTH})
        self.enable(["table", "strikethrough"])

    def validateLink(self, url: str) -> bool:
        """Whether a link is one; else it stays text."""
        return _MAY_LINK.match(url) is not None


_MARKDOWN = _Markdown()


def elements(text: str) -> list[Node]:
    """The elements that a text in Markdown means.

    HTML, images and links to anything but http, https and mailto are text in them. Lines end where
    they end in the text. A text that is nested too deeply is returned as it is.

    Args:
        text: of at most `MAX_CHARACTERS`, which the caller checks.
    """
    tokens = list(_flat(_MARKDOWN.parse(text)))
    if any(token.level >= _MAX_DEPTH - 1 for token in tokens):
        return [text]  # the parser leaves out what is within
    nodes: list[Node] = []
    within = [nodes]  # the children of each element that is open
    for token in tokens:
        if token.nesting < 0:
            within.pop()
        elif token.nesting == 0:
            within[-1].append(_leaf(token))
        elif token.hidden:
            within.append(within[-1])
        else:
            element = _element(token)
            within[-1].append(element)
            within.append(element["children"])
    return nodes


def _flat(tokens: list[Token]) -> Iterator[Token]:
    """The tokens of blocks and lines, in the order of the text."""
    for token in tokens:
        if token.type == "inline":
            yield from token.children or []
        else:
            yield token


def _leaf(token: Token) -> Node:
    match token.type:
        case "softbreak" | "hardbreak":
            return Element(tag="br", children=[])
        case "hr":
            return Element(tag="hr", children=[])
        case "code_inline":
            return Element(tag="code", children=[token.content])
        case "fence" | "code_block":
            code = Element(tag="code", children=[token.content])
            return Element(tag="pre", children=[code])
        case "image":
            return f"![{token.content}]({token.attrGet('src')})"
    return token.content


def _element(token: Token) -> Element:
    element = Element(tag=token.tag, children=[])
    if token.type == "heading_open":
        element["tag"] = f"h{min(6, _FIRST_HEADING - 1 + int(token.tag[1:]))}"
    if "href" in token.attrs:
        element["href"] = str(token.attrs["href"])
    if "start" in token.attrs:
        element["start"] = int(token.attrs["start"])
    if "style" in token.attrs:
        element["align"] = str(token.attrs["style"]).removeprefix("text-align:")
    return element
