"""Rows that several tensors hold in the same memory, against tensors that hold their own."""

import mmap
import os
import random
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.deploy.runtime.rounds import lazy_rows
from polybasic.deploy.runtime.rounds.lazy_rows import LazyRows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shares memory under Linux alone")
CPU = torch.device("cpu")
PARTS, ROWS, VALUES = 3, 400, 17
"""No part begins or ends with a page."""
LEAST = 2 * mmap.PAGESIZE
MEGABYTE = 1 << 20


@pytest.fixture(autouse=True)
def _few_rows_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_rows, "MIN_SHARED_BYTES", LEAST)


def rows_of(num: int = ROWS, values: int = VALUES) -> LazyRows:
    return LazyRows((PARTS, num, values), dtype=torch.float32, device=CPU)


class Pair:
    """Rows, and what they must hold, of which the first `length` are kept."""

    def __init__(self) -> None:
        self.rows, self.expected, self.length = rows_of(), torch.zeros(PARTS, ROWS, VALUES), 0

    def write(self, first: int, end: int) -> None:
        """As passes do: behind what is kept, of which the last may be given up."""
        self.rows.truncate(first)
        written = torch.randn(PARTS, end - first, VALUES)
        self.rows.tensor[:, first:end] = self.expected[:, first:end] = written
        self.length = end

    def take_over(self, other: "Pair", num: int) -> None:
        self.rows.take_over(other.rows, num)
        self.expected[:, :num] = other.expected[:, :num]
        self.length = num

    def give_back(self, num: int) -> None:
        self.rows.give_back(num)
        self.length = min(self.length, num)

    def check(self) -> None:
        assert torch.equal(self.rows.tensor[:, : self.length], self.expected[:, : self.length])
        assert self.rows.num_shared <= self.length


def run(seed: int, num_steps: int = 300) -> int:
    """Tensors that grow, shrink, branch off each other and are emptied, in any order; how many of
    them shared rows after each step, summed."""
    numbers, pairs, num_sharing = random.Random(seed), [Pair() for _ in range(4)], 0
    for _ in range(num_steps):
        pair, other = numbers.sample(pairs, 2)
        kind = numbers.random()
        if kind < 0.5:
            first = numbers.randint(max(0, pair.length - 60), pair.length)
            pair.write(first, numbers.randint(first, ROWS))
        elif kind < 0.9:
            pair.take_over(other, numbers.randint(0, other.length))
        else:
            pair.give_back(numbers.randint(0, pair.length))
        for each in pairs:
            each.check()
        num_sharing += sum(each.rows.num_shared > 0 for each in pairs)
    return num_sharing


@pytest.mark.parametrize("seed", range(8))
def test_each_holds_its_own_whatever_others_do(seed: int) -> None:
    torch.manual_seed(seed)
    assert run(seed) > 30


def test_a_tensor_that_kept_no_account_of_its_rows_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LazyRows, "truncate", lambda *_: None)
    with pytest.raises(AssertionError):
        run(0)


def resident() -> int:
    """Bytes of this process, those of pages that it has mapped twice once."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def test_what_is_shared_takes_memory_once_and_returns_it_with_the_last() -> None:
    def made() -> LazyRows:
        return rows_of(8 * MEGABYTE // 256, 64)  # parts of 8 MB

    first, others = made(), [made() for _ in range(4)]
    before = resident()
    first.tensor[:, : 4 * MEGABYTE // 256] = 1  # of which 4 MB are written
    for place, other in enumerate(others):
        other.take_over(([first, *others])[place], 4 * MEGABYTE // 256)
        assert other.tensor[:, : 4 * MEGABYTE // 256].amin() == 1
    assert 11 * MEGABYTE < resident() - before < 14 * MEGABYTE
    assert len({rows for each in (first, *others) for rows in each.shared}) == 1
    for each in (first, *others[1:]):
        each.give_back(0)
    assert 11 * MEGABYTE < resident() - before < 14 * MEGABYTE
    assert others[0].tensor[:, : 4 * MEGABYTE // 256].amin() == 1
    file, rows = others[0].shared[0].file, weakref.ref(others[0].shared[0])
    assert os.fstat(file).st_blocks * 512 > 11 * MEGABYTE
    others[0].give_back(0)
    assert resident() - before < 4 * MEGABYTE
    assert rows() is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def refused(*_: Any) -> int:
    raise OSError(24, os.strerror(24))


def refusing_after(num: int, real: Callable[..., int]) -> Callable[..., int]:
    """A system that grants so many mappings of files."""
    left = [num]

    def mapped(*arguments: Any) -> int:
        if arguments[4] >= 0:
            left[0] -= 1
            if left[0] < 0:
                return int(lazy_rows._MAP_FAILED or 0)
        return real(*arguments)

    return mapped


@pytest.mark.parametrize("num_granted", [None, 0, 1, 4])
def test_where_the_system_refuses_rows_are_copied(
    num_granted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if num_granted is None:
        monkeypatch.setattr(os, "memfd_create", refused)
    else:
        mapping = refusing_after(num_granted, lazy_rows._mmap())
        monkeypatch.setattr(lazy_rows, "_mmap", lambda: mapping)
    pairs = [Pair() for _ in range(3)]
    pairs[0].write(0, ROWS)
    pairs[1].take_over(pairs[0], ROWS - 9)
    assert not pairs[1].rows.shared
    for pair in pairs[:2]:
        pair.write(pair.length - 20, pair.length - 5)
        pair.check()
    pairs[0].give_back(30)
    pairs[1].check()


def test_mappings_are_left_to_the_rest_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[Pair] = [Pair() for _ in range(4)]
    pairs[0].write(0, ROWS)
    taken = sum(rows._num_mappings for rows in lazy_rows._all)
    monkeypatch.setattr(lazy_rows, "MAX_MAPPINGS", taken + 2 * PARTS)
    for pair in pairs[1:]:
        pair.take_over(pairs[0], ROWS)
        pair.check()
    assert [len(pair.rows.shared) for pair in pairs] == [1, 1, 0, 0]
    pairs[1].give_back(0)
    pairs[3].take_over(pairs[0], ROWS)
    assert len(pairs[3].rows.shared) == 1
    assert pairs[0].rows.num_shareable(ROWS) == 0


def test_few_rows_are_copied() -> None:
    first, second, third = rows_of(), rows_of(), rows_of()
    few = LEAST // (VALUES * 4)
    second.take_over(first, few)
    assert not second.shared
    assert first.num_shareable(few) == 0
    assert first.num_shareable(few + 1) == few + 1
    second.take_over(first, 2 * few)
    assert second.num_shared == 2 * few
    # of what is shared already, and a few rows more
    assert first.num_shareable(3 * few - 1) == 2 * few
    third.take_over(first, 3 * few - 1)
    assert third.num_shared == 2 * few
    assert third.shared == second.shared
