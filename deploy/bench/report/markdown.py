"""A report as Markdown."""

from pathlib import Path

from polybasic.chain.base.tables import Table
from polybasic.chain.formats.files import whole_file
from polybasic.deploy.bench.report.lines import status_lines
from polybasic.deploy.bench.report.parts import Figure, Section
from polybasic.deploy.bench.report.sections import sections_of
from polybasic.deploy.bench.schema import Report


def write_markdown(path: Path, report: Report) -> None:
    """Write the report, whole.

    Raises:
        UserError: the disk is full or not writable.
    """
    blocks = [f"# Speed of {_text(report.chain)}"]
    blocks += [f"> {_text(line)}" for line in status_lines(report)]
    for section in sections_of(report):
        blocks += section_as_markdown(section)
    with whole_file(path) as partial:
        partial.write_text("\n\n".join(blocks) + "\n", "utf-8")


def section_as_markdown(section: Section) -> list[str]:
    """Title, paragraphs and tables; plots are the page's."""
    blocks = [f"## {section.title}"]
    for part in section.parts:
        if isinstance(part, Figure):
            continue
        if isinstance(part, Table):
            if part.title != section.title:
                blocks.append(f"### {part.title}")
            blocks += ["\n".join(table_as_markdown(part)), *map(_text, part.notes)]
        else:
            blocks.append(_text(part))
    return blocks


def table_as_markdown(table: Table) -> list[str]:
    """Its lines."""
    columns = range(len(table.header))
    rule = ["---" if table.is_text(column) else "---:" for column in columns]
    rows = [[_cell(cell) for cell in row] for row in (table.header, *table.rows)]
    return [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]


def _cell(cell: str) -> str:
    return _text(cell).replace("|", "\\|").replace("\n", "<br>")


def _text(text: str) -> str:
    """Text that is no HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;")
