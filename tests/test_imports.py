"""Who may import whom, and what must answer without torch."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import grimp
import networkx
import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "datasets", "deepspeed", "awq", "numpy")
LIGHT_MODULES = (
    "polybasic.chain.settings",
    "polybasic.chain.formats.manifest",
    "polybasic.train.settings",
    "polybasic.quantize.settings",
    "polybasic.deploy",
    "polybasic.deploy.memory",
    "polybasic.deploy.settings",
    "polybasic.deploy.planner.theory",
    "polybasic.recipes.schema.recipe",
    "polybasic.recipes.schema.loading",
    "polybasic.recipes.estimates.dry_run",
    "polybasic.recipes.pipeline.stages",
    "polybasic.recipes.cli.main",
)


def heavy_imports_of(code: str) -> list[str]:
    """Of what is heavy, all that a process has imported after running some code."""
    report = f"import sys; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"try:\n {code}\nfinally:\n {report}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    assert heavy_imports_of(f"import {module}") == []


def test_a_module_that_imports_torch_is_noticed() -> None:
    assert "torch" in heavy_imports_of("import polybasic.chain.model.decoder")


def test_help_imports_nothing_heavy() -> None:
    run = "runpy.run_module('polybasic.recipes.cli.main', run_name='__main__')"
    code = f"import runpy, sys; sys.argv[1:] = ['--help']; {run}"
    assert heavy_imports_of(code) == []


def circles_of(imports: Iterable[tuple[str, str]]) -> list[set[str]]:
    graph = networkx.DiGraph(imports)
    return [each for each in networkx.strongly_connected_components(graph) if len(each) > 1]


def test_no_module_imports_itself_by_way_of_others() -> None:
    packages = [f"polybasic.{name}" for name in ("chain", "train", "quantize", "deploy", "recipes")]
    found = grimp.build_graph(*packages, cache_dir=None)
    imports = [
        (module, imported)
        for module in found.modules
        for imported in found.find_modules_directly_imported_by(module)
    ]
    # a package that hands out names of its modules is imported by those who use them
    assert circles_of(edge for edge in imports if "polybasic.deploy" not in edge) == []
    assert circles_of([*imports, ("polybasic.chain.errors", "polybasic.chain.formats.files")])


def lint_imports(folder: Path) -> subprocess.CompletedProcess:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_import_rules_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


def test_a_broken_import_rule_is_noticed(tmp_path: Path) -> None:
    rules = (ROOT / "pyproject.toml").read_text("utf-8")
    turned = rules.replace(
        '"polybasic.recipes", "polybasic.train | polybasic.quantize | polybasic.deploy"',
        '"polybasic.train | polybasic.quantize | polybasic.deploy", "polybasic.recipes"',
    )
    assert turned != rules
    (tmp_path / "pyproject.toml").write_text(turned, "utf-8")
    assert lint_imports(tmp_path).returncode == 1
