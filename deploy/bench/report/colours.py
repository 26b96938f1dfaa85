"""Colours of systems and members: the same in every plot, told apart by colour-blind people."""

from collections.abc import Mapping
from dataclasses import dataclass

INK, SOFT, LINE, PAPER = "ink", "soft", "line", "paper"
"""Text, text of less weight, grid lines, background."""

_STYLES = {
    "target": ("grey", "H"),
    "eagle2": ("orange", "s"),
    "eagle3": ("orange", "s"),
    "polybasic": ("blue", "o"),
    "polybasic_full": ("sky", "D"),
    "ngram": ("purple", "v"),
    "draft_model": ("green", "^"),
    "transformers": ("yellow", "*"),
}
_OTHERS = (("vermilion", "P"), ("green", "X"), ("purple", "p"), ("grey", "h"))

_SENTINELS = {
    INK: "#010203",
    SOFT: "#010204",
    LINE: "#010205",
    PAPER: "#010206",
    "grey": "#010207",
    "orange": "#010208",
    "blue": "#010209",
    "sky": "#01020a",
    "purple": "#01020b",
    "green": "#01020c",
    "yellow": "#01020d",
    "vermilion": "#01020e",
    "part0": "#01020f",
    "part1": "#010210",
    "part2": "#010211",
    "part3": "#010212",
    "part4": "#010213",
    "part5": "#010214",
}
"""What stands for a name while a plot is drawn: colours that nothing else has."""
NUM_PARTS = 6


def colour(name: str) -> str:
    """Of a name of the style sheet, for drawing; `named` puts the name in its place."""
    return _SENTINELS[name]


def named(svg: str) -> str:
    """An SVG whose colours are those that the page's style sheet gives to their names."""
    for name, sentinel in _SENTINELS.items():
        svg = svg.replace(sentinel, f"var(--{name})")
    return svg


@dataclass(frozen=True)
class Style:
    """Colour and shape of the dots of a system."""

    colour: str
    marker: str


def styles(runtimes: Mapping[str, str]) -> dict[str, Style]:
    """By system: this runtime's have their own, those of another runtime share one.

    Args:
        runtimes: by system, in the report's order.
    """
    keys = {name: name if runtime == "polybasic" else runtime for name, runtime in runtimes.items()}
    others = [key for key in dict.fromkeys(keys.values()) if key not in _STYLES]
    known = _STYLES | {key: _OTHERS[place % len(_OTHERS)] for place, key in enumerate(others)}
    return {name: Style(colour(known[key][0]), known[key][1]) for name, key in keys.items()}
