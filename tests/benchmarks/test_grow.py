"""Growth from the command line: what is written, labelled and refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.verify import check_chain
from polybasic.deploy.bench.report.terminal import print_report
from polybasic.deploy.bench.running import bench_chain
from polybasic.deploy.planner.settings import BenchSettings
from polybasic.recipes.cli.chain import inspect
from tests.benchmarks.scripts import load_script

script, shapes = load_script("grow"), load_script("growth.shapes")


def grow(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    """Run the script, with a shape that grows in a moment."""
    monkeypatch.setitem(shapes.SHAPES, "small", shapes.GrownShape(3, 256, 512, 4, 4, 64))
    monkeypatch.setattr(sys, "argv", ["grow.py", *map(str, words)])
    script.main()


def test_a_grown_chain_is_written_and_labelled(
    tiny_chain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "else where" / "grown"
    grow(monkeypatch, tiny_chain, "small", "--out", out)
    printed, message = capsys.readouterr()
    assert printed == f"{out}\n"
    assert message.endswith(f"next: polybasic plan '{out}', then polybasic bench '{out}'\n")
    grow(monkeypatch, tiny_chain, "small", "--out", out)  # an older chain is replaced
    assert check_chain(out).manifest.grown == "small"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["w1 w2"]}))
    settings = BenchSettings(
        prompts=str(prompts), max_new_tokens=8, repeats=1, systems=("target", "eagle2")
    )
    note = "Grown to the shapes of small"
    for chain, is_grown in ((tiny_chain, False), (out, True)):
        report = bench_chain(chain, settings)
        assert report.grown == ("small" if is_grown else None)
        console = Console(record=True, width=200)
        print_report(report, console)
        capsys.readouterr()
        inspect(str(chain))
        texts = (
            console.export_text(),
            (chain / "report" / "report.md").read_text(),
            (chain / "README.md").read_text("utf-8"),
            " ".join(capsys.readouterr().out.split()),
        )
        assert [note in text for text in texts] == 4 * [is_grown]


def test_a_target_that_lies_elsewhere_is_named(
    tiny_chain_parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, out = tmp_path / "chain", tmp_path / "grown"
    tiny_chain_parts.package(chain, copy_target=False)
    moved = tiny_chain_parts.target.rename(tmp_path / "moved")
    with pytest.raises(UserError):
        grow(monkeypatch, chain, "small", "--out", out)
    grow(monkeypatch, chain, "small", "--out", out, "--target", moved)
    assert read_manifest(out).grown == "small"


def test_mistakes_are_reported_before_anything_is_written(
    tiny_chain: Path, tiny_four_chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "grown"
    (empty := tmp_path / "empty").mkdir()
    for chain, shape, message in (
        (tiny_chain, "big", "unknown shape: big; use one of gpu-7b, gpu-8b, small"),
        (empty, "small", "not a chain"),
        (tiny_four_chain, "small", "member cannot be grown: small of"),
    ):
        with pytest.raises(UserError, match=message):
            grow(monkeypatch, chain, shape, "--out", out)
    assert not out.exists()
    assert not list(tmp_path.glob(".*.partial"))


def test_wrong_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    words = [sys.executable, script.__file__, str(tmp_path), "gpu-7b", "--out", str(tmp_path / "o")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: not a chain")
