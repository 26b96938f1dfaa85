"""`polybasic inspect` states the memory that a chain will take, or says why it cannot."""

import json
import shutil
from pathlib import Path

import pytest
import typer

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import read_json, write_json
from polybasic.deploy import load_chain
from polybasic.deploy.planner.settings import BenchSettings
from polybasic.recipes.cli import main
from polybasic.recipes.cli.chain import inspect, verify
from polybasic.recipes.cli.measure import _written
from polybasic.recipes.pipeline.prompts import PROMPTS_NAME, bench_prompts
from tests.conftest import PROVENANCE, ChainParts


@pytest.mark.processor
def test_what_is_stated_is_what_loading_states(
    tiny_chain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(str(tiny_chain), dtype="float32", context_tokens=50, as_json=True)
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory.pop("available_bytes") > memory["peak_bytes"]
    loaded = load_chain(tiny_chain, dtype="float32", context_tokens=50)
    assert memory == loaded.memory.to_json()
    inspect(str(tiny_chain), memory=True)
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shown.startswith("memory: ")
    assert "for 128 tokens of context (cpu, bfloat16, " in shown
    with pytest.raises(UserError, match="context out of range: context_tokens=500; use 1 to 128"):
        inspect(str(tiny_chain), context_tokens=500)


def test_a_chain_is_read_whatever_its_recipe_says(
    tiny_chain_parts: ChainParts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe's keys are those of the version that packed the chain."""
    recipe = {
        "name": "older",
        "target": {"model": "scratch", "scratch": {"num_layers": 24}},
        "data": {"conversations": "embedded"},
        "bench": {"prompts": "auto"},
    }
    tiny_chain_parts.package(
        tmp_path / "chain",
        provenance=PROVENANCE.model_copy(update={"recipe": recipe}),
        training={"target": {"heldout_loss": 0.7}, "draft": {"steps": 10}},
    )
    verify(str(tmp_path / "chain"))
    inspect(str(tmp_path / "chain"), as_json=True)
    assert '"heldout_loss": 0.7' in capsys.readouterr().out
    source, path = _written(bench_prompts, BenchSettings(), tmp_path / "chain", PROMPTS_NAME)
    assert (source.shown, path.name) == ("shipped", PROMPTS_NAME)
    assert "shipped prompts stand in for them" in capsys.readouterr().err


def test_a_chain_that_is_not_whole_is_still_described(
    tiny_chain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tiny_chain / "draft" / "model.safetensors").unlink()
    inspect(str(tiny_chain), memory=True)
    told = capsys.readouterr()
    assert "made by: " in told.out
    assert told.err.startswith("memory: not stated, missing file: ")


def test_a_target_may_lie_elsewhere_for_every_command_that_reads_a_chain(
    tiny_chain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = dict(typer.main.get_command(main.app).commands)  # type: ignore[attr-defined]
    for name in ("migrate", "forget"):  # change what was written, and read no target
        commands.pop(name)
    for name, command in commands.items():
        options = {parameter.name for parameter in command.params}
        assert ("target" in options) == ("chain" in options), name
    moved = Path(shutil.move(tiny_chain / "target", tiny_chain.parent / "moved"))
    inspect(str(tiny_chain), target=str(moved))
    assert "made by: " in capsys.readouterr().out
    verify(str(tiny_chain), target=str(moved))
    load_chain(tiny_chain, target=str(moved)).close()


def test_nothing_is_fetched_to_state_it(
    tiny_chain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = read_json(tiny_chain / "chain.json", "manifest")
    del manifest["sha256"]
    source = {"path": None, "source": "org/model", "revision": None}
    manifest["members"][0]["reference"] = source
    write_json(tiny_chain / "chain.json", manifest)
    inspect(str(tiny_chain), memory=True, as_json=True)
    told = capsys.readouterr()
    assert json.loads(told.out)["memory"] is None
    assert told.err == "memory: not stated, target (org/model) is not on this machine yet\n"
