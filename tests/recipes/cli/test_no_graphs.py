"""`--no-graphs` reaches the engine of every command that loads models to run them."""

from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.kernels.cuda.graphs import Graphs
from polybasic.deploy.bench import running as benchmark
from polybasic.deploy.planner import run as planning
from polybasic.deploy.runtime import engine
from polybasic.recipes.cli import main as cli
from tests.recipes.command_line import call, refusal, with_plan


@pytest.mark.parametrize(("words", "enabled"), [([], True), (["--no-graphs"], False)])
def test_generate(monkeypatch, tiny_chain: Path, words: list[str], enabled: bool) -> None:
    made = []

    def make(device: Any, enabled: bool) -> Graphs:
        made.append(enabled)
        return Graphs(device, enabled)

    monkeypatch.setattr(engine, "Graphs", make)
    asked = ["generate", str(tiny_chain), "-p", "w5", "--max-new-tokens", "2", *words]
    assert call(*asked)[0] == 0
    assert made == [enabled]


@pytest.mark.parametrize(("words", "enabled"), [([], True), (["--no-graphs"], False)])
def test_plan_and_bench(monkeypatch, tiny_chain: Path, words: list[str], enabled: bool) -> None:
    """The bench hands it on to the plan that it measures first."""
    asked = []

    def load(folder: Path, *, graphs: bool, say: Any, **settings: Any) -> None:
        asked.append(graphs)
        say("said")
        raise UserError("nothing is loaded", "here", "stop")

    monkeypatch.setattr(planning, "load_chain", load)
    monkeypatch.setattr(benchmark, "load_chain", load)
    for command in ("plan", "bench", "bench"):
        assert "nothing is loaded" in refusal(command, str(tiny_chain), *words)
        if len(asked) == 2:
            with_plan(tiny_chain)
    assert asked == [enabled] * 3


def test_run_switches_off_graphs_wherever_the_recipe_runs_models(monkeypatch, tmp_path) -> None:
    found = []

    def run(recipe: Any, out: Path, command: str, *rest: Any) -> None:
        regenerated = recipe.data.regenerate
        found.append(
            (
                recipe.plan.graphs,
                recipe.bench.graphs,
                regenerated and regenerated.graphs,
                command.removeprefix("polybasic run base"),
            )
        )
        raise KeyboardInterrupt

    monkeypatch.setattr("polybasic.recipes.pipeline.run.run_recipe", run)
    monkeypatch.chdir(tmp_path)
    regenerate = "data.regenerate.temperature=0"
    for words in ([], ["--no-graphs"], [regenerate], [regenerate, "--no-graphs"]):
        with pytest.raises(SystemExit):
            cli.main(["run", "base", *words])
    assert found == [
        (True, True, None, ""),
        (False, False, None, " --no-graphs"),
        (True, True, True, f" {regenerate}"),
        (False, False, False, f" {regenerate} --no-graphs"),
    ]


def test_an_option_without_models_to_run_is_unknown() -> None:
    code, _, err = call("inspect", "chain", "--no-graphs")
    assert code == 2
    assert "--no-graphs" in err
