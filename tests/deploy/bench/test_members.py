"""Heads that draft a part of the vocabulary, in the benchmark: what they gain and cost."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from polybasic.chain.base.tables import print_table
from polybasic.chain.formats.package import Part
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.deploy import load_chain
from polybasic.deploy.bench import members
from polybasic.deploy.bench.members import draft_vocabularies
from polybasic.deploy.bench.report.chain_rows import draft_vocabulary_table
from polybasic.deploy.bench.running import bench_chain
from polybasic.deploy.bench.schema import read_report
from polybasic.deploy.planner.settings import BenchSettings
from polybasic.deploy.runtime.drafters.head import EagleDrafter
from tests.head_kinds import trim, write_eagle3

DRAFTED = torch.arange(0, 64, 4)
TRAINING = {
    "draft": {
        "simulated_accepted_length": 3.5,
        "untrimmed_accepted_length": 3.75,
        "draft_vocabulary_coverage": 0.875,
    }
}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["w5 w9 w7"]}))
    return path


def test_report_shows_what_trimming_gains(
    tiny_chain_parts: Any, prompts: Path, tmp_path: Path
) -> None:
    trim(tiny_chain_parts.draft, DRAFTED)
    tiny_chain_parts.package(tmp_path / "chain", training=TRAINING)
    settings = BenchSettings(
        prompts=str(prompts),
        max_new_tokens=8,
        repeats=1,
        dtype="float32",
        systems=("target", "polybasic"),
    )
    report = bench_chain(tmp_path / "chain", settings)
    agreement = report.systems["polybasic"].agreement
    assert agreement is not None
    assert agreement.identical == 1
    (entry,) = report.draft_vocabulary
    seconds = [entry[name].pop("seconds_per_pass") for name in ("part", "whole")]
    assert min(seconds) > 0
    assert entry == {
        "member": "draft",
        "num_tokens": 16,
        "vocab_size": 64,
        "coverage": 0.875,
        "part": {"accepted_length": 3.5},
        "whole": {"accepted_length": 3.75},
    }
    markdown = (tmp_path / "chain" / "report" / "report.md").read_text()
    part, whole = (f"{1e3 * duration:.3f}" for duration in seconds)
    assert "## Draft vocabulary" in markdown
    assert f"| draft | 16 tokens | 87.5% | 3.50 | {part} |" in markdown
    assert f"| draft | all 64 | 100% | 3.75 | {whole} |" in markdown
    written = read_report(tmp_path / "chain" / "report" / "report.json")
    table = draft_vocabulary_table(written.draft_vocabulary)
    assert table is not None
    console = Console(file=(shown := StringIO()), width=80)
    print_table(table, console)
    rows = [line.split() for line in shown.getvalue().splitlines()]
    assert ["draft", "16", "tokens", "87.5%", "3.50", part] in rows
    assert ["draft", "all", "64", "100%", "3.75", whole] in rows


def test_both_ways_of_drafting_take_turns(
    tiny_chain_parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted: list[tuple[bool, list[int]]] = []

    class Recorded(EagleDrafter):
        def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
            tree = super().draft(tokens, max_depth)
            drafted.append((self.model.weights.draft_token_ids is not None, tree.tokens[1:]))
            return tree

    trim(tiny_chain_parts.draft, DRAFTED)
    tiny_chain_parts.package(tmp_path / "chain")
    chain = load_chain(tmp_path / "chain", dtype="float32")
    monkeypatch.setattr(members, "EagleDrafter", Recorded)
    (entry,) = draft_vocabularies(chain, [[3, 5], [1, 2, 3, 4, 5, 6, 7], [9]])
    assert entry["coverage"] is None, "training recorded none"
    assert entry["whole"]["accepted_length"] is None
    assert [is_trimmed for is_trimmed, _ in drafted] == [True, False] * (len(drafted) // 2)
    trimmed = {token for is_trimmed, tokens in drafted if is_trimmed for token in tokens}
    whole = {token for is_trimmed, tokens in drafted if not is_trimmed for token in tokens}
    assert trimmed <= set(DRAFTED.tolist())
    assert not whole <= set(DRAFTED.tolist())
    assert len({tuple(tokens) for _, tokens in drafted}) == 2, "every turn drafts the same"
    alone = chain.generate("w3 w5", members=["target"], max_new_tokens=6)
    assert chain.generate("w3 w5", max_new_tokens=6).token_ids == alone.token_ids


def test_eagle3_head_has_no_way_over_all_tokens(
    tiny_chain_parts: Any, prompts: Path, tmp_path: Path
) -> None:
    write_eagle3(tiny_chain_parts.draft, tiny_chain_parts.target, DRAFTED)
    intermediate, draft = tiny_chain_parts.parts
    parts = [intermediate, Part("draft", "drafter", "eagle3", draft.folder)]
    tiny_chain_parts.package(tmp_path / "chain", parts=parts, training=TRAINING)
    settings = BenchSettings(
        prompts=str(prompts),
        max_new_tokens=8,
        repeats=1,
        dtype="float32",
        systems=("target", "eagle3", "polybasic_full"),
    )
    report = bench_chain(tmp_path / "chain", settings)
    assert list(report.systems) == ["target", "eagle3", "polybasic_full"]
    assert list(report.systems["eagle3"].members) == ["target", "draft"]
    plan = report.systems["polybasic_full"].plan
    assert plan is not None
    assert plan["members"][-1] == "draft"
    (entry,) = report.draft_vocabulary
    assert entry["part"]["seconds_per_pass"] > 0
    assert entry["whole"]["seconds_per_pass"] is None
    assert "| draft | all 64 | 100% | 3.75 | - |" in (
        (tmp_path / "chain" / "report" / "report.md").read_text()
    )


def test_whole_heads_have_no_entry(tiny_chain: Path) -> None:
    chain = load_chain(tiny_chain, dtype="float32")
    assert [head.weights.is_head for head in chain.engine.models.drafters.values()] == [True]
    assert draft_vocabularies(chain, [[1, 2, 3]]) == []
