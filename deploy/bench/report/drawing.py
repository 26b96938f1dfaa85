"""Drawing for a page: figures as inline SVG that take their colours and font from it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import matplotlib as mpl
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from polybasic.deploy.bench.report.colours import INK, LINE, SOFT, colour, named

WIDTH = 240.0
"""Points of a plot: on a narrow phone it is shown at its own size."""
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "polybasic",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.edgecolor": colour(SOFT),
    "axes.labelcolor": colour(SOFT),
    "axes.linewidth": 0.8,
    "grid.color": colour(LINE),
    "grid.linewidth": 0.8,
    "text.color": colour(INK),
    "xaxis.labellocation": "right",
    "xtick.color": colour(SOFT),
    "ytick.color": colour(INK),
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.8,
}


class Plot:
    """A figure that is being drawn.

    Attributes:
        axes: one above the other.
    """

    def __init__(self, height: float, num_axes: int = 1) -> None:
        self.figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        FigureCanvasSVG(self.figure)
        self.figure.patch.set_alpha(0)
        grid = self.figure.subplots(num_axes, 1, squeeze=False, sharex=True)
        self.axes: list[Axes] = list(grid[:, 0])
        for axes in self.axes:
            axes.patch.set_alpha(0)

    def svg(self, name: str, title: str, description: str) -> Markup:
        """The figure as an element of a page.

        Args:
            name: unique on the page.
            description: what it shows, for those who cannot see it.
        """
        written = StringIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        self.figure.savefig(written, format="svg", metadata=metadata)
        return _inline(written.getvalue(), name, title, description)


@contextmanager
def drawing() -> Iterator[None]:
    """What is drawn in the block has this style; matplotlib's own settings stay as they are."""
    with mpl.rc_context(_SETTINGS):
        yield


def _inline(svg: str, name: str, title: str, description: str) -> Markup:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    size = re.search(r'viewBox="[^"]*"', svg)
    assert size is not None
    opening = (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {size[0]} role="img" '
        f'aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(description)}</desc>'
    )
    return Markup(opening + named(svg[svg.index(">") + 1 :]))
