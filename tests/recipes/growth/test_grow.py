"""Growth from the command line and in recipes: what is written, foretold, labelled and refused."""

import json
import re
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

from polybasic.chain.errors import UserError
from polybasic.chain.formats.manifest import Manifest, read_manifest
from polybasic.chain.formats.verify import check_chain
from polybasic.deploy import load_chain
from polybasic.deploy.bench.report.terminal import print_report
from polybasic.deploy.bench.running import bench_chain
from polybasic.deploy.bench.schema import read_report
from polybasic.deploy.bench.summary import results_of
from polybasic.deploy.settings import BenchSettings
from polybasic.recipes.cli import run as commands_run
from polybasic.recipes.cli.chain import inspect
from polybasic.recipes.cli.grow import grow
from polybasic.recipes.growth.shapes import SHAPES, GrownShape
from polybasic.recipes.pipeline.run import run_recipe
from polybasic.recipes.pipeline.stages import stages_of
from polybasic.recipes.schema.loading import load_recipe
from polybasic.recipes.schema.recipe import ShapeName

SHAPE = GrownShape(3, 256, 512, 4, 4, 64)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def small_shape(monkeypatch: pytest.MonkeyPatch) -> GrownShape:
    """A shape that grows in a moment, under the name of a real one."""
    monkeypatch.setitem(SHAPES, "cpu-100m", SHAPE)  # type: ignore[misc]
    return SHAPE


def num_bytes(manifest: Manifest) -> int:
    return sum(member.num_bytes for member in manifest.members)


# The command


def test_grow_writes_a_chain_next_to_the_small_one(
    tiny_chain: Path, small_shape: GrownShape, capsys: pytest.CaptureFixture[str]
) -> None:
    grow(str(tiny_chain), "cpu-100m")
    out, err = capsys.readouterr()
    folder = tiny_chain.with_name("chain-cpu-100m")
    assert out == f"{folder}\n"
    written = num_bytes(check_chain(folder).manifest)
    (message,) = re.findall(r"growing .* to cpu-100m: about ([\d.]+) GB into", err)
    assert float(message) == pytest.approx(written / 1e9, abs=0.06)
    last = err.strip().splitlines()[-1]
    assert last.endswith(f"next: polybasic plan {folder}, then polybasic bench {folder}")
    inspect(str(folder))
    assert "Grown to the shapes of cpu-100m" in " ".join(capsys.readouterr().out.split())


def test_grow_writes_where_it_is_told(
    tiny_chain: Path, small_shape: GrownShape, tmp_path: Path
) -> None:
    out = tmp_path / "elsewhere" / "grown"
    grow(str(tiny_chain), "cpu-100m", out=out)
    assert read_manifest(out).grown == "cpu-100m"
    assert not tiny_chain.with_name("chain-cpu-100m").exists()
    grow(str(tiny_chain), "cpu-100m", out=out)  # an older chain is replaced
    check_chain(out)


def test_mistakes_are_reported_before_anything_is_written(
    tiny_chain: Path, tiny_four_chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "grown"
    with pytest.raises(UserError, match="unknown shape: big; use one of cpu-100m, gpu-7b, gpu-8b"):
        grow(str(tiny_chain), "big", out=out)
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="not a chain"):
        grow(str(empty), "cpu-100m", out=out)
    with pytest.raises(UserError, match="member cannot be grown: small of"):
        grow(str(tiny_four_chain), "cpu-100m", out=out)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: Usage(0, 0, 15_000_000_000))
        with pytest.raises(UserError, match=r"not enough disk: .* about 181\d\d MB needed"):
            grow(str(tiny_chain), "gpu-7b", out=out)
    assert not out.exists()
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_are_counted_before_they_are_written(
    dtype: str, tiny_chain_parts: Any, small_shape: GrownShape, tmp_path: Path, capsys: Any
) -> None:
    """The disk is checked by this count."""
    from polybasic.recipes.cli.grow import _num_bytes
    from tests.conftest import write_draft, write_intermediate

    parts = tiny_chain_parts
    if dtype == "float32":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(parts.target, dtype="float32")
        model.save_pretrained(parts.target)
        for folder, write in ((parts.intermediate, write_intermediate), (parts.draft, write_draft)):
            shutil.rmtree(folder)
            write(folder, parts.target)
    parts.package(tmp_path / "chain")
    grow(str(tmp_path / "chain"), "cpu-100m", out=tmp_path / "grown")
    written = num_bytes(read_manifest(tmp_path / "grown"))
    assert _num_bytes(tmp_path / "chain", small_shape) == pytest.approx(written, rel=0.02)


# Labels


def test_reports_of_grown_chains_are_labelled(
    tiny_chain: Path, small_shape: GrownShape, tmp_path: Path
) -> None:
    grow(str(tiny_chain), "cpu-100m", out=tmp_path / "grown")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["w1 w2"]}))
    settings = BenchSettings(
        prompts=str(prompts), max_new_tokens=8, repeats=1, systems=("target", "eagle2")
    )
    note = "Grown to the shapes of cpu-100m"
    for chain, is_grown in ((tiny_chain, False), (tmp_path / "grown", True)):
        report = bench_chain(chain, settings)
        assert report.grown == ("cpu-100m" if is_grown else None)
        console = Console(record=True, width=200)
        print_report(report, console)
        printed, markdown = console.export_text(), (chain / "report" / "report.md").read_text()
        card = (chain / "README.md").read_text("utf-8")
        assert [note in text for text in (printed, markdown, card)] == 3 * [is_grown]


# Recipes


def test_the_schema_names_the_shapes() -> None:
    assert get_args(ShapeName) == tuple(SHAPES)


def test_a_shape_adds_a_stage_after_the_chain() -> None:
    plain = stages_of(load_recipe("base"))
    grown = stages_of(load_recipe("base", ["grow.shape=cpu-100m"]))
    names = [stage.name for stage in plain]
    assert [stage.name for stage in grown] == [*names[:-2], "grown", *names[-2:]]
    needs = {stage.name: stage.needs for stage in grown}
    assert needs["grown"] == ("chain",)
    assert needs["plan"] == ("data", "grown")
    assert needs["report"] == ("data", "grown", "plan")
    assert {stage.name: stage.needs for stage in plain}["plan"] == ("data", "chain")


def test_a_recipe_with_a_smaller_model_is_not_grown() -> None:
    with pytest.raises(UserError, match=r"smaller models are not grown: grow\.shape = gpu-7b"):
        load_recipe("llama31-8b-four", ["grow.shape=gpu-7b"])


def test_a_recipe_plans_and_measures_the_grown_chain(
    micro_run: Path,
    micro_recipe: Path,
    small_shape: GrownShape,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = Path(shutil.copytree(micro_run, tmp_path / "out"))
    packed = (out / "chain" / "chain.json").read_bytes()
    recipe = load_recipe(str(micro_recipe), ["grow.shape=cpu-100m"])
    run_recipe(recipe, out, "polybasic run micro.yaml grow.shape=cpu-100m")
    message = capsys.readouterr().err
    assert message.count("skipped") == 5
    assert "grown: starting (no earlier result)" in message
    assert (out / "chain" / "chain.json").read_bytes() == packed
    checked = check_chain(out / "grown")
    assert checked.manifest.grown == "cpu-100m"
    assert len(checked.manifest.plans) == 1
    report = read_report(out / "grown" / "report" / "report.json")
    assert report.grown == "cpu-100m"
    assert checked.manifest.results == results_of(report)
    answers = [
        load_chain(out / name, dtype="float32").generate("Why?", max_new_tokens=24, temperature=0.0)
        for name in ("chain", "grown")
    ]
    assert answers[0].token_ids == answers[1].token_ids
    capsys.readouterr()
    commands_run.package(str(micro_recipe), ["grow.shape=cpu-100m"], out)
    printed, message = capsys.readouterr()
    assert printed.splitlines() == [str(out / "chain"), str(out / "grown")]
    assert message.count("skipped") == 6
    assert message.endswith(f"next: polybasic bench {out / 'grown'}\n")
    commands_run.run(str(micro_recipe), ["grow.shape=cpu-100m"], out)
    printed, message = capsys.readouterr()
    assert f"report: {out / 'grown' / 'report' / 'report.html'}" in printed
    assert message.count("skipped") == 8
    assert f"chain: {out / 'grown'}; next: polybasic generate" in message
