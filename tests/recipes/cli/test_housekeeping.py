"""What lies on an operator's disk is listed, removed when it is asked for, and made beforehand."""

import json
import os
from pathlib import Path

import pytest

from polybasic.recipes.cli.shared import asking
from polybasic.recipes.pipeline.run import as_yaml
from polybasic.recipes.pipeline.running import locked
from polybasic.recipes.schema.loading import load_recipe
from tests.recipes.command_line import call, refusal


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    """A cache folder with something of ours and something of others."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("POLYBASIC_CACHE", str(folder))
    for name in ("kernels/native-1.so", "products/a.json", "zig/o/1/x.o", "kernels/my.txt", "own"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
        os.utime(path, (86_400 * 365,) * 2)
    return folder


def test_the_cache_is_listed_and_cleared_of_what_is_ours(cache: Path, monkeypatch) -> None:
    code, out, err = call("cache", "ls")
    assert code == 0
    assert [line.split()[-5:] for line in out.splitlines()[4:] if line.strip()] == [
        ["1", "1.0", "kB", "1971-01-01", "kernels/"],
        ["1", "1.0", "kB", "1971-01-01", "products/"],
        ["1", "1.0", "kB", "1971-01-01", "zig/"],
    ]
    assert "hf cache ls" in err
    found = json.loads(call("cache", "ls", "--json")[1])
    assert [entry["num_bytes"] for entry in found] == [1000, 1000, 1000]

    line = refusal("cache", "clear")
    assert line.startswith("error: no terminal to ask on: Remove 3 files (3.0 kB) of kernels/, pro")
    assert len(list(cache.rglob("*.*"))) == 4
    assert call("cache", "clear", "--yes")[0] == 0
    assert [path.name for path in sorted(cache.rglob("*")) if path.is_file()] == ["my.txt", "own"]
    assert "nothing to remove" in call("cache", "clear")[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with two whole stages."""
    folder = tmp_path / "runs" / "mine"
    for stage in ("data", "target", ".draft.partial"):
        (folder / stage).mkdir(parents=True)
        (folder / stage / "stage.json").write_text("{}")
    (folder / "target" / "weights").write_bytes(bytes(2000))
    (folder / "chain").mkdir()
    (folder / "chain" / "weights").hardlink_to(folder / "target" / "weights")
    (folder / "recipe.yaml").write_text(as_yaml(load_recipe("base")), "utf-8")
    (folder / ".lock").touch()
    return folder


def test_runs_are_listed(run: Path) -> None:
    (run.parent / "notes").mkdir()
    [found] = json.loads(call("runs", "ls", run.parent, "--json")[1])
    assert (found["recipe"], found["whole"]) == ("base", ["data", "target"])
    assert found["left"][0] == "draft"
    assert 2000 < found["num_bytes"] < 4000 + (run / "recipe.yaml").stat().st_size
    out = call("runs", "ls", run.parent)[1]
    assert "whole: data, target" in out
    assert "notes" not in out


def test_only_runs_are_removed(run: Path, monkeypatch) -> None:
    monkeypatch.chdir(run.parent.parent)
    other = run.parent / "notes"
    other.mkdir()
    assert refusal("runs", "rm", "notes", "--yes") == (
        "error: not a run: runs/notes (no recipe.yaml of a run in it); `polybasic runs ls` lists "
        "runs"
    )
    (run.parent / "link").symlink_to(run)
    assert "not a run: runs/link" in refusal("runs", "rm", "link", "--yes")
    assert "no terminal to ask on: Remove 1 run (" in refusal("runs", "rm", "mine")
    with locked(run):
        assert "error: " in refusal("runs", "rm", "mine", "--yes")
    assert (run / "target" / "weights").is_file()
    assert call("runs", "rm", run, "--yes") == (0, "", f"removed {run}\n")
    assert not run.exists()
    assert other.is_dir()


def test_an_answer_of_no_removes_nothing(run: Path, monkeypatch) -> None:
    monkeypatch.setattr(asking.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(asking.typer, "confirm", lambda *_, **__: False)
    assert call("runs", "rm", run)[0] == 1
    assert run.is_dir()


def test_warmup_answers_with_all_members_and_with_the_target_alone(tiny_chain: Path) -> None:
    code, out, err = call("warmup", tiny_chain, "--context-tokens", 128)
    assert code == 0
    assert [line.partition("  ")[2].strip() for line in map(str.strip, out.splitlines())] == [
        "load",
        "first answer of target → intermediate → draft",
        "second answer of target → intermediate → draft",
        "first answer of target",
        "second answer of target",
    ]
    assert "warm after" in err
    content = json.loads(call("warmup", tiny_chain, "--context-tokens", 128, "--json")[1])
    assert content["seconds"] >= sum(step["seconds"] for step in content["steps"])
