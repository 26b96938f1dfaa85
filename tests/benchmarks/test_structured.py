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
    free, held = record.read_text("utf-8").splitlines()[-2:]
    assert free.split("|")[5:7] == [cell for cell in free.split("|")[5:7] if not cell.strip()]
    assert float(held.split("|")[5]) > 0
    assert 0 < float(held.split("|")[6].strip().removesuffix("%")) < 100
