"""The benchmark of a head that learns from answers."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.scripts import load_script
from tests.conftest import PLAN, ChainParts

learning = load_script("learning")


def test_a_head_that_learns_is_compared_with_itself(
    tiny_chain_parts: ChainParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PLAN.model_copy(update={"members": ("target", "draft"), "flush": {}})
    tiny_chain_parts.package(tmp_path / "chain", plan=plan)
    prompts, record = tmp_path / "questions.jsonl", tmp_path / "record.md"
    questions = [
        {"question_id": number, "category": "qa", "turns": [f"w{number} w2 w{number + 3}"]}
        for number in range(1, 6)
    ]
    prompts.write_text("\n".join(map(json.dumps, questions)))
    words = f"learning.py {tmp_path / 'chain'} --prompts {prompts} --num-prompts-per-task 5"
    words += f" --max-new-tokens 20 --record {record}"
    monkeypatch.setattr("sys.argv", words.split())
    learning.main()
    text = record.read_text("utf-8")
    assert "5 answers, 0 heads taken" in text
    rows = [line.split("|") for line in text.splitlines()]
    rows = {row[1].strip(): [cell.strip() for cell in row[2:-1]] for row in rows if len(row) > 2}
    assert list(rows)[-3:] == ["3 to 4", "5 to 5", "all"]
    assert rows["all"][2] == "1.000"
    assert [path.name for path in tmp_path.glob("*.learned")] == []
