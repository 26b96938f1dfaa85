"""A report as one page that asks for nothing else: text, tables and plots."""

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from polybasic.chain.base.tables import Table
from polybasic.chain.formats.files import whole_file
from polybasic.deploy.bench.report.lines import status_lines
from polybasic.deploy.bench.report.parts import Figure
from polybasic.deploy.bench.report.plots import draw
from polybasic.deploy.bench.report.sections import sections_of
from polybasic.deploy.bench.schema import Report


def write_page(path: Path, report: Report) -> None:
    """Write the report as HTML, whole.

    Raises:
        UserError: the disk is full or not writable.
    """
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["names"] = _with_names
    page = templates.get_template("page.html").render(
        report=report,
        status=status_lines(report),
        sections=sections_of(report),
        draw=lambda figure: draw(figure, report),
        is_table=lambda part: isinstance(part, Table),
        is_figure=lambda part: isinstance(part, Figure),
    )
    with whole_file(path) as partial:
        partial.write_text(page, "utf-8")


def _with_names(text: str) -> Markup:
    """What stands in backticks as code; all else is text."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
