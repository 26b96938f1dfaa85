"""The benchmark of caches that fill by need."""

from pathlib import Path

import pytest

from tests.benchmarks.scripts import load_script
from tests.deploy.byte_target import write_byte_target

caches = load_script("caches")


def test_memory_and_second_turns_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_byte_target(tmp_path / "target")
    record = tmp_path / "record.md"
    words = (
        f"caches.py {tmp_path / 'target'} --dtype float32 --context-tokens 512 --sequences 3 "
        f"--tokens 96 --conversations 2 --beginning 256 --record {record}"
    )
    monkeypatch.setattr("sys.argv", words.split())
    caches.main()
    rows = [line.split("|") for line in record.read_text("utf-8").splitlines()]
    rows = {row[1].strip(): [cell.strip() for cell in row[2:-1]] for row in rows if len(row) > 2}
    assert float(rows["3 x 96"][0]) < float(rows["3 x 96"][1].replace(",", ""))
    assert float(rows["3 x 320"][0]) < float(rows["3 x 320"][1].replace(",", ""))
    assert int(rows["first"][-1]) <= 64  # that all begin with
    assert int(rows["second"][-1]) > 200
