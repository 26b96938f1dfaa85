"""Chains whose files were flipped, cut, or say something else than they should."""

import copy
import itertools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.base.console import Console
from polybasic.chain.formats.describe import describe_chain, print_chain
from polybasic.chain.formats.verify import check_chain
from polybasic.deploy import load_chain
from tests.attacks import outcomes
from tests.attacks.test_files import accept

OTHERS: list[Any] = [
    None,
    True,
    -1,
    0,
    1e300,
    10**30,
    "",
    "x\0",
    "../../etc",
    [],
    {},
    [[]],
    {"a": 1},
]
"""What is written in place of a value, beside nothing at all."""
WEIGHTS = ("target/model.safetensors", "draft/model.safetensors")
JSON_FILES = (
    "chain.json",
    "target/config.json",
    "target/generation_config.json",
    "intermediate/config.json",
    "draft/config.json",
    "tokenizer/tokenizer_config.json",
)


def changed(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each place of a document, and the document with that place gone or of another type."""
    inner = content
    for key in path:
        inner = inner[key]
    keys = list(inner) if isinstance(inner, dict) else range(len(inner))[:2]
    for key in keys:
        here = (*path, key)
        for value in OTHERS:
            other = copy.deepcopy(content)
            place = other
            for step in path:
                place = place[step]
            place[key] = value
            yield here, other
        other = copy.deepcopy(content)
        place = other
        for step in path:
            place = place[step]
        del place[key]
        yield here, other
        if isinstance(inner[key], dict | list):
            yield from changed(content, here)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.proof), 9])
@pytest.mark.parametrize("name", JSON_FILES)
def test_whatever_a_file_says_is_read_or_refused(tiny_chain: Path, name: str, step: int) -> None:
    """Of those changes that are not refused, a tenth is loaded and answers."""
    path, refused, num_read, failed = tiny_chain / name, 0, 0, []
    content = json.loads(path.read_text())
    content.pop("sha256", None)
    for place, other in itertools.islice(changed(content), 0, None, step):
        path.write_text(json.dumps(other))
        if name != "chain.json":
            accept(tiny_chain)
        try:
            line = outcomes.of_call(lambda: look_at(tiny_chain))
            if line is None and (num_read := num_read + 1) % 10 == 1:
                line = outcomes.of_call(lambda: answer(tiny_chain))
        except Exception as error:
            failed.append(f"{place}: {type(error).__name__} {error}")
        refused += line is not None
    assert not failed
    assert refused or step > 1


def look_at(chain: Path) -> None:
    check_chain(chain, digests=False)
    print_chain(describe_chain(chain), Console())


def answer(chain: Path) -> None:
    load_chain(chain, digests=False, dtype="float32").generate("w1 w2", max_new_tokens=3)


@pytest.mark.parametrize(
    "name", [*JSON_FILES, "target/model.safetensors", "draft/model.safetensors"]
)
def test_flipped_and_cut_files_are_found(tiny_chain: Path, name: str) -> None:
    path, draw = tiny_chain / name, random.Random(0)
    whole = path.read_bytes()
    found = 0
    for number in range(24):
        damaged = bytearray(whole)
        if number % 3:
            damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        else:
            del damaged[draw.randrange(len(whole)) :]
        path.write_bytes(damaged)
        found += outcomes.of_command("verify", tiny_chain) is not None
    # generation_config.json of a target inside of the chain is a file of that member
    assert found == 24 or name == "chain.json"


def test_members_of_two_chains_do_not_mix(tiny_chain: Path, tiny_four_chain: Path) -> None:
    for folder in ("draft", "intermediate", "tokenizer"):
        mixed = tiny_chain.with_name(f"mixed_{folder}")
        shutil.copytree(tiny_chain, mixed)
        shutil.rmtree(mixed / folder)
        shutil.copytree(tiny_four_chain / folder, mixed / folder)
        line = outcomes.of_command("verify", mixed)
        if folder != "tokenizer":  # the two chains have the same one
            assert line is not None
            accept(mixed)
            assert outcomes.of_command("generate", mixed, "-p", "w1") is not None


def test_a_bug_in_a_reader_is_seen(tiny_chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "polybasic.chain.formats.manifest.check_plan", lambda plan, members: members.missing
    )
    with pytest.raises(AttributeError):
        outcomes.of_call(lambda: look_at(tiny_chain))
