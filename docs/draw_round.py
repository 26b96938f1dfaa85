"""The picture of a round in the README.

    python docs/draw_round.py [FILE]

Writes docs/round.svg, the same bytes each time.
"""

import sys
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 940, 400
PANEL_WIDTH, GAP, MARGIN = 276, 36, 20
LIGHT = {
    "page": ("#ffffff", "#d0d7de"),
    "panel": ("#f6f8fa", "none"),
    "given": ("#ffffff", "#8c959f", "#1f2328"),
    "guess": ("#ffffff", "#8c959f", "#57606a"),
    "kept": ("#ddf4ff", "#0969da", "#0a3069"),
    "own": ("#dafbe1", "#1a7f37", "#0b4a1f"),
    "cut": ("#ffebe9", "#cf222e", "#82071e"),
}
DARK = {
    "page": ("#0d1117", "#30363d"),
    "panel": ("#161b22", "none"),
    "given": ("#0d1117", "#8b949e", "#e6edf3"),
    "guess": ("#0d1117", "#8b949e", "#9198a1"),
    "kept": ("#121d2f", "#4493f8", "#a5d6ff"),
    "own": ("#12261e", "#3fb950", "#7ee787"),
    "cut": ("#2d1618", "#f85149", "#ffa198"),
}
"""Fill, outline and text by kind of box."""
SHAPES = """
    svg { font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 13px; }
    .title { font-size: 16px; font-weight: 600; }
    .token text { font-size: 14px; text-anchor: middle; }
    .token.guess rect { stroke-dasharray: 4 3; }
    .token.cut text { text-decoration: line-through; }
    path { fill: none; stroke-width: 1.5; }
    path.kept { stroke-width: 3; }
"""

TREE = {  # candidate: its level, its place there, what it hangs below
    "cold": (0, 0, None),
    "warm": (0, 1, None),
    "and": (1, 0, "cold"),
    "today": (1, 1, "cold"),
    "wet": (2, 0, "and"),
    "dry": (2, 1, "and"),
}
PATH = ("cold", "and", "wet")
"""The candidates that the intermediate draws, too."""
BLOCK = ("cold", "and", "wet", "in", "the", "north", ",", "dry")
ROUND_TOKENS, NUM_KEPT, OWN = 4, 6, "."


def main(path: Path) -> None:
    """Write the picture."""
    first, second, third = (MARGIN + (PANEL_WIDTH + GAP) * index for index in range(3))
    drawn = [
        f'<rect class="page" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="10"/>',
        *drafter(first),
        *intermediate(second),
        *target(third),
        arrow(second - GAP),
        arrow(third - GAP),
        *answer(),
    ]
    style = SHAPES + rules(LIGHT, 4) + "    @media (prefers-color-scheme: dark) {\n"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "  <title>A round of a chain of three models</title>",
        f"  <style>{style}{rules(DARK, 6)}    }}\n  </style>",
        *(f"  {part}" for part in drawn),
        "</svg>",
    ]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def rules(colours: dict[str, tuple[str, ...]], indent: int) -> str:
    """CSS of a set of colours."""
    _, _, words = colours["given"]
    _, _, pale = colours["guess"]
    found = [f"text {{ fill: {words}; }}", f".note {{ fill: {pale}; }}"]
    found += [f"path {{ stroke: {pale}; }}", f"path.kept {{ stroke: {colours['kept'][1]}; }}"]
    for kind, (fill, outline, *text_fill) in colours.items():
        box = f".{kind} rect" if text_fill else f".{kind}"
        found.append(f"{box} {{ fill: {fill}; stroke: {outline}; }}")
        found += [f".{kind} text {{ fill: {colour}; }}" for colour in text_fill]
    return "".join(f"{' ' * indent}{rule}\n" for rule in found)


def drafter(x: int) -> list[str]:
    """A tree of candidates below the last token of the text."""
    places = {
        word: (x + 62 + 71 * level, 142 + 54 * place) for word, (level, place, _) in TREE.items()
    }
    edges, boxes = [], [token(x + 10, 169, "is", "given", 36)]
    for word, (_, _, above) in TREE.items():
        left, middle = places[word]
        start = (x + 46, 169) if above is None else (places[above][0] + 58, places[above][1])
        kind = "kept" if word in PATH else "guess"
        edges.append(f'<path class="{kind}" d="M{start[0]} {start[1]} L{left} {middle}"/>')
        boxes.append(token(left, middle, word, kind, 58))
    notes = ("guesses a tree of tokens in", "a few cheap passes")
    return [*panel(x, "Drafter", *notes), *edges, *boxes]


def intermediate(x: int) -> list[str]:
    """The paths that the intermediate draws, round after round, as a block."""
    boxes = [
        token(x + 12 + 64 * (index % ROUND_TOKENS), 142 + 54 * (index // ROUND_TOKENS), word, kind)
        for index, word in enumerate(BLOCK)
        for kind in ["own" if index % ROUND_TOKENS == ROUND_TOKENS - 1 else "kept"]
    ]
    notes = ("walks the tree by sampling, and", "collects a block, round by round")
    return [*panel(x, "Intermediate", *notes), *boxes]


def target(x: int) -> list[str]:
    """The block, of which the target keeps what speculative sampling lets it keep."""
    boxes = [
        token(
            x + 12 + 64 * (index % ROUND_TOKENS),
            142 + 54 * (index // ROUND_TOKENS),
            word,
            "kept" if index < NUM_KEPT else "cut",
        )
        for index, word in enumerate(BLOCK)
    ]
    notes = ("checks the block in one pass, keeps a", "part, and adds a token of its own")
    return [*panel(x, "Target", *notes), *boxes]


def answer() -> list[str]:
    """What the pass of the target gained."""
    words = [("The", "given"), ("weather", "given"), ("is", "given")]
    words += [(word, "kept") for word in BLOCK[:NUM_KEPT]] + [(OWN, "own")]
    boxes = [token(MARGIN + 74 * index, 330, *each, 68) for index, each in enumerate(words)]
    gained = f"One pass of the target gained {NUM_KEPT + 1} tokens"
    return [
        text(MARGIN, 294, "title", "The text"),
        *boxes,
        text(MARGIN, 374, "note", f"{gained}, drawn exactly from its own distribution."),
    ]


def panel(x: int, title: str, *notes: str) -> list[str]:
    """A model's part of the picture."""
    return [
        f'<rect class="panel" x="{x}" y="20" width="{PANEL_WIDTH}" height="224" rx="8"/>',
        text(x + 12, 48, "title", title),
        *(text(x + 12, 70 + 18 * row, "note", line) for row, line in enumerate(notes)),
    ]


def token(x: int, y: int, word: str, kind: str, width: int = 60) -> str:
    """A token in a box, by its left edge and its middle line."""
    return (
        f'<g class="token {kind}"><rect x="{x}" y="{y - 15}" width="{width}" height="30" rx="6"/>'
        f'<text x="{x + width // 2}" y="{y + 5}">{escape(word)}</text></g>'
    )


def text(x: int, y: int, kind: str, line: str) -> str:
    """A line of words."""
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(line)}</text>'


def arrow(x: int) -> str:
    """From a model to the next, across the gap that begins at `x`."""
    end = x + GAP - 6
    return f'<path d="M{x + 6} 169 H{end} M{end - 8} 162 L{end} 169 L{end - 8} 176"/>'


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("round.svg"))
