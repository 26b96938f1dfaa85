"""A report's summary in a terminal."""

from dataclasses import replace

from rich.console import Console

from polybasic.chain.base.tables import Table, print_table
from polybasic.deploy.bench.report.lines import status_lines
from polybasic.deploy.bench.report.parts import Figure
from polybasic.deploy.bench.report.sections import sections_of
from polybasic.deploy.bench.schema import Report


def print_report(report: Report, console: Console) -> None:
    """Print what matters most in tables that fit the console, and what holds for several once; the
    headline last, where it stays in view."""
    console.print(f"Speed of {report.chain}", style="bold")
    for line in status_lines(report):
        console.print(line, style="yellow")
    headline, *others = (section for section in sections_of(report) if section.is_summary)
    told: set[str] = set()
    for section in (*others, headline):
        console.print(f"\n{section.title}", style="bold")
        for place, part in enumerate(section.parts):
            if isinstance(part, Table):
                if not part.is_detail:
                    if place:
                        console.print()
                    notes = tuple(note for note in part.notes if note not in told)
                    print_table(replace(part, notes=notes), console)
                    told.update(notes)
            elif not isinstance(part, Figure):
                console.print(part, highlight=False)
