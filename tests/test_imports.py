"""Who may import whom, and what must answer without torch."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import grimp
import networkx

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "datasets", "deepspeed", "awq", "numpy")
LIGHT_MODULES = (
    "polybasic.chain.base.settings",
    "polybasic.chain.formats.lineage",
    "polybasic.chain.formats.manifest",
    "polybasic.train.settings",
    "polybasic.quantize.settings",
    "polybasic.deploy",
    "polybasic.deploy.bench.peers.catalogue",
    "polybasic.deploy.runtime.memory",
    "polybasic.deploy.planner.settings",
    "polybasic.deploy.planner.theory",
    "polybasic.recipes.schema.recipe",
    "polybasic.recipes.schema.loading",
    "polybasic.recipes.estimates.dry_run",
    "polybasic.recipes.pipeline.stages",
    "polybasic.recipes.cli.main",
)


def heavy_imports_after(*codes: str) -> list[list[str]]:
    """What is heavy of all that a process has imported after each piece of code."""
    report = f"print('heavy:', *(name for name in {HEAVY} if name in sys.modules))"
    steps = "\n".join(f"try:\n {code}\nfinally:\n {report}" for code in codes)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{steps}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    return [names for first, *names in filter(None, lines) if first == "heavy:"]


def test_light_modules_import_nothing_heavy() -> None:
    """One after another, so that the first with a finding is the one that imports."""
    modules = (*LIGHT_MODULES, "polybasic.chain.model.loading")
    *light, heavy = heavy_imports_after(*(f"import {module}" for module in modules))
    assert dict(zip(modules, light, strict=False)) == {name: [] for name in LIGHT_MODULES}
    assert "torch" in heavy


def test_inspect_and_verify_import_nothing_heavy(tiny_chain: Path) -> None:
    given = f"from polybasic.recipes.cli.chain import inspect, verify; chain = {str(tiny_chain)!r}"
    light = heavy_imports_after(given, "inspect(chain)", "verify(chain)")
    assert light == [[], [], []]
    *_, heavy = heavy_imports_after(given, "inspect(chain, memory=True)")
    assert "torch" in heavy


def test_help_imports_nothing_heavy() -> None:
    run = "runpy.run_module('polybasic.recipes.cli.main', run_name='__main__')"
    assert heavy_imports_after(f"import runpy; sys.argv[1:] = ['--help']; {run}") == [[]]


def circles_of(imports: Iterable[tuple[str, str]]) -> list[set[str]]:
    graph = networkx.DiGraph(imports)
    return [each for each in networkx.strongly_connected_components(graph) if len(each) > 1]


def test_no_module_imports_itself_by_way_of_others() -> None:
    packages = tuple(
        f"polybasic.{name}" for name in ("chain", "train", "quantize", "deploy", "recipes")
    )
    found = grimp.build_graph("polybasic", cache_dir=None)
    imports = [
        (module, imported)
        for module in found.modules
        if module.startswith(packages)
        for imported in found.find_modules_directly_imported_by(module)
    ]
    assert len(imports) > 1000
    # a package that hands out names of its modules is imported by those who use them
    assert circles_of(edge for edge in imports if "polybasic.deploy" not in edge) == []
    assert circles_of([*imports, ("polybasic.chain.base.errors", "polybasic.chain.formats.files")])


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
