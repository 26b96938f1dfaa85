"""The pictures of docs/performance.md, drawn from the reports that its records are of.

    python docs/draw_performance.py REPORT [REPORT ...] [--out docs]

`speedup.svg` is the first report's speedup by system and task, `insertion.svg` holds the insertions
of all reports, each under its chain's name. The third picture, `timeline.svg`, is that of
`polybasic trace CHAIN -p TEXT --timeline --svg docs/timeline.svg`.
"""

import argparse
from pathlib import Path

from polybasic.deploy.bench.report import page
from polybasic.deploy.bench.report.parts import Figure
from polybasic.deploy.bench.report.plots import draw
from polybasic.deploy.bench.report.sections import sections_of
from polybasic.deploy.bench.schema import Report, read_report


def main(paths: list[Path], folder: Path) -> None:
    """Write both pictures."""
    reports = [read_report(path) for path in paths]
    insertions = [
        inserted.model_copy(update={"member": report.chain})
        for report in reports
        for inserted in report.insertions
    ]
    first = reports[0].model_copy(update={"insertions": insertions})
    for name, figure in (("speedup", "task_speedups"), ("insertion", "insertions")):
        (folder / f"{name}.svg").write_text(standing_alone(figure, first), "utf-8")


def standing_alone(name: str, report: Report) -> str:
    """A figure of a report as a file: it brings the colours that the report's page gives it."""
    figure = next(
        part
        for section in sections_of(report)
        for part in section.parts
        if isinstance(part, Figure) and part.name == name
    )
    sheet = (Path(page.__file__).parent / "page.css").read_text("utf-8")
    colours = sheet[sheet.index(":root") : sheet.index("\n* {")]
    style = (
        f"<style>{colours}\nsvg {{ background: var(--paper); "
        "font-family: system-ui, sans-serif; }\ntext { font-family: inherit; }</style>"
    )
    head, _, rest = str(draw(figure, report)).partition("</desc>")
    head = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return f"{head}</desc>{style}{rest}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    main(arguments.reports, arguments.out)
