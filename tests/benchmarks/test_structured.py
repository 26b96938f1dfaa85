"""The benchmark of answers under a JSON schema."""

from pathlib import Path

import pytest

from tests.benchmarks.scripts import load_script
from tests.deploy.byte_target import write_byte_target

structured = load_script("structured")


def test_answers_under_a_schema_are_timed_beside_free_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_byte_target(tmp_path / "target")
    record = tmp_path / "record.md"
    words = f"structured.py {tmp_path / 'target'} --dtype float32 --turns 1 --max-new-tokens 8"
    monkeypatch.setattr("sys.argv", [*words.split(), "--record", str(record)])
    structured.main()
    rows = [line.split("|") for line in record.read_text("utf-8").splitlines()]
    rows = {row[1].strip(): [cell.strip() for cell in row[2:-1]] for row in rows if len(row) > 2}
    assert rows["free"][3:] == ["", ""]
    for answers in ("JSON schema", "without its drafts"):
        assert float(rows[answers][3]) > 0
        assert 0 < float(rows[answers][4].removesuffix("%")) < 100
    assert "16" not in rows, "the answers have eight tokens"
    for num_rows in ("1", "4"):
        *seconds, share = rows[num_rows]
        assert min(map(float, seconds)) >= 0
        assert 0 < float(share.removesuffix("%")) < 100
