"""A report in a terminal and as Markdown."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from polybasic.chain.base.tables import Table, print_table
from polybasic.deploy.bench.report.markdown import table_as_markdown, write_markdown
from polybasic.deploy.bench.report.parts import shown_rate
from polybasic.deploy.bench.report.terminal import print_report
from polybasic.deploy.bench.schema import Report, read_report
from tests.deploy.bench.report.example import HOSTILE, REMEDY, example, with_system

TABLE = Table(
    "Numbers",
    ["system", "first", "second"],
    [["a_long_name", "1", "2"], ["b", "3", "4"]],
    ("A note.",),
    may_turn=True,
)


def printed(report: Report | Table, width: int) -> list[str]:
    console = Console(file=StringIO(), width=width)
    if isinstance(report, Table):
        print_table(report, console)
    else:
        print_report(report, console)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_every_word_whole(width: int) -> None:
    report = example(complete=False)
    lines = printed(report, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for name, system in report.systems.items():
        assert name in text
        assert shown_rate(system.totals.tokens_per_second) in text
        assert set(system.description.split()) <= set(text.replace(".", " ").split()) | set(
            text.split()
        )
    assert lines[0] == "Speed of tiny"
    assert lines[1].startswith("Partial: the run was interrupted after 27 of 48 turns.")
    assert lines.index("All systems") < lines.index("Exactness") < lines.index("Headline")
    assert REMEDY in " ".join(lines)


def test_a_table_that_is_too_wide_is_turned_or_parted() -> None:
    assert printed(TABLE, 80)[2].split() == ["system", "first", "second"]
    wide = Table("Numbers", ["system", *"abcdefgh"], [["x", *"12345678"]], may_turn=True)
    assert ["h", "8"] in [line.split() for line in printed(wide, 20)], "turned"
    cells = [["x", *"12345678"], ["all", "9", *7 * [""]]]
    parted = Table("Numbers", ["system", *"abcdefgh"], cells)
    rows = [line.split() for line in printed(parted, 28)]
    assert ["system", "a", "b", "c", "d"] in rows
    assert ["system", "e", "f", "g", "h"] in rows
    assert ["x", "5", "6", "7", "8"] in rows
    assert [row for row in rows if row[:1] == ["all"]] == [["all", "9"]], "none without content"


def test_names_stay_beside_the_parts_of_a_table() -> None:
    header, cells = ["system", "member", *"abcdef"], ["x", "target", *"123456"]
    rows = [line.split() for line in printed(Table("T", header, [cells], num_text_columns=2), 34)]
    assert ["x", "target", "1", "2", "3"] in rows
    assert ["x", "target", "4", "5", "6"] in rows


def test_markdown_aligns_numbers_and_keeps_cells_whole() -> None:
    table = Table("T", ["system", "what"], [["a|b", "1.2x\nnot conclusive"], ["<i>", "&"]])
    assert table_as_markdown(table) == [
        "| system | what |",
        "| --- | ---: |",
        "| a\\|b | 1.2x<br>not conclusive |",
        "| &lt;i> | &amp; |",
    ]


def test_markdown_holds_every_section(tmp_path: Path) -> None:
    report = with_system(example(complete=False, grown="cpu-100m"), "eagle2", description=HOSTILE)
    write_markdown(tmp_path / "report.md", report)
    text = (tmp_path / "report.md").read_text()
    lines = text.splitlines()
    assert lines[:3] == [
        "# Speed of tiny",
        "",
        "> Partial: the run was interrupted after 27 of 48 turns. All figures are of these alone; "
        "the same command continues it.",
    ]
    assert "> Grown to the shapes of cpu-100m" in text
    assert "## Acceptance" in lines
    assert "| draft | 8,000 tokens | 87.5% | 3.50 | 0.400 |" in lines
    assert "| draft | all 32,000 | 100% | - | - |" in lines
    assert "| draft | tokens a round, simulated | 2.5 | 3.25 | yes |" in lines
    assert f"| command | {report.command} |" in lines
    assert "<script>" not in text
    tables = text.split("\n\n")
    for table in (block for block in tables if block.startswith("|")):
        counts = {line.replace("\\|", "").count("|") for line in table.splitlines()}
        assert len(counts) == 1, table


def test_what_a_report_knows_of_its_targets_answers_is_read_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(example().to_json() | {"target": {"heldout_loss": 0.7}}))
    report = read_report(path)
    assert report.target == {"heldout_loss": 0.7}
    assert report.to_json() == example().to_json()
    assert "target" not in report.to_json()
