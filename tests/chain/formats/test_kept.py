"""What the cache keeps of files."""

import os
from pathlib import Path

import pytest

from polybasic.chain.base.caching import CACHE_VARIABLE
from polybasic.chain.formats import kept
from polybasic.chain.formats.files import sha256_of_file


@pytest.fixture
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that were hashed, in a cache of its own for files of any size."""
    found: list[Path] = []

    def hashing(path: Path) -> str:
        found.append(path)
        return sha256_of_file(path)

    monkeypatch.setattr(kept, "sha256_of_file", hashing)
    monkeypatch.setattr(kept, "_LARGE", 1)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return found


def test_the_digest_of_a_file_is_kept_until_it_changes(
    hashed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_SETTLED", -60.0)
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    assert [kept.known_sha256(file) for _ in range(3)] == [sha256_of_file(file)] * 3
    assert hashed == [file]
    file.write_bytes(b"two")
    os.utime(file, ns=times)
    assert kept.known_sha256(file) == sha256_of_file(file)
    other = tmp_path / "other"
    other.write_bytes(b"six")
    os.utime(other, ns=times)
    other.replace(file)
    assert kept.known_sha256(file) == sha256_of_file(file)
    assert len(hashed) == 3


def test_the_digest_of_a_file_that_has_just_changed_is_not_kept(
    hashed: list[Path], tmp_path: Path
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    assert kept.known_sha256(file) == kept.known_sha256(file)
    assert len(hashed) == 2


def test_a_small_file_is_hashed_each_time(
    hashed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_SETTLED", -60.0)
    monkeypatch.setattr(kept, "_LARGE", 4)
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    kept.known_sha256(file)
    kept.known_sha256(file)
    assert len(hashed) == 2
    assert not (tmp_path / "cache").exists()
