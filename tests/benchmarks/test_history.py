"""The benchmark of copying from earlier answers."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.scripts import load_script
from tests.deploy.byte_target import write_byte_target

history = load_script("history")


def test_answers_with_and_without_a_history_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_byte_target(tmp_path / "target")
    questions = [
        {"question_id": number, "category": "qa", "turns": [text]}
        for number, text in enumerate(("a cat?", "a dog?", "a bee?", "an owl?"))
    ]
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text("\n".join(map(json.dumps, questions)))
    record = tmp_path / "record.md"
    words = f"history.py {tmp_path / 'target'} --dtype float32 --turns 1 --prompts {prompts}"
    monkeypatch.setattr("sys.argv", [*words.split(), "--record", str(record)])
    history.main()
    rows = [line.split("|") for line in record.read_text("utf-8").splitlines()]
    rows = {row[1].strip(): [cell.strip() for cell in row[2:-1]] for row in rows if len(row) > 2}
    assert rows["without"][1] == "1.00"
    assert rows["without"][3] == "0.0%"
    assert float(rows["of the same ones, too"][3].removesuffix("%")) > 50
    assert float(rows["of the same ones, too"][2]) > 2 * float(rows["without"][2])
