"""A lossy plan in a benchmark: beside the others, and never taken for one of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.manifest import read_manifest
from polybasic.chain.formats.plan import BigLittle, Flush, Plan
from polybasic.deploy.bench import running
from polybasic.deploy.bench.report.lines import differs, exactness_line, headline_lines
from polybasic.deploy.bench.running import bench_chain
from polybasic.deploy.bench.schema import Report, read_report
from polybasic.deploy.planner.settings import BenchSettings
from tests.deploy.noisy_chain import TREE, write_noisy_chain

PROMPTS = ("w5 w9", "w1 w2 w3", "w4 w8", "w9 w9")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_noisy_chain(tmp_path_factory.mktemp("lossy_bench"))


@pytest.fixture(autouse=True)
def _without_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take a second, and are of the same systems."""
    monkeypatch.setattr(running, "write_page", lambda path, report: None)


def lossy(rollback: float) -> Plan:
    return Plan(
        members=("target", "near"),
        tree=TREE,
        flush={"target": Flush(length=8)},
        lossy=BigLittle(fallback_threshold=0.01, rollback_threshold=rollback),
    )


def benched(folder: Path, rollback: float, **settings: Any) -> Report:
    path = folder.parent / "prompts.jsonl"
    rows = [
        {"question_id": number, "category": "qa", "turns": [text]}
        for number, text in enumerate(PROMPTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"systems": ("target", "polybasic"), "max_new_tokens": 20, "dtype": "float32"}
    asked = BenchSettings(prompts=str(path), **given | settings)  # type: ignore[arg-type]
    return bench_chain(folder, asked, lossy=lossy(rollback))


def test_it_is_told_apart_from_lossless_systems(folder: Path) -> None:
    report = benched(folder, 4.0)
    assert list(report.systems) == ["target", "polybasic", "lossy"]
    system = report.systems["lossy"]
    assert system.loss is not None
    assert (system.agreement, report.systems["polybasic"].loss) == (None, None)
    assert system.loss.answers == 8
    assert system.loss.identical < 8
    assert system.loss.quality.low <= system.loss.quality.value <= system.loss.quality.high <= 1
    assert system.loss.quality.value < 1
    assert system.loss.over_plan is not None
    # what is not the target's by design is no fault, and no headline
    assert "8 of 8 answers of this runtime's systems are identical" in exactness_line(report)
    assert not differs(report, None)
    assert not any("`lossy`" in line for line in headline_lines(report))
    shown = (folder / "report" / "report.md").read_text("utf-8")
    assert "Not lossless" in shown
    assert f"{system.loss.identical}/8, lossy" in shown
    assert "lossy: falls back under 0.01, takes back over 4" in shown
    assert read_report(folder / "report" / "report.json").systems["lossy"] == system
    assert list(read_manifest(folder).results["systems"]) == ["target", "polybasic"]


def test_one_that_keeps_only_the_targets_own_loses_nothing(folder: Path) -> None:
    loss = benched(folder, 0.0).systems["lossy"].loss
    assert loss is not None
    assert (loss.quality.value, loss.identical, loss.answers) == (1, 8, 8)


def test_it_is_not_measured_where_answers_are_drawn(folder: Path) -> None:
    with pytest.raises(UserError, match="a lossy plan does not draw: temperature=1"):
        benched(folder, 4.0, temperature=1.0)
