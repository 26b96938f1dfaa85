"""A report's summary in a terminal."""

from rich.console import Console

from polybasic.chain.tables import Table, print_table
from polybasic.deploy.bench.report.lines import status_lines
from polybasic.deploy.bench.report.parts import Figure
from polybasic.deploy.bench.report.sections import sections_of
from polybasic.deploy.bench.schema import Report


def print_report(report: Report, console: Console) -> None:
    """Print what matters most in tables that fit the console; the headline last, where it stays in
    view."""
    console.print(f"Speed of {report.chain}", style="bold")
    for line in status_lines(report):
        console.print(line, style="yellow")
    headline, *others = (section for section in sections_of(report) if section.is_summary)
    for section in (*others, headline):
        console.print(f"\n{section.title}", style="bold")
        for part in section.parts:
            if isinstance(part, Table):
                if not part.is_detail:
                    print_table(part, console)
            elif not isinstance(part, Figure):
                console.print(part, highlight=False)
